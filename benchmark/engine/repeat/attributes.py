"""Notice changes of what a method's modules hold besides the numbers in their tensors."""

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from itertools import chain
from operator import is_
from pathlib import PurePath
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from benchmark.contract import Stage

#: torch's and Lightning's own business, and what the first checkpoint asks of the engine
FOREIGN = frozenset(vars(LightningModule())) | {"frozen_hash"}
FOREIGN -= {"training", "_parameters", "_buffers", "_modules", "_forward_hooks"}

#: Packages, and this one, whose objects but for data classes are not looked into: no method's own, and some large.
LIBRARIES = {"benchmark", "torch", "torchvision", "lightning", "timm", "open_clip"}
LIBRARIES |= sys.stdlib_module_names - {"types", "argparse"}
CONTAINERS = (dict, list, tuple, set, deque)
#: What is the same object, or equal.
PLAIN = (bool, int, float, complex, str, bytes)
#: What is the same only as the same object.
OPAQUE = (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType, PurePath)


class Attributes:
    """Remembers the attributes of a module and its submodules, by stage, and sees when one is another.

    Containers, data classes and arrays are compared by content; tensors, modules, functions and objects of libraries by
    identity; other objects by both.

    Args:
        method: the module.
        engine: modules in it that are none of a method's own.
    """

    def __init__(self, method: nn.Module, engine: Sequence[nn.Module]) -> None:
        inside = {part for module in engine for part in module.modules()}
        self._modules = [module for module in method.modules() if module not in inside]
        self._known: dict[Stage, tuple[_Held, list[Any]]] = {}

    def unchanged(self, stage: Stage) -> bool:
        """Return whether all is as when the stage was last asked about; what is new is remembered."""
        held, known = self._known.get(stage, (None, []))
        if held is not None and held.untouched():
            return True
        own = [{name: value for name, value in vars(m).items() if name not in FOREIGN} for m in self._modules]
        same = held is not None and _same(own, known, set())
        if not same:
            known = _kept(own, {})
        self._known[stage] = _Held(map(vars, self._modules)), known
        return same


class _Held:
    """The objects in some dicts and in what these hold, to see in next to no time that all are the same.

    Args:
        dicts: what is looked at.
    """

    def __init__(self, dicts: Iterable[dict[str, Any]]) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._others: list[Any] = []
        #: nearly all, and they stay so
        self._empty: list[Any] = []
        #: objects with slots, and arrays, are not looked into
        self._certain = True
        found: set[int] = set()
        todo: list[Any] = list(dicts)
        while todo:
            part = todo.pop()
            held = part if isinstance(part, CONTAINERS) else None
            if _is_object(part):
                held = getattr(part, "__dict__", None)
                self._certain = self._certain and held is not None and not any(map(_slots, type(part).__mro__))
            if held is not None and id(held) not in found:
                found.add(id(held))
                kind: list[Any] = self._dicts if isinstance(held, dict) else self._others
                (kind if held else self._empty).append(held)
                todo += held.values() if isinstance(held, dict) else held
        self._lengths = self._now_lengths()
        self._objects = list(self._now())

    def untouched(self) -> bool:
        """Return whether the same objects are in the same places."""
        if not self._certain or any(self._empty) or self._now_lengths() != self._lengths:
            return False
        return all(map(is_, self._now(), self._objects))

    def _now_lengths(self) -> list[int]:
        return list(map(len, chain(self._dicts, self._others)))

    def _now(self) -> Iterable[Any]:
        inside = map(dict.values, self._dicts)
        return chain(chain.from_iterable(self._dicts), chain.from_iterable(inside), chain.from_iterable(self._others))


class _Copy(NamedTuple):
    """Copy of what an object held, with the object where another of the same contents is not the same."""

    kind: type
    of: Any
    held: Any


def _is_object(value: Any) -> bool:
    """Return whether a value may change in itself and is no container: an array, a data class, an object."""
    if value is None or isinstance(value, (*PLAIN, *OPAQUE, *CONTAINERS)):
        return False
    if isinstance(value, np.ndarray) or is_dataclass(value):
        return True
    kind = type(value)
    has_attributes = hasattr(value, "__dict__") or any(map(_slots, kind.__mro__))
    return has_attributes and kind.__module__.partition(".")[0] not in LIBRARIES


def _inside(value: Any) -> Any:
    """Return what a container or an object holds, as a container or an array; None of all else."""
    if isinstance(value, (*CONTAINERS, np.ndarray)):
        return value
    if not _is_object(value):
        return None
    slots = [name for base in type(value).__mro__ for name in _slots(base) if hasattr(value, name)]
    return {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})


def _slots(kind: type) -> Sequence[str]:
    named = vars(kind).get("__slots__", ())
    return (named,) if isinstance(named, str) else tuple(named)


def _kept(value: Any, made: dict[int, _Copy]) -> Any:
    """Return a copy of what containers and objects hold, as deep as they go; of all else the object.

    ``made``: by id, what has been copied: of what holds itself, there is one copy.
    """
    held = _inside(value)
    if held is None:
        return value
    if id(value) not in made:
        by_contents = isinstance(value, (*CONTAINERS, np.ndarray)) or is_dataclass(value)
        parts: Any = [] if isinstance(held, list | tuple | deque) else {} if isinstance(held, dict) else held.copy()
        made[id(value)] = _Copy(type(value), None if by_contents else value, parts)
        if isinstance(held, dict):
            parts.update((key, _kept(part, made)) for key, part in held.items())
        elif isinstance(parts, list):
            parts.extend(_kept(part, made) for part in held)
    return made[id(value)]


def _same(value: Any, kept: Any, compared: set[tuple[int, int]]) -> bool:
    """Return whether a value is as when ``_kept`` returned this of it; ``compared``: what holds itself, once."""
    if not isinstance(kept, _Copy):
        return value is kept or (isinstance(kept, PLAIN) and type(value) is type(kept) and bool(value == kept))
    if type(value) is not kept.kind or (kept.of is not None and value is not kept.of):
        return False
    if (id(value), id(kept)) in compared:
        return True
    compared.add((id(value), id(kept)))
    held, before = _inside(value), kept.held
    if isinstance(before, np.ndarray):
        return held.dtype == before.dtype and np.array_equal(held, before, equal_nan=before.dtype.kind in "fc")
    if isinstance(before, set):
        return bool(held == before)
    if isinstance(before, dict):
        return held.keys() == before.keys() and all(_same(held[key], was, compared) for key, was in before.items())
    return len(held) == len(before) and all(_same(now, was, compared) for now, was in zip(held, before, strict=True))
