"""A command line's files and options, put together and checked before any library is imported."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from benchmark.config.class_names import Named, check_names, names_in
from benchmark.config.files import Layer, Reading, names_file, read_content, read_layers, real
from benchmark.config.overview import COMMANDS, GROUPS, OTHER_WORDS
from benchmark.config.yaml_files import mapping_of, parse_yaml
from benchmark.errors import ConfigurationError, no_such
from benchmark.shipped import configuration, no_such_configuration

#: Options whose value may be a file.
FILES = ("--config", "--data", "--trainer")
#: Options whose value may begin with a dash.
VALUED = ("-c", *FILES)
START = "lightning-cli fit --config fedvpt_digits (`benchmark configs` lists the names)"
SUITES = "--config suites/digits, or for CLIP --config suites/digits_clip (`benchmark configs suites/` lists them)"


def with_files_read(arguments: Sequence[str]) -> list[str]:
    """Replace composed configuration files in a command line by their merged content.

    Options win over files, whichever stand first.

    Raises:
        ConfigurationError: a named file is no configuration, or only part of one; a command, an option or a class of
            the suite does not exist.
    """
    parts = list(_parts(arguments))
    _check_command(parts)
    paths = [_file(part) for part in parts if part.name == "--config" and not part.is_text]
    layers = read_layers(paths)
    _check_named(parts, layers)
    asks = any("print_config" in part.name or part.name.endswith(("help", "-h")) for part in parts)
    if parts and parts[0].name in COMMANDS and not asks:
        _check_options(parts[1:])
        _check_whole(parts[0].name, parts[1:], layers)
    texts: list[list[str]] = [[] for _ in paths]
    for layer in layers:
        if layer.composed is None:
            check_file(layer.path)
        else:
            _check_entries(layer.composed, "", layer.path, (), Reading())
        texts[layer.at].append(f"--config={layer.path if layer.composed is None else _text(layer.composed)}")
    files = iter(texts)
    read = [_read(part, files) for part in parts]
    check_names([*_class_names(parts, layers)])
    return [word for part in _options_last(read) for word in part.words]


def files_and_options(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the configuration files of a command line, and its other options with a value, in their order."""
    parts = [
        replace(part, value=str(_file(part))) if part.name in FILES and not part.is_text else part
        for part in _parts(arguments)
    ]
    files = [part.value for part in parts if part.name == "--config" and not part.is_text]
    return files, [(part.name, part.value) for part in parts if part.is_option and part.value]


def check_file(path: Path, place: str = "") -> None:
    """Refuse a file that is no configuration, by its name, and so the files that it names.

    Args:
        path: of a YAML file.
        place: the option whose value it holds, such as ``data``; empty for a whole configuration.

    Raises:
        ConfigurationError: it cannot be read as a mapping (see :func:`benchmark.config.yaml_files.read_mapping`),
            contains itself or too much (see :class:`benchmark.config.files.Reading`), or gives what is no name as the
            name of a class.
    """
    reading = Reading()
    _check_entries(mapping_of(reading.content(path), path), place, path, (real(path),), reading)


def _check_entries(value: Any, place: str, path: Path, inside: tuple[Path, ...], reading: Reading) -> None:
    reading.count(path)
    if isinstance(value, list):
        for entry in value:
            _check_entries(entry, place, path, inside, reading)
    if isinstance(value, str) and (place in ("data", "trainer") or names_file(value, path)):
        other = path.parent / value
        if real(other) in inside:
            raise ConfigurationError(f"{other} contains itself")
        _check_entries(mapping_of(reading.content(other, inside), other), place, other, (*inside, real(other)), reading)
    if not isinstance(value, dict):
        return
    for key, entry in value.items():
        option = f"{place}.{key}" if place else str(key)
        if key == "class_path" and not isinstance(entry, str):
            raise ConfigurationError(f"{path}: {option}: expected the name of a class, got {str(entry)[:80]}")
        if option == "data.seed":
            raise ConfigurationError(f"{path}: data.seed comes from seed_everything; give that in its place")
        _check_entries(entry, option, path, inside, reading)


# ----------------------------------------------------------------------------------------------------------- in parts


@dataclass(frozen=True)
class Part:
    """A command, or an option with its value.

    Attributes:
        name: ``fit``, ``--config``, ``--data.batch_size``.
        value: empty where there is none.
        words: of the command line.
    """

    name: str
    value: str
    words: Sequence[str]

    @property
    def is_text(self) -> bool:
        """Return whether the value is YAML text instead of a file's name."""
        return any(sign in self.value for sign in ("{", "\n", ": "))

    @property
    def is_option(self) -> bool:
        """Return whether it is an option other than ``--config``, so neither the command nor a configuration file."""
        return self.name.startswith("-") and self.name != "--config"

    @property
    def names_class(self) -> bool:
        """Return whether it chooses a class, by the class's name or by a file that may hold it."""
        last = self.value.rpartition(".")[2]
        is_class = last.isidentifier() and last[0].isupper()
        return not self.name.endswith("+") and (self.name in FILES or self.name.endswith("class_path") or is_class)


