"""The operations that torch carries out in a function, below autograd and vmap."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from benchmark.internals import TorchDispatchMode, tree_map

#: What no list holds: draws, numbers that Python reads, shapes that depend on numbers.
REFUSED = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class TensorLayout:
    """Of a tensor: all but its numbers."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorLayout":
        """Return the layout of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class OperationRecorder(TorchDispatchMode):
    """While it is on, writes down every operation below autograd and vmap; tensors stay alive, to be known again.

    Args:
        inputs: what may be another tensor when the list is repeated; any tensor that is neither an input nor made by an
            operation stays the same one.
        room: bytes that what the operations make may take together.

    Attributes:
        graph: the operations, one call each; ``layout`` and ``place``, memory and offset in it, in a node's ``meta``.
        outside: per node the tensor that stays the same.
    """

    def __init__(self, inputs: Sequence[Tensor], room: int = sys.maxsize) -> None:
        super().__init__()
        self.graph = Graph()
        self._left = self._room = room
        self._storages: set[int] = set()
        self.outside: dict[Node, Tensor] = {}
        self._known: dict[int, tuple[Tensor, Node]] = {}
        for number, tensor in enumerate(inputs):
            self._know(tensor, self.graph.placeholder(f"input{number}"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out an operation and write it down.

        Raises:
            ValueError: it is none that can be repeated, or there is no room.
        """
        if any(tag in REFUSED for tag in func.tags) and not (
            _of_positions(func, args) or _drops_nothing(func, args, kwargs)
        ):
            raise ValueError(f"{func} draws random numbers, or Python would have to read numbers")
        made = func(*args, **(kwargs or {}))
        node = self.graph.call_function(func, *tree_map(self.written, (args, kwargs or {})))
        if isinstance(made, Tensor):
            self._know(made, node)
        elif isinstance(made, list | tuple):
            for number, part in enumerate(made):
                if isinstance(part, Tensor):
                    self._know(part, self.graph.call_function(getitem, (node, number)))
        if self._left < 0:
            raise ValueError(f"to record it takes more than {self._room / 2**20:.0f} MiB")
        return made

    def _know(self, tensor: Tensor, node: Node) -> None:
        memory = tensor.untyped_storage()
        place = (memory.data_ptr(), tensor.storage_offset())
        if place[0] not in self._storages:
            self._storages.add(place[0])
            self._left -= memory.nbytes() if node.op == "call_function" else 0  # else it was there before
        node.meta |= {"layout": TensorLayout.of(tensor), "place": place}
        self._known[id(tensor)] = (tensor, node)

    def written(self, value: Any) -> Any:
        """Return what stands for a value in the list: a node for a tensor."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._known:
            node = self.graph.get_attr(f"outside{len(self.outside)}")
            self.outside[node] = value
            self._know(value, node)
        return self._known[id(value)][1]


def _drops_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether it is attention without dropout, of which torch says that it draws in any case."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    share = given.get("dropout_p", 0.0)
    return "attention" in func._schema.name and "dropout_p" in names and share == 0


def _of_positions(func: Any, args: Any) -> bool:
    """Return whether it takes elements at positions: as many as there are, while a mask would be counted first."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])
