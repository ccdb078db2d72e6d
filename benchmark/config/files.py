"""Configuration files of a run: method x suite, in either order, and files that stand on others.

Some keys of a file are no options of a run: three put it together with others, and ``search`` is for
:mod:`benchmark.tuning`. ``data`` takes several files::

    base: [methods/fedvpt.yaml, suites/digits.yaml]  # files that are read before this one

    data: [sources/cifar10.yaml, partitions/iid.yaml, {batch_size: 16}]  # files and mappings, later ones win

    method: fedvpt                # of a method file: the name by which suites know it
    model: methods.FedVPT
    search:                       # what ``benchmark tune`` tries of it
      model.init_args.training.lr: [0.01, 0.05, 0.1, 0.25]

    per_method:                   # of a suite: what single methods have there instead of what it says for all
      - methods: [fedvpt, pfedpg]
        model.init_args.training: {lr: 0.1, epochs: 1}  # an option, from its class's default on; null takes it away

Files are named as seen from the one in which the name stands, or as ``--config`` takes them: from any folder,
``configs/suites/digits.yaml`` and ``suites/digits`` are the one that came with the code.

A file with ``method``, which describes a method, is read before those that give options of it (``model.init_args``),
wherever it stands. Else later files win, as everywhere in ``lightning-cli``, and a file over those it stands on; where
options stand before the file that names their class (``model.class_path``), the name alone is read first.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from benchmark.config.yaml_files import DEEPEST, mapping_of, read_yaml
from benchmark.errors import ConfigurationError
from benchmark.shipped import configuration, shipped

#: What is no option of a run.
KEYS = frozenset({"base", "method", "per_method", "search"})

#: Files that one configuration may name, and values that all of them may hold, each as often as it is named.
MOST_NAMED, MOST_VALUES = 1000, 20_000


@dataclass
class Reading:
    """The files of one configuration: each is read once, and all together are bounded, however they name each other.

    Attributes:
        named: files so far, each as often as it was named.
        values: that stand in them.
    """

    named: int = 0
    values: int = 0
    _contents: dict[Path, Any] = field(default_factory=dict)

    def content(self, path: Path, inside: Sequence[Path] = ()) -> Any:
        """A YAML file's content as it stands there.

        Args:
            path: the file.
            inside: the files that name it, one the other.

        Raises:
            ConfigurationError: it cannot be read (:func:`benchmark.config.yaml_files.read_yaml`), too many files are
                named, or they name each other too deeply.
        """
        self.named += 1
        if self.named > MOST_NAMED:
            raise ConfigurationError(f"{path} is named after {MOST_NAMED:,} files of one configuration; name fewer")
        if len(inside) >= DEEPEST:
            raise ConfigurationError(
                f"{path} is named by a file that another one names, and so on {DEEPEST} times; take fewer files"
            )
        at = real(path)
        if at not in self._contents:
            self._contents[at] = read_yaml(path)
        return self._contents[at]

    def count(self, path: Path) -> None:
        """Count a value that stands in a file.

        Raises:
            ConfigurationError: there are too many.
        """
        self.values += 1
        if self.values > MOST_VALUES:
            raise ConfigurationError(
                f"{path}: the files of one configuration hold more than {MOST_VALUES:,} values, each as often as its "
                "file is named; name fewer"
            )

    def inlined(self, value: Any, path: Path, inside: tuple[Path, ...] = (), depth: int = 0) -> Any:
        """A value of the file ``path``, with the YAML files that it refers to, seen from there, in their places.

        Args:
            value: that stands in the file.
            path: the file.
            inside: the files that name it, one the other.
            depth: mappings and lists that the value lies in.

        Raises:
            ConfigurationError: as :meth:`content`; a file lies within itself; too many values, or too deep ones.
        """
        self.count(path)
        if depth > DEEPEST:
            raise ConfigurationError(
                f"{path}: more than {DEEPEST} mappings and lists inside each other, with its files"
            )
        if isinstance(value, dict):
            return {str(key): self.inlined(entry, path, inside, depth + 1) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.inlined(entry, path, inside, depth + 1) for entry in value]
        if names_file(value, path):
            other, inside = path.parent / value, (*inside, real(path))
            if real(other) in inside:
                raise ConfigurationError(f"{path} includes {other}, in which it lies itself; take one of them out")
            return self.inlined(self.content(other, inside), other, inside, depth)
        return value


@dataclass(frozen=True)
class Layer:
    """The options that a file gives a run, or a method file together with the suite that is read after it.

    Attributes:
        at: position of the given file that it comes from.
        path: the file.
        given: content of the file, unchanged.
        below: its base files, direct and indirect.
        composed: options and values of a file that has one of :data:`KEYS`, or whose ``data`` has a form that
            lightning-cli cannot read; None if lightning-cli reads the file unchanged.
    """

    at: int
    path: Path
    given: dict[str, Any]
    below: frozenset[Path] = frozenset()
    composed: dict[str, Any] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options and values, with the files that the values name put in their places."""
        return inlined(self.given, self.path) if self.composed is None else self.composed

    @property
    def method(self) -> str | None:
        """The name by which suites know the method that the file describes."""
        name: str | None = self.given.get("method")
        return name

    @property
    def names_class(self) -> bool:
        """Return whether the file names the method's class."""
        model = self.given.get("model")
        return "class_path" in model if isinstance(model, dict) else model is not None


