"""Measure free memory, and the memory that operations take."""

import os
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmark.internals import TorchDispatchMode, tree_leaves

#: of Linux: what memory there is, and the limits of a container
MEMINFO, CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int:
    """Return the free bytes of the device, with those that torch holds unused; or what the host would give."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min(_available(), _left_in_container())


def _available() -> int:
    """Return the host's bytes that processes can get, those among them that hold copies of files."""
    with suppress(OSError, ValueError, StopIteration):  # another system than Linux
        lines = MEMINFO.read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_container() -> int:
    """Return the bytes below the limit of this process's container, those with copies of files not counted as taken."""
    with suppress(OSError, ValueError, KeyError):  # no limit, which is "max", or no container
        limit, taken = (int((CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current"))
        parts = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        return limit - taken + int(parts["inactive_file"])
    return sys.maxsize


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of the tensors on a device that operations inside have made and that are still referenced.

    Every storage counts once, as long as it lives: what autograd saves, gradients, momenta, and what an operation needs
    for its result.

    Args:
        device: of the tensors that count.

    Attributes:
        most: bytes held at a time at most.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.most = 0
        self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = self._storages((args, kwargs))
        made = func(*args, **(kwargs or {}))
        for place, storage in self._storages(made).items():
            if place not in given:
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self._now)
        return made

    def _storages(self, tree: Any) -> dict[int, torch.UntypedStorage]:
        """Return the storages of a tree's tensors; each is one object of Python as long as it lives."""
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        held = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == self.device.type]
        return {id(storage): storage for storage in held}

    def _free(self, size: int) -> None:
        self._now -= size
