"""The ranks of a run as processes that talk by ``torch.distributed``."""

import pickle
import time
from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmark.engine.ranks import Ranks
from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.run.pulse import BROKEN, OtherRankError, Pulse

T = TypeVar("T")

#: Per name shape, type and kind of device.
Layout = dict[str, tuple[tuple[int, ...], torch.dtype, str]]

CPU = torch.device("cpu")

#: Longest pause, in seconds, between two looks at whether others have come.
PAUSE = 0.002


class ProcessRanks(Ranks):
    """One of several processes; the default process group is theirs.

    Waiting is a loop that also hears of ranks that have ended, so that nobody waits for one that is gone.

    Args:
        device: of this process.
        pulse: started.

    Attributes:
        received: bytes that came from other ranks so far.
        seconds: spent in waiting and in copying so far.
    """

    def __init__(self, device: torch.device, pulse: Pulse) -> None:
        self.rank = pulse.rank
        self.count = pulse.count
        self.device = device
        self.pulse = pulse
        self.received = 0
        self.seconds = 0.0

    def look(self) -> None:
        """Raise what there is to know of other ranks.

        Raises:
            OtherRankError: one has ended.
        """
        if self.pulse.trouble is not None:
            raise self.pulse.trouble

    def everybody(self, label: str, mine: T) -> list[T]:
        """Return what each rank gives, in the order of ranks.

        Raises:
            ConfigurationError: ranks are at different points.
            OtherRankError: one has ended.
        """
        data = torch.frombuffer(bytearray(pickle.dumps((label, mine))), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(data)]))]
        parts = self._all_gather(_padded(data, max(sizes)))
        given = [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]
        if others := sorted({other for other, _ in given} - {label}):
            raise ConfigurationError(
                f"ranks are at different points of the run, {label!r} and {others[0]!r}: does a callback of the "
                "Trainer wait for other ranks inside a round? There ranks have different numbers of steps"
            )
        return [mine if rank == self.rank else theirs for rank, (_, theirs) in enumerate(given)]

    def gather(self, label: str, mine: Values) -> list[Values]:
        """Return the tensors of each rank, in the order of ranks."""
        layouts = self.everybody(label, _layout(mine))
        sizes = [_bytes(layout) for layout in layouts]
        on_device = any(kind != "cpu" for layout in layouts for _, _, kind in layout.values())
        device = self.device if on_device else CPU
        parts = (
            self._all_gather(_padded(_packed(mine, device), max(sizes)))
            if max(sizes)
            else [torch.empty(0)] * self.count
        )
        return [
            mine if rank == self.rank else _unpacked(part, layout)
            for rank, (part, layout) in enumerate(zip(parts, layouts, strict=True))
        ]

    def exchange(self, label: str, parcels: Sequence[Values]) -> list[Values]:
        """Hand a rank its parcel, in host memory; return those for this one."""
        layouts = self.everybody(label, [_layout(parcel) for parcel in parcels])
        mine = [{} if rank == self.rank else theirs[self.rank] for rank, theirs in enumerate(layouts)]
        sent = [_packed({} if rank == self.rank else parcel, CPU) for rank, parcel in enumerate(parcels)]
        sizes = [_bytes(layout) for layout in mine]
        arrived = torch.empty(sum(sizes), dtype=torch.uint8)
        # Not by isend, whose end can't be asked for without waiting for it.
        self._wait(dist.all_to_all_single(arrived, torch.cat(sent), sizes, [len(each) for each in sent], async_op=True))
        self.received += len(arrived)
        return [
            parcels[rank] if rank == self.rank else _unpacked(part, layout)
            for rank, (part, layout) in enumerate(zip(arrived.split(sizes), mine, strict=True))
        ]

    def _all_gather(self, mine: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.count)]
        if mine.numel():
            self._wait(dist.all_gather(parts, mine, async_op=True))
        self.received += (self.count - 1) * mine.numel() * mine.element_size()
        return parts

    def _wait(self, work: Any) -> None:
        began, pause = time.perf_counter(), PAUSE / 64
        while not work.is_completed():
            self.look()
            time.sleep(pause)
            pause = min(2 * pause, PAUSE)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        self.seconds += time.perf_counter() - began

    def _lost(self, error: RuntimeError) -> OtherRankError:
        """Find out which rank a broken connection led to."""
        self.pulse.broken.set()
        end = time.monotonic() + 2 * BROKEN
        while self.pulse.trouble is None and time.monotonic() < end:
            time.sleep(PAUSE)
        said = f"the connection to another rank broke: {str(error).splitlines()[0]}"
        return self.pulse.trouble or OtherRankError(said, 1, told_here=self.rank == 0)


def _layout(values: Values) -> Layout:
    return {name: (tuple(value.shape), value.dtype, value.device.type) for name, value in values.items()}


def _bytes(layout: Layout) -> int:
    return sum(prod(shape) * dtype.itemsize for shape, dtype, _ in layout.values())


def _packed(values: Values, device: torch.device) -> Tensor:
    """Put tensors behind each other, as bytes."""
    parts = [value.detach().contiguous().reshape(-1).view(torch.uint8).to(device) for value in values.values()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _unpacked(data: Tensor, layout: Layout) -> Values:
    """Take apart what ``_packed`` gave."""
    values, begin = {}, 0
    for name, (shape, dtype, _) in layout.items():
        end = begin + prod(shape) * dtype.itemsize
        # A copy of its own: a view as other numbers would have to begin at a multiple of their size.
        values[name] = (
            data[begin:end].clone().view(dtype).reshape(shape)
            if end > begin
            else torch.empty(shape, dtype=dtype, device=data.device)
        )
        begin = end
    return values


def _padded(data: Tensor, size: int) -> Tensor:
    return torch.cat([data, data.new_zeros(size - len(data))])
