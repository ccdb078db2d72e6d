"""The benchmark under one name, ``fedprompt``, as it is installed.

The code's own names are those of the repository's folders: ``benchmark``, ``methods``, ``datamodules``. A checkout has
them at its top. A wheel has them inside of ``fedprompt``, with the configurations and the papers' numbers, so that an
environment gets one new name. Importing it makes the folders' names importable in this process::

    from fedprompt.methods import FedVPT  # the same class as methods.FedVPT, by which configurations name it

Raises:
    ImportError: another package of one of these names was imported before.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDERS = ("benchmark", "methods", "datamodules")
_HERE = Path(__file__).resolve().parent
_ROOT = _HERE if (_HERE / "benchmark").is_dir() else _HERE.parents[1]


class _SameModules(MetaPathFinder, Loader):
    """Finds ``fedprompt.methods...`` as ``methods...``: one module, not two."""

    def __init__(self) -> None:
        self._own: dict[str, Any] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inner = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == __name__ and inner.split(".")[0] in _FOLDERS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.name.partition(".")[2])
        self._own[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own.pop(f"{__name__}.{module.__name__}")  # the import put this finder's in its place


def _make_importable() -> None:
    for name in _FOLDERS:
        known = sys.modules.get(name)
        places = [Path(entry).resolve() for entry in getattr(known, "__path__", ())]
        if known is not None and not any((entry.parent / "benchmark" / "contract.py").is_file() for entry in places):
            raise ImportError(
                f"another module {name} was imported before ({getattr(known, '__file__', None)}), and {__name__} has "
                "one of this name; rename yours"
            )
    found = importlib.util.find_spec("benchmark")
    inside = [Path(entry) for entry in (found.submodule_search_locations or () if found else ())]
    if _ROOT == _HERE or not any((entry / "contract.py").is_file() for entry in inside):
        sys.path.insert(0, str(_ROOT))
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for the processes that are started from this one


def run_lightning_cli() -> None:
    """Run the command ``lightning-cli``."""
    importlib.import_module("benchmark.run.start").main()


def run_benchmark() -> int:
    """Run the command ``benchmark``."""
    status: int = importlib.import_module("benchmark.commands").main()
    return status


def __getattr__(name: str) -> Any:
    """Give what ``benchmark`` exports, without importing it before it is asked for."""
    if name.startswith("_") and name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("benchmark"), name)


_make_importable()
sys.meta_path.insert(0, _SameModules())
