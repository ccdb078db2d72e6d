"""Hostile clients of a simulation: who they are, and values of the others alone."""

import math
from collections.abc import Collection, Sequence

from torch import Tensor

from benchmark.seeds import numpy_generator


def hostile_clients(seed: int, clients: Sequence[int], fraction: float) -> tuple[int, ...]:
    """Draw ``floor(fraction n)`` of n clients, ascending; the same ones for every kind of attack.

    Args:
        seed: of the run.
        clients: those that train, ascending.
        fraction: beta.
    """
    count = math.floor(round(fraction * len(clients), 6))  # 0.29 of 100 is a little less than 29 in floats
    drawn = numpy_generator(seed, "byzantine").permutation(clients)[:count]
    return tuple(sorted(drawn.tolist()))


def of_honest(values: Tensor, hostile: Collection[int]) -> Tensor:
    """Return one value a client, [N], with NaN instead of hostile ones."""
    made = values.clone()
    made[sorted(hostile)] = math.nan
    return made
