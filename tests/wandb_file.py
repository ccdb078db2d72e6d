"""A reader of W&B's files of offline runs: records of its protocol in LevelDB's log format.

W&B reads such files with its own program; its Python package has the protocol, but no reader any more.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

#: Bytes of the file's header, of a block, and of the header of a part: checksum, length, kind.
HEADER, BLOCK, PART = 7, 32768, 7
#: Kinds of parts that end a record: whole ones, and last ones.
ENDS = (1, 4)


def records(path: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file."""
    data, at, record = path.read_bytes(), HEADER, b""
    while at + PART <= len(data):
        if BLOCK - at % BLOCK < PART:  # no part begins so near to the end of a block
            at += BLOCK - at % BLOCK
            continue
        begin, end = at + PART, at + PART + int.from_bytes(data[at + 4 : at + 6], "little")
        record += data[begin:end]
        if data[at + 6] in ENDS:
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""
        at = end


def content(items: Any) -> dict[str, Any]:
    """Names and values of configurations, histories and summaries."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
