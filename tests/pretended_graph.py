"""CUDA graphs on the pretended GPU: a capture carries nothing out, a replay all of it, in the same places.

As on a GPU: what is captured may not wait for the device nor copy from the host; its results hold no numbers until a
replay; a replay reads what then lies in the places that were read, and overwrites the results of the one before. Those
places are not the graph's: where nobody keeps a tensor that it reads, its memory is another's by then.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from pretended_gpu import PretendedTensor, switched_on
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class PretendedGraph:
    """A stand-in for ``torch.cuda.CUDAGraph``.

    Attributes:
        replays: how many there were.
    """

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        _captured.append(self)

    def replay(self) -> None:
        """Carry out all that was captured, into the same tensors."""
        if not self.replays:
            gc.collect()
        self.replays += 1
        for func, args, kwargs, made in self.operations:
            given, named = tree_map(_still_there, (args, kwargs))
            again = func(*given, **named)
            for place, numbers in zip(_results(made), _results(again), strict=True):
                if place.host.data_ptr() != numbers.host.data_ptr():
                    place.host.copy_(numbers.host)


_captured: list[PretendedGraph] = []


class _Capture(TorchDispatchMode):
    """A stand-in for ``torch.cuda.graph``."""

    def __init__(self, graph: PretendedGraph, pool: Any = None, capture_error_mode: str = "global") -> None:
        super().__init__()
        self._graph = graph
        self._own: dict[int, Tensor] = {}

    def __enter__(self) -> Self:
        self._waits = len(switched_on[0].waits)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if len(switched_on[0].waits) > self._waits:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        for func, _, _, made in self._graph.operations:
            if not func._schema.is_mutable and not _is_view(func):
                for place in _results(made):
                    place.host.fill_(float("nan") if place.is_floating_point() else 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._own |= {id(part): part for part in _results(made)}
        self._graph.operations.append((func, *tree_map(self._without_keeping, (args, kwargs or {})), made))
        return made

    def _without_keeping(self, value: Any) -> Any:
        """Return a reference instead of a tensor that the graph has not made."""
        return weakref.ref(value) if isinstance(value, Tensor) and id(value) not in self._own else value


@contextmanager
def pretended_graphs() -> Iterator[list[PretendedGraph]]:
    """Have torch capture graphs on the pretended GPU; gives those that are captured."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    _captured.clear()
    with ExitStack() as patches:
        for name, value in {
            "CUDAGraph": PretendedGraph,
            "graph": _Capture,
            "graph_pool_handle": lambda: (0, 1),
            "Stream": lambda: stream,
            "stream": lambda _: nullcontext(),
            "current_stream": lambda: stream,
        }.items():
            patches.enter_context(patch.object(torch.cuda, name, value))
        yield _captured


def _still_there(value: Any) -> Any:
    if not isinstance(value, weakref.ref):
        return value
    tensor = value()
    assert tensor is not None, "a graph reads memory that was freed"
    return tensor


def _results(made: Any) -> list[PretendedTensor]:
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, PretendedTensor)]


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and returned[0].alias_info is not None