def _parts(arguments: Sequence[str]) -> Iterator[Part]:
    """A command line in parts."""
    left = deque(arguments)
    while left:
        first = left.popleft()
        name, equals, value = first.partition("=")
        words = [first]
        if first.startswith("-") and not equals and left and (name in VALUED or not left[0].startswith("--")):
            value = left.popleft()
            words.append(value)
        yield Part("--config" if name == "-c" else name, value, words)


def _read(part: Part, layers: Iterator[list[str]]) -> Part:
    """An option with the path of the file that it names, and configurations as they were read."""
    if part.name not in FILES or part.is_text:
        return part
    if part.name == "--config":
        return replace(part, words=next(layers))
    path = _file(part)
    check_file(path, part.name.removeprefix("--"))
    return replace(part, words=[f"{part.name}={path}"])


def _file(part: Part) -> Path:
    """The file that an option names.

    Raises:
        ConfigurationError: there is none of this name.
    """
    path = configuration(part.value)
    if path is None and not os.path.exists(part.value):
        raise ConfigurationError(no_such_configuration(part.value))
    return path or Path(part.value)


def _options_last(parts: Sequence[Part]) -> Iterator[Part]:
    """Options after the files, over which they win; one that names a class before them too: they may set it up."""
    last = max((at for at, part in enumerate(parts) if part.name == "--config"), default=-1)
    for at, part in enumerate(parts):
        if at > last or not part.is_option or part.names_class:
            yield part
        if at == last:
            yield from (early for early in parts[:last] if early.is_option)


def _class_names(parts: Sequence[Part], layers: Sequence[Layer]) -> Iterator[Named]:
    """Yield what may name a class in the files and the options of a command line."""
    for layer in layers:
        yield from names_in(layer.options, where=f"{layer.path}: ")
    for part in parts:
        option = part.name.removeprefix("--").rstrip("+")
        if part.is_text:
            try:
                yield from names_in(parse_yaml(part.value, option), "" if option == "config" else option)
            except ConfigurationError:  # which the option's own reader tells
                continue
        elif part.name in FILES:
            path = _file(part)
            yield from names_in(read_content(path), option, f"{path}: ") if option != "config" else ()
        elif part.is_option:
            yield from names_in(part.value, option)


def _text(options: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(options))


# ---------------------------------------------------------------------------------------------------- first mistakes


def _check_command(parts: Sequence[Part]) -> None:
    """Refuse a word in front that is no command."""
    if parts and not parts[0].name.startswith("-") and parts[0].name not in COMMANDS:
        raise ConfigurationError(no_such("command", parts[0].name, COMMANDS))


def _check_options(parts: Sequence[Part]) -> None:
    """Refuse an option under a word that other programs have for it, or one that is misspelled at its beginning."""
    for part in parts:
        name = part.name.removeprefix("--").rstrip("+")
        first = name.partition(".")[0]
        if name in OTHER_WORDS:
            raise ConfigurationError(f"there is no option {name!r}; did you mean {OTHER_WORDS[name]}?")
        like = get_close_matches(first, GROUPS, 1, 0.8)
        if part.name.startswith("--") and first not in GROUPS and like:
            raise ConfigurationError(f"there is no option {name!r}; did you mean {name.replace(first, like[0], 1)}?")


def _check_named(parts: Sequence[Part], layers: Sequence[Layer]) -> None:
    """Refuse options of a method where nothing says which method."""
    settings = next((layer for layer in layers if "model" in layer.given), None)
    if settings and not any(layer.names_class for layer in layers) and not _begins(parts, "--model"):
        raise ConfigurationError(
            f"{settings.path} gives options of a method, and no file says which; "
            "add --config configs/methods/<name>.yaml, or give --model"
        )


def _check_whole(command: str, parts: Sequence[Part], layers: Sequence[Layer]) -> None:
    """Refuse a command that says nothing of a method or of its data, with what is missing."""
    method = next((layer for layer in layers if "model" in layer.given), None)
    has_data = any("data" in (layer.composed or layer.given) for layer in layers) or _begins(parts, "--data")
    if method is None and not has_data and not _begins(parts, "--model"):
        scored = "" if command == "fit" else f"give --run_dir=RUN_DIR of a run to {command}, or "
        raise ConfigurationError(f"neither a method nor data are given; {scored}begin with {START}")
    if not has_data:
        named = f"{method.path} is a method" if method else "a method is given"
        raise ConfigurationError(f"{named}, and its backbone, data and rounds are missing; add a suite: {SUITES}")


def _begins(parts: Sequence[Part], option: str) -> bool:
    """Return whether an option with this prefix is given, or may stand in YAML text given instead of a file's name."""
    return any(part.name.startswith(option) or (part.name == "--config" and part.is_text) for part in parts)
