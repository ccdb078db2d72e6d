"""Misspelled names of the suite's own classes, found in its modules' text before any library is imported."""

import ast
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from benchmark.config.files import read_layers
from benchmark.errors import ConfigurationError, did_you_mean
from benchmark.shipped import SHIPPED, configurations

#: Folders whose modules are the suite's own; names of other packages are left to their import.
PACKAGES = ("benchmark", "methods", "datamodules")
OWN_PATH = re.compile(rf"(fedprompt\.)?(?P<path>({'|'.join(PACKAGES)})(\.[^\W\d]\w*)+)")
FOREIGN_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")

#: Modules of the classes that an option chooses, whose names need no path.
CHOSEN = {
    "model": ("methods",),
    "server": ("methods.servers", "benchmark.privacy", "benchmark.robust", "benchmark.faults", "benchmark.compression"),
    "delivery": ("benchmark.faults", "benchmark.robust", "benchmark.compression"),
    "data.source": ("datamodules",),
    "data.partition": ("datamodules",),
}
#: Folders of ``configs`` with files of these classes.
FOLDERS = {"model": "methods/", "data.source": "sources/", "data.partition": "partitions/"}

#: Options whose values are paths of files, never of classes.
OF_FILES = ("config", "run_dir", "ckpt_path")


@dataclass(frozen=True)
class Named:
    """A value that may name a class.

    Attributes:
        name: the value.
        option: by its dotted name: ``data.source``, ``model.init_args.backbone``; empty outside of options.
        where: it stands, in front of a message: ``"x.yaml: "``.
    """

    name: str
    option: str = ""
    where: str = ""

    @property
    def chosen(self) -> str | None:
        """Return which of :data:`CHOSEN` the option is, None for others."""
        place = re.sub(r"\.(class_path|help)$", "", self.option)
        return place if place in CHOSEN else None

    @property
    def is_class(self) -> bool:
        """Return whether nothing but a class's name can stand there, or it is written like one."""
        return bool(self.chosen or self.option.endswith("class_path") or self.name.rpartition(".")[2][0].isupper())


def names_in(value: Any, option: str = "", where: str = "") -> Iterator[Named]:
    """Yield the texts in a configuration's value that may name classes, with their options."""
    if isinstance(value, str) and value and option not in OF_FILES:
        yield Named(value, option, where)
    for key, entry in value.items() if isinstance(value, dict) else ():
        yield from names_in(entry, f"{option}.{key}" if option else str(key), where)
    for entry in value if isinstance(value, list) else ():
        yield from names_in(entry, option, where)


def names_in_files(paths: Iterable[Path]) -> Iterator[Named]:
    """Yield the same of configuration files.

    Raises:
        ConfigurationError: one cannot be read.
    """
    for layer in read_layers([*paths]):
        yield from names_in(layer.options, where=f"{layer.path}: ")


def check_names(given: Iterable[Named]) -> None:
    """Refuse a name that no class of the suite has.

    A name without a path may also be one of a class in a module that another name has imported, so it is refused only
    where no path of another package is given.

    Args:
        given: all values of a command that may name classes.

    Raises:
        ConfigurationError: there is no such name; names what is like it.
    """
    named = [each for each in given if "\n" not in each.name]
    paths = [(each, found["path"]) for each in named if (found := OWN_PATH.fullmatch(each.name)) and each.is_class]
    for each, path in paths:
        like = _like_unknown(path)
        if like is not None:
            raise ConfigurationError(_no_such(each, like))
    if any(FOREIGN_PATH.fullmatch(each.name) and not OWN_PATH.fullmatch(each.name) for each in named):
        return
    for each in named:
        if each.chosen and _is_bare(each) and each.name not in _classes():
            names = {name.lower(): name for module in CHOSEN[each.chosen] for name in _offered(module)}
            like = [names[name] for name in get_close_matches(each.name.lower(), names)]
            raise ConfigurationError(_no_such(each, like))


def file_of_name(given: str, place: str | None) -> str:
    """Return the configuration that has the name of a class that there is not, and how it is given; else nothing."""
    folder = FOLDERS.get(place or "")
    letters = given.lower().replace("_", "")
    names = (name for name in configurations() if folder and name.startswith(folder))
    found = next((name for name in names if name.removeprefix(folder or "").replace("_", "") == letters), None)
    option = "--config" if folder == "methods/" else "--data"
    return "" if found is None else f", but the file {found}: {option}={found}"


def _no_such(named: Named, like: Iterable[str]) -> str:
    option = f"{place}: " if (place := named.option.removesuffix(".help")) else ""
    said = (
        f"{named.where}{option}there is no {named.name!r}{did_you_mean(like)}{file_of_name(named.name, named.chosen)}"
    )
    listed = f"`lightning-cli fit --{named.chosen}.help` lists them, or " if named.chosen else ""
    return f"{said}; {listed}give the dotted path of a class of your own"


def _is_bare(named: Named) -> bool:
    """Return whether a name has no path: it begins as classes do, or stands where a class must and is no file."""
    must = named.chosen in FOLDERS and named.name not in ("null", "None") and not os.path.exists(named.name)
    return named.name.isidentifier() and (must or named.name[0].isupper())


def _like_unknown(path: str) -> list[str] | None:
    """Return what is like a dotted path that leads nowhere; None where it leads somewhere, or that cannot be seen."""
    inside, *parts = path.split(".")
    for at, part in enumerate(parts):
        file, names = _file(inside), _bound(inside)
        modules = _modules(inside)
        if part in modules:
            inside = f"{inside}.{part}"
            continue
        rest = parts[at + 1 :]
        if part in (names or ()) or file is None or (names is None and not rest):
            return None
        if parts[-1] in _classes():
            return [f"{module}.{parts[-1]}" for module in _classes()[parts[-1]]]
        known = {name.lower(): name for name in [*modules, *(() if rest else names or ())] if not name.startswith("_")}
        return [".".join((inside, known[name], *rest)) for name in get_close_matches(part.lower(), known)]
    return None


@cache
def _file(module: str) -> Path | None:
    """Return the file of a module's text."""
    path = SHIPPED.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@cache
def _modules(module: str) -> frozenset[str]:
    """Return the names of the modules in a package; of a module that is none, nothing."""
    inside = SHIPPED.joinpath(*module.split("."))
    if not inside.is_dir():
        return frozenset()
    folders = (path.name for path in inside.iterdir() if path.is_dir() and path.name.isidentifier())
    return frozenset([*(path.stem for path in inside.glob("*.py") if path.stem != "__init__"), *folders])


@cache
def _bound(module: str) -> frozenset[str] | None:
    """Return the names that a module's text binds; None where it may have others: it imports ``*``, or makes them."""
    file = _file(module)
    if file is None:
        return None
    names: set[str] = set()
    left: list[ast.AST] = [*ast.parse(file.read_text(encoding="utf-8")).body]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            left += ast.iter_child_nodes(node)
    return None if {"*", "__getattr__"} & names else frozenset(names)


def _offered(module: str) -> list[str]:
    """Return the classes of the suite that a module's text imports or defines."""
    return sorted(name for name in _bound(module) or () if name in _classes())


@cache
def _classes() -> dict[str, list[str]]:
    """Return the modules of each class of the suite, by the class's name."""
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for file in sorted((SHIPPED / package).rglob("*.py")):
            module = ".".join(file.relative_to(SHIPPED).with_suffix("").parts).removesuffix(".__init__")
            for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
                found.setdefault(name, []).append(module)
    return found
