"""The processes that simulate one federation together, as the engine knows them; one process is the usual case."""

import heapq
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.internals import tree_leaves

T = TypeVar("T")

#: Numbers of a tensor whose fingerprint is made at a time, for the memory that it takes.
PART = 2**22


class Ranks:
    """One process alone; ``benchmark.ranks.processes`` has those of many.

    Every function with a ``label`` is called by all ranks, in the same order, and waits for all of them.

    Attributes:
        rank: of this process, from 0.
        count: of all processes.
        busy_with: clients whose step is being taken, for messages.
    """

    rank: int = 0
    count: int = 1
    busy_with: tuple[int, ...] = ()

    def everybody(self, label: str, mine: T) -> list[T]:
        """Return what each rank gives, in the order of ranks.

        Args:
            label: what for; ranks that are at different points are told so.
            mine: a small object of plain values.
        """
        return [mine]

    def gather(self, label: str, mine: Values) -> list[Values]:
        """Return the tensors of each rank, in the order of ranks; names and shapes may differ."""
        return [mine]

    def exchange(self, label: str, parcels: Sequence[Values]) -> list[Values]:
        """Hand a rank its parcel; return those for this one.

        Args:
            label: as for ``everybody``.
            parcels: tensors in host memory for each rank, in the order of ranks.
        """
        return list(parcels)

    def look(self) -> None:
        """Notice whether another rank has ended, without waiting for it."""

    def agree(self, label: str, mine: object, reason: str) -> None:
        """Require the same of all ranks.

        Args:
            label: what it is.
            mine: a small object of plain values.
            reason: why it may differ, and what to do.

        Raises:
            ConfigurationError: it differs.
        """
        given = self.everybody(label, mine)
        if other := [rank for rank, theirs in enumerate(given) if theirs != given[0]]:
            raise ConfigurationError(f"{label} of rank 0 and of rank {other[0]} differ: {reason}")


def fingerprint(*trees: object) -> list[int]:
    """Return a number for each tensor in some trees, equal for equal bits; waits for the device once.

    The bits of a tensor read as whole numbers, each times an odd number that tells its place, are summed: cheap, and no
    defence against anybody.
    """
    sums = []
    for value in tree_leaves(trees):
        if isinstance(value, Tensor) and value.numel():
            bits = value.detach().contiguous().reshape(-1).view(torch.uint8)
            words = bits.view(torch.int32) if value.element_size() % 4 == 0 else bits
            total = torch.zeros((), dtype=torch.int64, device=words.device)
            for number, part in enumerate(words.split(PART)):
                places = torch.arange(1, 2 * len(part), 2, device=words.device)
                total += (2 * number + 1) * (part.long() * places).sum()
            sums.append(total)
    return torch.stack([total.cpu() for total in sums]).tolist() if sums else []


def dealt(costs: Sequence[int], count: int) -> list[int]:
    """Deal pieces of work to ranks: the longest first, each to the rank that has least so far.

    Args:
        costs: of each piece.
        count: of ranks.

    Returns:
        Per piece its rank; of equal ones the earlier piece and the lower rank come first.
    """
    loads = [(0, rank) for rank in range(count)]
    ranks = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        load, ranks[piece] = heapq.heappop(loads)
        heapq.heappush(loads, (load + costs[piece], ranks[piece]))
    return ranks
