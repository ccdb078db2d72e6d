"""YAML files of users: read safely and within limits, with errors that name the file and what is wrong in it."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from benchmark.errors import ConfigurationError
from benchmark.files import read_regular

T = TypeVar("T")

#: Mappings and lists inside each other; configurations have about eight.
DEEPEST = 40

#: Bytes of a file, and values in it; the largest one here has 41 kB and a thousand.
MOST_BYTES, MOST_VALUES = 2**20, 50_000

#: Values that aliases (``*name``) may stand for in one file, counted as often as they are named.
MOST_ALIASED = 10_000

#: Texts that are numbers to the parser of options, though not to YAML, unless they stand in quotes.
NUMBERS = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+")


class Quoted(str):
    """A text that stands in quotes wherever it is written: without them ``1e3`` is a number to the parser."""

    __slots__ = ()


def read_yaml(path: str | Path) -> Any:
    """The content of a YAML file; None of an empty one.

    Raises:
        ConfigurationError: the file is missing, too large, no text in UTF-8, or is refused by :func:`parse_yaml`.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "no regular file"
            raise ConfigurationError(f"{path} cannot be read: it is {kind}; expected a YAML file")
        text = read_regular(path, MOST_BYTES, links=True).decode()
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path} cannot be read: there is no such file, seen from {Path.cwd()}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} cannot be read: it is no text in UTF-8 (byte {error.start}); expected a YAML file"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigurationError(f"{path} cannot be read: {reason}") from error
    return parse_yaml(text, str(path))


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The content of a YAML file of ``key: value`` lines, at least one.

    Raises:
        ConfigurationError: as :func:`read_yaml`, or the file is empty or holds something else.
    """
    return mapping_of(read_yaml(path), path)


def mapping_of(content: Any, path: str | Path) -> dict[str, Any]:
    """A YAML file's content, a mapping with at least one key.

    Raises:
        ConfigurationError: it is none; names the file.
    """
    if isinstance(content, dict) and content:
        return content
    kind = {"dict": "nothing", "NoneType": "nothing", "list": "a list"}.get(type(content).__name__, "a single value")
    raise ConfigurationError(f"{path} holds {kind}; expected configuration keys, each with its value (key: value)")


def as_declared(kind: type[T], content: Any, name: str) -> T:
    """A YAML file's content as an object of a class that declares its keys and their types, a dataclass for example.

    Args:
        kind: the class.
        content: as it was read.
        name: what to call it in errors.

    Raises:
        ConfigurationError: a key is missing, or a value is of another type; an unknown key, where the class forbids it.
    """
    from pydantic import TypeAdapter, ValidationError

    try:  # as JSON, of which pydantic makes dataclasses without making numbers of texts
        return TypeAdapter(kind).validate_json(json.dumps(content, default=str), strict=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[:3]
        said = [f"{'.'.join(map(str, e['loc']))} ({e['msg']}, got {e['input']!r:.80})" for e in wrong]
        raise ConfigurationError(f"{name}: {'; '.join(said)}") from error


def parse_yaml(text: str, name: str) -> Any:
    """The content of a YAML text, of the types that YAML itself knows.

    Args:
        text: one document.
        name: what to call it in errors, such as the file's path.

    Raises:
        ConfigurationError: no YAML, a tag such as ``!!python/object``, or refused by :func:`check_yaml`.
    """
    import yaml

    try:
        check_yaml(text, name)
        return yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist, an impossible number
        raise ConfigurationError(_said(error, name)) from error


def dump_yaml(content: Any, **options: Any) -> str:
    """Return a YAML text that the parser of options reads as this content, whose texts stay texts.

    Args:
        content: of types that YAML itself knows.
        options: of ``yaml.dump``.
    """
    import yaml

    _loader()  # which teaches the dumpers

    class Dumper(yaml.SafeDumper):
        """Writes each text that looks like a number in quotes."""

    def written(dumper: Any, text: str) -> Any:
        return dumper.represent_data(Quoted(text)) if NUMBERS.fullmatch(text) else dumper.represent_str(text)

    Dumper.add_representer(str, written)
    return str(yaml.dump(content, Dumper=Dumper, **options))


@cache
def _loader() -> Any:
    """Return what reads YAML and keeps the quotes of texts that look like numbers, which dumpers then write."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # C is ten times as fast
        pass

    def text(loader: Any, node: Any) -> str:
        value = str(loader.construct_scalar(node))
        return Quoted(value) if node.style in ("'", '"') and NUMBERS.fullmatch(value) else value

    def quoted(dumper: Any, value: Quoted) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", str(value), style="'")

    Loader.add_constructor("tag:yaml.org,2002:str", text)
    yaml.SafeDumper.add_representer(Quoted, quoted)
    return Loader