def read_layers(paths: Sequence[Path]) -> list[Layer]:
    """Read the configuration files of a run, with their bases, in the order in which they are applied.

    Args:
        paths: the given files; later ones win, and a later method's file takes an earlier one's place. Files that come
            with the code are found from any folder.

    Raises:
        ConfigurationError: a file cannot be read, contains itself, or combines files in an unknown way; a method's file
            is given before a file that brings another method, which would win unseen.
    """
    reading = Reading()
    given = [list(_with_bases(shipped(path), at, reading)) for at, path in enumerate(paths)]
    _refuse_lost_method(paths, given)
    every = [layer for own in given for layer in own]
    method = next((file.method for file in reversed(every) if file.method), None)
    stands_on = {path for file in every if file.method == method for path in file.below}
    files = _method_first([file for file in every if file.method in (None, method) or real(file.path) in stands_on])
    layers: list[Layer] = []
    for layer in (_composed(file, method) for file in files):
        if "per_method" in layer.given and layers and layers[-1].method:
            layers[-1] = replace(layers[-1], composed=_merged(layers[-1].options, layer.options))
        else:
            layers.append(layer)
    return layers


def _refuse_lost_method(paths: Sequence[Path], given: Sequence[Sequence[Layer]]) -> None:
    """Refuse a method's file before a file that brings another method, which would win unseen."""
    chosen: tuple[Path, str] | None = None
    for path, files in zip(paths, given, strict=True):
        brought = [file.method for file in files if file.method]
        if chosen and any(method != chosen[1] for method in brought):
            raise ConfigurationError(
                f"{chosen[0]} is the method {chosen[1]}, and {path}, given after it, brings the method {brought[-1]}, "
                f"which would win; give {chosen[0]} last, or leave it out"
            )
        if files and (own := files[-1].method):
            chosen = path, own


def read_content(path: Path) -> Any:
    """A YAML file's content, with the YAML files it refers to put in their places.

    Raises:
        ConfigurationError: a file is missing, is no YAML, or lies within itself.
    """
    reading = Reading()
    return reading.inlined(reading.content(path), path)


def inlined(value: Any, path: Path) -> Any:
    """Replace the names of YAML files in a value of the file ``path`` by the files' content.

    The names are relative to ``path``.
    """
    return Reading().inlined(value, path)


