"""Capped Dirichlet draws over clients."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError

DRAWS_AT_ONCE = 64
#: Cuts that draws made at once may have: with many clients and classes fewer draws are made at once.
CUTS_AT_ONCE = 2**24
#: A Dirichlet draw that succeeds with a probability below exp(-14), in all its retries together, is given up.
HOPELESS = 14


def hopeless(short: int, draws: int, max_retries: int) -> bool:
    """Return whether further draws are practically certain not to give every client enough images.

    If on average m clients of a draw get too few images, then a draw in which none does has a probability of at most
    exp(-m), since one client's images are taken from the others. As m counts the average of the draws so far minus
    four of its standard errors.

    Args:
        short: number of clients that got too few, summed over all draws so far.
        draws: number of draws so far.
        max_retries: largest number of draws.
    """
    average = short / draws
    return bool(average - 4 * np.sqrt(average / draws) > HOPELESS + np.log(max_retries))


def dirichlet_cuts(
    class_sizes: NDArray[np.int64],
    num_clients: int,
    alpha: float,
    min_size: int,
    max_retries: int,
    rng: np.random.Generator,
) -> Iterator[NDArray[np.int64]]:
    """Draws of capped Dirichlet proportions that give every client enough images.

    For each class one ``p ~ Dir(alpha 1_N)``; clients that already hold the mean number of images of
    side 0 get nothing more; the rest is normalised and every side of the class is cut at
    ``floor(cumsum(p) * n_c)``. Sizes follow from the cuts alone, so a draw that fails costs no indices.

    Args:
        class_sizes: [S, C], images of each class on each side (side 0 = train, or everything merged).
        num_clients: N.
        alpha: concentration.
        min_size: images that every client must have on every side.
        max_retries: how often to draw in all.
        rng: where the draws come from.

    Yields:
        Cuts, [S, C, N + 1], rising from 0 to ``class_sizes``: client k takes ``cuts[s, c, k:k + 2]``.

    Raises:
        ConfigurationError: ``max_retries`` draws are used up, or so many clients got too few images in the first of
            them that no draw will do.
    """
    sides, num_classes = class_sizes.shape
    mean = class_sizes[0].sum() / num_clients
    advice = "raise alpha, use fewer clients or lower min_size"
    held = class_sizes.sum(axis=1)
    if held.min() < min_size * num_clients:
        which = "" if sides == 1 else ("training ", "test ")[int(held.argmin())]
        raise ConfigurationError(
            f"{num_clients} clients with at least min_size={min_size} {which}images each need {min_size * num_clients} "
            f"{which}images, the data set has {held.min()}; use fewer clients or lower min_size"
        )
    best = short = 0
    at_once = max(1, min(DRAWS_AT_ONCE, CUTS_AT_ONCE // (sides * num_classes * (num_clients + 1))))
    for start in range(0, max_retries, at_once):
        draws = min(at_once, max_retries - start)
        cuts = np.zeros((draws, sides, num_classes, num_clients + 1), dtype=np.int64)
        sizes = np.zeros((draws, sides, num_clients), dtype=np.int64)
        possible = np.ones(draws, dtype=bool)
        for c in range(num_classes):
            p = rng.dirichlet(np.full(num_clients, alpha), size=draws) * (sizes[:, 0] < mean)
            total = p.sum(axis=1, keepdims=True)
            # With a small alpha all of a class's mass can fall on clients that are full: no such draw counts.
            possible &= total[:, 0] > 0
            ends = np.cumsum(np.divide(p, total, out=np.zeros_like(p), where=total > 0), axis=1)
            for side in range(sides):
                size = class_sizes[side, c]
                cuts[:, side, c, 1:] = np.minimum(np.floor(ends * size), size)
                cuts[:, side, c, -1] = size
                sizes[:, side] += np.diff(cuts[:, side, c], axis=1)
        smallest = np.where(possible, sizes.min(axis=(1, 2)), 0)
        best = max(best, int(smallest.max()))
        for draw in np.flatnonzero(possible & (smallest >= min_size)):
            yield cuts[draw]
        short += int((sizes < min_size).any(axis=1).sum())
        if hopeless(short, start + draws, max_retries):
            average = short / (start + draws)
            raise ConfigurationError(
                f"no Dirichlet draw with alpha={alpha:g} will give all {num_clients} clients min_size={min_size} "
                f"images: in {start + draws} draws {average:.0f} clients got fewer on average; {advice}"
            )
    raise ConfigurationError(
        f"no Dirichlet draw with alpha={alpha:g} in {max_retries} gave all {num_clients} clients min_size={min_size} "
        f"images: the smallest client got at most {best}; {advice}, or raise max_retries"
    )
