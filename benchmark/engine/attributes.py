"""What a method's modules hold besides the numbers in their tensors: whether any of it has changed."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from operator import is_
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from benchmark.contract import Stage

#: torch's and Lightning's own business, and what the first checkpoint asks of the engine
FOREIGN = frozenset(vars(LightningModule())) | {"frozen_hash"}
FOREIGN -= {"training", "_parameters", "_buffers", "_modules", "_forward_hooks"}


class Attributes:
    """Remembers the attributes of a module and its submodules, by stage, and sees when one is another.

    Containers and data classes are what they were if what they hold is; tensors, modules and all else if they are the
    same objects.

    Args:
        method: the module.
        engine: modules in it that are none of a method's own.
    """

    def __init__(self, method: nn.Module, engine: Sequence[nn.Module]) -> None:
        inside = {part for module in engine for part in module.modules()}
        self._modules = [module for module in method.modules() if module not in inside]
        self._known: dict[Stage, tuple[_Held, list[dict[str, Any]]]] = {}

    def unchanged(self, stage: Stage) -> bool:
        """Whether all is as when the stage was last asked about; what is new is remembered."""
        held, known = self._known.get(stage, (None, []))
        if held is not None and held.untouched():
            return True
        same = held is not None and all(map(_same, map(_own, self._modules), known))
        if not same:
            known = [{name: _kept(value) for name, value in _own(module).items()} for module in self._modules]
        self._known[stage] = _Held(map(vars, self._modules)), known
        return same


class _Held:
    """The objects in some dicts and in the containers in them, to see in next to no time that all are the same.

    Args:
        dicts: what is looked at.
    """

    def __init__(self, dicts: Iterable[dict[str, Any]]) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._others: list[Any] = []
        #: nearly all, and they stay so
        self._empty: list[Any] = []
        #: data classes with slots are not looked into
        self._certain = True
        found: set[int] = set()
        todo: list[Any] = list(dicts)
        while todo:
            part = todo.pop()
            if isinstance(part, dict | list | tuple | set) and id(part) not in found:
                found.add(id(part))
                kind: list[Any] = self._dicts if isinstance(part, dict) else self._others
                (kind if part else self._empty).append(part)
                todo += part.values() if isinstance(part, dict) else part
            elif is_dataclass(part) and not isinstance(part, type):
                self._certain = self._certain and hasattr(part, "__dict__")
                todo.append(getattr(part, "__dict__", None))
        self._lengths = self._now_lengths()
        self._objects = list(self._now())

    def untouched(self) -> bool:
        """Whether the same objects are in the same places."""
        if not self._certain or any(self._empty) or self._now_lengths() != self._lengths:
            return False
        return all(map(is_, self._now(), self._objects))

    def _now_lengths(self) -> list[int]:
        return list(map(len, chain(self._dicts, self._others)))

    def _now(self) -> Iterable[Any]:
        inside = map(dict.values, self._dicts)
        return chain(chain.from_iterable(self._dicts), chain.from_iterable(inside), chain.from_iterable(self._others))


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in FOREIGN}


def _kept(value: Any) -> Any:
    """Return a copy of containers and data classes, as deep as they go; of all else the object."""
    if isinstance(value, dict):
        return {key: _kept(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_kept(held) for held in value]
    if isinstance(value, set):
        return set(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _kept(getattr(value, field.name)) for field in fields(value)}
    return value


def _same(value: Any, kept: Any) -> bool:
    """Whether a value is as it was when ``_kept`` returned this of it."""
    if value is kept:
        return True
    if isinstance(kept, dict):
        if isinstance(value, dict):
            return value.keys() == kept.keys() and all(_same(held, kept[key]) for key, held in value.items())
        return is_dataclass(value) and all(_same(getattr(value, name, kept), held) for name, held in kept.items())
    if isinstance(kept, list):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(kept)
            and all(_same(held, before) for held, before in zip(value, kept, strict=True))
        )
    return isinstance(kept, int | float | str | set) and type(value) is type(kept) and bool(value == kept)
