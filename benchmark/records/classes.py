"""What the classes that a run's configuration names say of themselves, such as what a reader calls them."""

import importlib
from typing import Any


def class_of(given: Any) -> type | None:
    """The class that a part of a configuration names; None where there is none, or it cannot be imported here."""
    path = given.get("class_path") if isinstance(given, dict) else given
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    try:
        found = getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError):
        return None
    return found if isinstance(found, type) else None


def own(given: Any, attribute: str) -> Any:
    """What the named class itself says, not one that it derives from, which is another; None where it says nothing."""
    kind = class_of(given)
    return None if kind is None else vars(kind).get(attribute)
