"""The messages of a deployment: tensors as safetensors bytes, numbers and lines beside them, in one Flower record."""

from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load, save

from benchmark.errors import ConfigurationError, printable
from benchmark.federation import Broadcast, Values

RECORD = "benchmark"
#: What the message is called with which the server answers uploads, and its kind.
TAKEN = "take"
TAKE = f"{MessageType.TRAIN}.{TAKEN}"
#: Bytes of names, shapes and types beside a message's numbers.
HEADER = 2**20


def content(**fields: Any) -> RecordDict:
    """Return a message's content of plain numbers, texts and bytes."""
    return RecordDict({RECORD: ConfigRecord(fields)})


def fields_of(message: Message) -> Mapping[str, Any]:
    """Return the fields of a message.

    Raises:
        ConfigurationError: it has none.
    """
    record = message.content.get(RECORD)
    if not isinstance(record, ConfigRecord):
        raise ConfigurationError("a message without this package's record; both sides need the same app")
    return record


def packed(values: Values) -> bytes:
    """Return tensors as bytes."""
    return save({name: value.detach().cpu().contiguous() for name, value in values.items()})


def unpacked(content: object, most: int) -> Values:
    """Return the tensors of bytes.

    Args:
        content: what came.
        most: bytes that the tensors may have.

    Raises:
        ConfigurationError: it is too much, or no safetensors.
    """
    if not isinstance(content, bytes):
        raise ConfigurationError(f"tensors are {type(content).__name__}; expected bytes")
    if len(content) > most + HEADER:
        raise ConfigurationError(f"{len(content):,} bytes; expected at most {most:,} and their names")
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigurationError(f"no safetensors ({' '.join(str(error).split())[:100]})") from error


def size_of(values: Values) -> int:
    """Return the bytes of tensors."""
    return sum(value.numel() * value.element_size() for value in values.values())


def to_client(sent: Broadcast, place: int) -> bytes:
    """Return what one of the receivers of a broadcast gets."""
    parts = {f"common/{name}": value for name, value in sent.common.items()}
    parts |= {f"own/{name}": rows[place] for name, rows in sent.own.items()}
    return packed(parts | {f"masks/{name}": rows[place] for name, rows in sent.masks.items()})


def from_server(content: object, most: int) -> Broadcast:
    """Return the broadcast to one client.

    Raises:
        ConfigurationError: see :func:`unpacked`, or a name of no part of a broadcast.
    """
    found: dict[str, Values] = {"common": {}, "own": {}, "masks": {}}
    for name, value in unpacked(content, most).items():
        part, _, of = name.partition("/")
        if part not in found:
            raise ConfigurationError(f"the server sends {name!r:.60}; expected common/, own/ or masks/")
        found[part][of] = value if part == "common" else value.unsqueeze(0)
    return Broadcast(**found)


def line(said: object) -> str:
    """Return what another machine says as one line that is fit for a log."""
    return printable(" ".join(str(said)[:1000].split()))[:300]