def real(path: Path) -> Path:
    """Return a file's absolute path without links; unresolved if the path is not valid, as its reader reports that."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL
        return path.absolute()


def names_file(value: Any, path: Path) -> bool:
    """Return whether a value of the file ``path`` is the name of an existing YAML file, relative to ``path``."""
    return isinstance(value, str) and value.endswith((".yaml", ".yml")) and os.path.isfile(path.parent / value)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two mappings in one; where both have a value that is no mapping, the second's."""
    result = dict(first)
    for key, value in second.items():
        before = result.get(key)
        if isinstance(before, str) and isinstance(value, dict) and "init_args" in value:
            before = {"class_path": before}
        result[key] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def _with_bases(path: Path, at: int, reading: Reading, inside: tuple[Path, ...] = ()) -> Iterator[Layer]:
    """The files that a file stands on, those furthest down first, and the file itself."""
    if real(path) in inside:
        raise ConfigurationError(f"{path} is a base of itself; take one of the bases out")
    given = mapping_of(reading.content(path, inside), path)
    bases = given.get("base", [])
    if not isinstance(bases, list) or not all(isinstance(entry, str) for entry in bases):
        raise ConfigurationError(f"{path}: base: expected a list of configuration files, got {str(bases)[:80]}")
    below: set[Path] = set()
    for entry in bases:
        for file in _with_bases(_named(entry, path), at, reading, (*inside, real(path))):
            below.add(real(file.path))
            yield file
    name = given.get("method")
    if not isinstance(name, str | None):
        raise ConfigurationError(f"{path}: method: expected the name by which suites know it, got {str(name)[:80]}")
    if set(given) != {"base"}:
        yield Layer(at, path, given, frozenset(below))


def _named(entry: str, path: Path) -> Path:
    """The file that a file names: as seen from it, else as ``--config`` takes it."""
    beside = path.parent / entry
    return beside if os.path.isfile(beside) else configuration(entry) or beside


def _method_first(files: Sequence[Layer]) -> list[Layer]:
    """The files, with the first that names a method's class, or that name alone, before those with options of it."""
    named = next((position for position, file in enumerate(files) if file.names_class), None)
    first = next((position for position, file in enumerate(files[:named]) if "model" in file.given), named)
    if named is None or first is None or first == named:
        return list(files)
    file = replace(files[named], at=files[first].at)
    if file.method and not any(real(other.path) in file.below for other in files[first:named]):
        return [*files[:first], file, *files[first:named], *files[named + 1 :]]
    model = file.given["model"]
    head: dict[str, Any] = {"model": {"class_path": model["class_path"] if isinstance(model, dict) else model}}
    given = head if file.method is None else {"method": file.method, **head}
    return [*files[:first], replace(file, given=given, composed=head), *files[first:]]


def _composed(file: Layer, method: str | None) -> Layer:
    """The file with what it gives a run of the method of this name."""
    if file.composed is not None:
        return file
    data = file.given.get("data")
    elsewhere = isinstance(data, str) and _named(data, file.path) != file.path.parent / data
    if not KEYS & set(file.given) and not isinstance(data, list) and not elsewhere:
        return file
    options = _inlined({key: value for key, value in file.given.items() if key not in KEYS}, file.path)
    entries = file.given.get("per_method", [])
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries]):
        place = f"{file.path}: per_method[{number}]"
        names = entry.get("methods") if isinstance(entry, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(
                f"{place}: expected methods (a list of names) and the options that they have, got {str(entry)[:80]}"
            )
        for option, value in _inlined(entry, file.path).items() if method in names else ():
            if option != "methods":
                _put(options, option, value, place)
    return replace(file, composed=options)


def _inlined(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Replace the names of files in a file's content by their content, and merge the entries of ``data``."""
    content: dict[str, Any] = inlined(given, path)
    data = content.get("data")
    if isinstance(data, str):
        content["data"] = _read(data, path)
    elif isinstance(data, list):
        data = [_read(entry, path) for entry in data]
        for entry in data:
            if not isinstance(entry, dict):
                said = f"there is no file {entry!r}" if isinstance(entry, str) else f"got {str(entry)[:80]}"
                raise ConfigurationError(f"{path}: data: expected files, as seen from it, and mappings; {said}")
        content["data"] = reduce(_merged, data, dict[str, Any]())
    return content


def _read(entry: Any, path: Path) -> Any:
    """Return the content of the file that an entry names; an entry that names none is returned unchanged."""
    named = _named(entry, path) if isinstance(entry, str) else None
    return read_content(named) if named is not None and os.path.isfile(named) else entry


def _put(options: dict[str, Any], option: str, value: Any, place: str) -> None:
    """Give an option, by its dotted name, another value; None takes it away."""
    *groups, last = option.split(".")
    inner = options
    for group in groups:
        inner = inner.setdefault(group, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(f"{place}: {option}: {group} is a single value before; write it as a mapping")
    if value is None:
        inner.pop(last, None)
    else:
        inner[last] = value
