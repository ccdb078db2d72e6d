"""Name the code of a run by hashes of the source files of the classes that made it."""

import hashlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType
from typing import Any

#: Top-level packages that are not looked into: the record names their versions.
VERSIONED = frozenset({"torch", "torchvision", "lightning", "timm", "open_clip", "torchmetrics", "numpy", "sklearn"})

#: What every draw goes through, and what orders a client's images: part of the code of each run.
DRAWS = ("benchmark.engine.plan.round_plan", "benchmark.seeds")

#: By module, what ``remember_loaded`` has found.
LOADED: dict[str, str] = {}
INSTALLED = frozenset({"site-packages", "dist-packages"})


def code_of(objects: Iterable[object], config: Any = None) -> dict[str, str]:
    """The source of everything that says what a run computes: by module its file's sha256 (hexadecimal).

    It holds the modules of the objects' classes, of what the configuration names by ``class_path``, and of
    all of their bases, outside of Python's library and of :data:`VERSIONED`, and :data:`DRAWS`. What these modules
    import beyond that is not looked at. A module without a file of its own, such as a notebook's, is left out.

    Args:
        objects: such as the method, its server and its data.
        config: plain values, as deep as they come.
    """
    made = [type(entry) for entry in objects] + list(_named(config))
    names = {*DRAWS, *(base.__module__ for each in made for base in getattr(each, "__mro__", (each,)))}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(names) if _is_looked_into(name)}
    return {
        name: LOADED.get(name) or _sha256(Path(file))
        for name, file in files.items()
        if file is not None and Path(file).is_file()
    }


def remember_loaded() -> None:
    """Hash the source of what has been imported by now, but for installed packages.

    A process that goes on to be forked calls it: by the time of a fork the files may be others than were imported.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and _is_looked_into(name) and not INSTALLED & {*Path(file).parts}:
            LOADED[name] = _sha256(Path(file))


def changed_files(code: dict[str, str]) -> list[str]:
    """Files whose source is another one now, or that are not found any more; nothing is imported."""
    changed = []
    for name, digest in code.items():
        path = _find(name)
        if path is None or _sha256(path) != digest:
            is_package = path is not None and path.name == "__init__.py"
            changed.append(name.replace(".", "/") + ("/__init__.py" if is_package else ".py"))
    return changed


def different_files(codes: Iterable[dict[str, str]]) -> list[str]:
    """Files whose source is not the same in all of several runs."""
    codes = list(codes)
    names = sorted({name for code in codes for name in code})
    return [f"{name.replace('.', '/')}.py" for name in names if len({code.get(name) for code in codes}) > 1]


def combined(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """The code of a run that was begun with one code and ended with another: no single source is the same as both."""
    if changed := sorted(name for name, digest in now.items() if before.get(name, digest) != digest):
        warnings.warn(
            f"the run goes on with other code than it was begun with, as its record will say: {', '.join(changed)}",
            stacklevel=2,
        )
    return {
        name: digest if before.get(name, digest) == digest else f"{before[name]}, then {digest}"
        for name, digest in {**before, **now}.items()
    }


def _is_looked_into(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in VERSIONED and top not in sys.stdlib_module_names and module != "__main__"


def _named(config: Any) -> Iterator[Any]:
    """Classes and functions that stand as ``class_path`` in a configuration, as far as they have been imported."""
    if isinstance(config, dict):
        module, _, name = str(config.get("class_path", "")).rpartition(".")
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type | FunctionType):
            yield found
    for part in config.values() if isinstance(config, dict) else config if isinstance(config, list | tuple) else ():
        yield from _named(part)


def _find(module: str) -> Path | None:
    """The file of a module, found as a run would find it, without importing the packages that it lies in."""
    top, *below = module.split(".")
    # Runs are started by `python -m`, which looks into the present folder first.
    spec = PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    for depth in range(len(below)):
        if spec is None:
            return None
        name = ".".join([top, *below[: depth + 1]])
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations or []))
    return None if spec is None or spec.origin is None or not Path(spec.origin).is_file() else Path(spec.origin)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
