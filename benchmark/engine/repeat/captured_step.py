"""A recorded step as a CUDA graph: the host starts all its kernels at once."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmark.engine.cohort import Slots
from benchmark.engine.device.memory import HeldBytes, free_memory
from benchmark.engine.repeat.recording import as_recorded
from benchmark.engine.step_function import Made
from benchmark.internals import copy_all, tree_leaves

#: Of the device's free memory what a step may take to become a graph. A graph keeps it, and kernels of larger steps
#: take so long that starting them one by one costs nothing. All graphs together may keep as much again of their own.
ROOM = 1 / 16
#: Times that a step is done before it is captured, for libraries that set themselves up at their first calls.
WARM_UP = 2


class Graphs:
    """Makes CUDA graphs of recorded steps, all in one memory.

    What a step gives is read before the next step is taken, of whatever kind, so that the next one may overwrite it.

    Args:
        slots: what is trained.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._pool: Any = None
        self._kept = 0

    def of(self, program: Callable[..., Made], tensors: Sequence[Tensor]) -> "CapturedStep":
        """Capture a step.

        Args:
            program: the recorded operations.
            tensors: what they read, on a GPU.

        Raises:
            ValueError: it takes too much memory.
            RuntimeError: an operation of it cannot be captured.
        """
        device = tensors[-1].device
        with as_recorded():
            with HeldBytes(device) as held:
                made = program(*tensors)
            own = set(map(id, self._slots.values()))
            kept = sum(_span(t) for t in tensors if id(t) not in own)
            kept += sum(part.nbytes for part in tree_leaves(made) if isinstance(part, Tensor))
            room = ROOM * free_memory(device)
            if held.most > room:
                raise ValueError(f"it takes {held.most / 2**20:.0f} MiB")
            if self._kept + kept > room:
                raise ValueError(f"all graphs would keep {(self._kept + kept) / 2**20:.0f} MiB")
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            del made
            places = [t.detach() if id(t) in own else _room_for(t) for t in tensors]
            try:
                captured = CapturedStep(program, places, self._pool)
            except RuntimeError:
                self._pool = None  # what was captured half stays in it
                raise
            self._kept += kept
            weakref.finalize(captured, self._dropped, kept)
            return captured

    def _dropped(self, kept: int) -> None:
        self._kept -= kept


class CapturedStep:
    """A step's kernels, started together: they read and write the same places at every call.

    Args:
        program: the recorded operations; none of them waits for the device.
        inputs: the places that they read from now on: those of slots, which seldom move, and room for all else.
        pool: the memory of the graphs.

    Raises:
        RuntimeError: an operation of it cannot be captured.
    """

    def __init__(self, program: Callable[..., Made], inputs: Sequence[Tensor], pool: Any) -> None:
        self._inputs = inputs
        self._program = program  # its constants lie where the kernels read them
        present = torch.cuda.current_stream()
        aside = torch.cuda.Stream()
        aside.wait_stream(present)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                program(*inputs)
        present.wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        # Another thread may meanwhile pin the next round's plan.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._made = program(*inputs)

    def __call__(self, *tensors: Tensor) -> Made:
        """Return losses and gradients, which the next call of any step in the same memory overwrites."""
        rooms: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for room, tensor in zip(self._inputs, tensors, strict=True):
            if room.data_ptr() != tensor.data_ptr():
                into, given = rooms.setdefault(room.dtype, ([], []))
                into.append(room)
                given.append(tensor.detach())
        for into, given in rooms.values():
            copy_all(into, given)
        self._graph.replay()
        return self._made


def _room_for(tensor: Tensor) -> Tensor:
    """Copy a tensor with its order in memory, gaps included: recorded views are told where in it they begin and step.

    Rows that are all one and the same get places of their own; should a view of them read something else then, the
    comparison with a step as it is written finds that.
    """
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor.clone()
    room = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return room.copy_(tensor.detach())


def _span(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first number to its last, gaps included."""
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.element_size() * (1 + steps) if tensor.numel() else 0
