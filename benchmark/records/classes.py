"""Ask the classes that a run's configuration names for what they are called."""

import importlib
import sys
from typing import Any

#: Packages that are imported because a record names them. A record may come from anywhere, and importing runs code.
OURS = ("benchmark", "datamodules", "methods")


def class_of(given: Any) -> type | None:
    """The class that a part of a configuration names; None where there is none, or it is neither ours nor imported."""
    path = given.get("class_path") if isinstance(given, dict) else given
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    try:
        known = importlib.import_module(module) if module.split(".")[0] in OURS else sys.modules.get(module)
    except ImportError:
        return None
    found = getattr(known, name, None)
    return found if isinstance(found, type) else None


def name_of(source: Any) -> str:
    """The name that a source has in records, by its part of a configuration; of a class that is not known, the class's.

    A configuration of a record may hold anything; what no source takes gives the class's name, too.
    """
    path, arguments = (source.get("class_path"), source.get("init_args")) if isinstance(source, dict) else (source, {})
    try:
        return str(class_of(source).name_by(arguments or {}))  # type: ignore[union-attr]
    except (AttributeError, KeyError, TypeError):
        return path.rpartition(".")[2] if isinstance(path, str) else ""


def own(given: Any, attribute: str) -> Any:
    """Return an attribute of the named class itself, not of one that it derives from; None where it has none."""
    kind = class_of(given)
    return None if kind is None else vars(kind).get(attribute)