def check_yaml(text: str, name: str) -> None:
    """Refuse a YAML text that means something else than its reader sees.

    Nothing is built: time and memory grow with the length of the text alone, whatever stands in it.

    Raises:
        ConfigurationError: a key that stands twice in one mapping; more than :data:`DEEPEST` levels or
            :data:`MOST_VALUES` values; aliases that stand for more than :data:`MOST_ALIASED` values, or for what they
            lie in themselves.
        yaml.YAMLError: it is no YAML.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    sizes: dict[str, int | None] = {}  # per anchor, how many values it stands for; None while they are being read
    opened: list[_Collection] = []
    aliased = values = 0
    for event in yaml.parse(text, Loader=loader):
        mark: Any = event.start_mark
        place = f"{name}, line {mark.line + 1}"
        values += isinstance(event, yaml.NodeEvent)
        if values > MOST_VALUES:
            raise ConfigurationError(f"{place}: more than {MOST_VALUES:,} values; expected a file that one wrote")
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append(_Collection(isinstance(event, yaml.MappingStartEvent), event.anchor))
            if event.anchor is not None:
                sizes[event.anchor] = None
            if len(opened) > DEEPEST:
                raise ConfigurationError(f"{place}: more than {DEEPEST} mappings and lists inside each other")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            closed = opened.pop()
            anchor, size = closed.anchor, closed.size
        elif isinstance(event, yaml.AliasEvent):
            found = sizes.get(str(event.anchor), 1)  # an anchor that is not there is refused by whoever loads
            if found is None:
                raise ConfigurationError(f"{place}: the alias *{event.anchor} lies in what it stands for")
            anchor, size = None, found
            aliased += size
            if aliased > MOST_ALIASED:
                raise ConfigurationError(
                    f"{place}: aliases stand for more than {MOST_ALIASED:,} values; write the values out, or fewer"
                )
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 1
        else:  # where a stream or a document begins and ends
            continue
        if anchor is not None:
            sizes[anchor] = size
        scalar = event.value if isinstance(event, yaml.ScalarEvent) else None
        if opened and opened[-1].repeats(size, scalar):
            raise ConfigurationError(f"{place}: the key {scalar!r} stands there twice; keep one of them")


class _Collection:
    """A mapping or list that is being read: how many values it holds, and a mapping's keys."""

    def __init__(self, is_mapping: bool, anchor: str | None) -> None:
        self.is_mapping = is_mapping
        self.anchor = anchor
        self.size = 1
        self.children = 0
        self.keys: set[str] = set()

    def repeats(self, size: int, scalar: str | None) -> bool:
        """Take the next key or value; whether it is a key that was there before."""
        is_key = self.is_mapping and self.children % 2 == 0
        self.children += 1
        self.size += size
        if not is_key or scalar is None:
            return False
        known = scalar in self.keys
        self.keys.add(scalar)
        return known


def _said(error: Exception, name: str) -> str:
    """An error of the YAML library in one line, with the file's name instead of the library's."""
    mark = getattr(error, "problem_mark", None)
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    said = [getattr(error, "context", None), getattr(error, "problem", None)]
    reason = ", ".join(part for part in said if part) or " ".join(str(error).split())
    return f"{name}{where} cannot be read as YAML: {reason}"
