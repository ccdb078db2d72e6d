"""The ranks of a run as processes."""

import os
import time
from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmark.engine.ranks.ranks import Ranks
from benchmark.errors import ConfigurationError, printable
from benchmark.federation import Values
from benchmark.ranks.links import Links, Transfer
from benchmark.ranks.plain_values import decode, encode
from benchmark.ranks.pulse import BROKEN, OtherRankError, Pulse

T = TypeVar("T")

#: Per name shape, type and kind of device.
PackedLayout = dict[str, tuple[tuple[int, ...], torch.dtype, str]]

CPU = torch.device("cpu")

#: Longest pause, in seconds, between two looks at whether others have come.
PAUSE = 0.002

#: Most bytes of plain values that a rank tells at a time.
PLAIN = 2**30


class ProcessRanks(Ranks):
    """One of several processes.

    Waiting is a loop that also hears of ranks that have ended, so that nobody waits for one that is gone.

    Args:
        device: of this process.
        pulse: started.
        links: to the others.

    Attributes:
        received: bytes that came from other ranks so far.
        seconds: spent in waiting and in copying so far.
    """

    def __init__(self, device: torch.device, pulse: Pulse, links: Links) -> None:
        self.rank = pulse.rank
        self.count = pulse.count
        self.device = device
        self.pulse = pulse
        self.links = links
        self.received = 0
        self.seconds = 0.0

    def look(self) -> None:
        """Raise what there is to know of other ranks.

        Raises:
            OtherRankError: one has ended.
        """
        self.pulse.look()

    def everybody(self, label: str, mine: T) -> list[T]:
        """Return what each rank gives, in the order of ranks.

        Raises:
            ConfigurationError: ranks are at different points, or one gives no plain values.
            OtherRankError: one has ended.
        """
        data = torch.frombuffer(bytearray(encode(label, (label, mine))), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(data)]))]
        for rank, size in enumerate(sizes):
            if not 0 < size <= PLAIN:
                raise ConfigurationError(
                    f"{label}: rank {rank} has {size:,} bytes to tell; expected 1 to {PLAIN:,}, of the same version of "
                    "this program on all ranks"
                )
        parts = self._all_gather(_padded(data, max(sizes)))
        given = [_read(label, rank, part[:size]) for rank, (part, size) in enumerate(zip(parts, sizes, strict=True))]
        if others := sorted({other for other, _ in given} - {label}):
            raise ConfigurationError(
                f"ranks are at different points of the run, {label!r} and {others[0]!r}: does a callback of the "
                "Trainer wait for other ranks inside a round? There ranks have different numbers of steps"
            )
        return [mine if rank == self.rank else theirs for rank, (_, theirs) in enumerate(given)]

    def gather(self, label: str, mine: Values) -> list[Values]:
        """Return the tensors of each rank, in the order of ranks."""
        layouts = self.everybody(label, _layout(mine))
        sizes = self._sizes(label, layouts)
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
        sizes = self._sizes(label, mine)
        arrived = torch.empty(sum(sizes), dtype=torch.uint8)
        self._wait(self.links.all_to_all(arrived, sizes, sent))
        self.received += len(arrived)
        return [
            parcels[rank] if rank == self.rank else _unpacked(part, layout)
            for rank, (part, layout) in enumerate(zip(arrived.split(sizes), mine, strict=True))
        ]

    def _sizes(self, label: str, layouts: Sequence[PackedLayout]) -> list[int]:
        """Return the bytes of each rank's tensors, of which this process must have room for all.

        Raises:
            ConfigurationError: it can't, or these are no layouts.
        """
        try:
            sizes = [_bytes(layout) for layout in layouts]
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"{label}: a rank tells of no tensors ({error}); do all ranks have the same version of this program?"
            ) from None
        if sum(sizes) > (room := _memory(self.device)):
            raise ConfigurationError(
                f"{label}: the ranks would send {sum(sizes):,} bytes at a time, and this one has {room:,}; train fewer "
                "clients in a round, or a smaller model"
            )
        return sizes

    def _all_gather(self, mine: Tensor) -> list[Tensor]:
        parts = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.count)]
        if mine.numel():
            self._wait(self.links.all_gather(parts, mine))
        self.received += (self.count - 1) * mine.numel() * mine.element_size()
        return parts

    def _wait(self, work: Transfer) -> None:
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


def _layout(values: Values) -> PackedLayout:
    return {name: (tuple(value.shape), value.dtype, value.device.type) for name, value in values.items()}


def _bytes(layout: PackedLayout) -> int:
    if any(size < 0 for shape, _, _ in layout.values() for size in shape):
        raise ValueError("sizes below 0")
    return sum(prod(shape) * dtype.itemsize for shape, dtype, _ in layout.values())


def _read(label: str, rank: int, data: Tensor) -> Any:
    try:
        theirs, value = decode(data.numpy().tobytes())
    except ValueError as error:
        raise ConfigurationError(
            f"{label}: rank {rank} has sent what can't be read ({printable(str(error))}): do all ranks have the same "
            "version of this program?"
        ) from None
    return theirs, value


def _memory(device: torch.device) -> int:
    """Return all bytes of the device and of the host, whichever are more."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(host, torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0)


def _packed(values: Values, device: torch.device) -> Tensor:
    """Put tensors behind each other, as bytes."""
    parts = [value.detach().contiguous().reshape(-1).view(torch.uint8).to(device) for value in values.values()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _unpacked(data: Tensor, layout: PackedLayout) -> Values:
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
