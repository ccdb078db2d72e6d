"""Aggregators, pre-aggregators and attacks of ByzFL (extra ``robust``), as functions of rows in host memory."""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from benchmark.errors import ConfigurationError

Aggregator = Literal[
    "average", "median", "trmean", "geometric_median", "krum", "multikrum", "centered_clipping", "meamed", "caf", "mda"
]
PreAggregator = Literal["nnm", "bucketing", "clipping", "arc"]
Attack = Literal[
    "none", "sign_flipping", "ipm", "alie", "optimal_ipm", "optimal_alie", "mimic", "gaussian",
    "inf", "nan", "huge", "zero",
]  # fmt: skip
#: By how much ``huge`` multiplies the mean of honest updates.
HUGE = 1e8
#: What makes use of the number of hostile rows, and needs more than twice as many.
COUNTING = frozenset({"trmean", "krum", "multikrum", "meamed", "caf", "mda", "nnm", "arc"})
#: Steps of CAF; where its weights come to an end they do so within about as many as there are rows.
CAF_STEPS = 1000


def byzfl() -> ModuleType:
    """Import the library, which takes seconds.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import byzfl
    except ImportError as error:
        raise ConfigurationError(
            f"robust aggregation and attacks are ByzFL's, which can't be imported ({error}); pip install '.[robust]'"
        ) from error
    return byzfl


def rows_after(pre: Sequence[PreAggregator], rows: int) -> int:
    """Return how many rows pre-aggregators leave of so many: buckets hold two, and a hostile row spoils its bucket."""
    return -(-rows // 2 ** pre.count("bucketing"))


def caf(rows: Tensor, tolerated: int) -> Tensor:
    """Return ByzFL's CAF of rows [n, d], which ends also where ByzFL's own does not.

    Rows lose weight by their distance along a random direction until n - 2f of it is left; the result is the weighted
    mean whose rows lay nearest to it. Where rows that have no weight any more are so far away that no other loses any,
    nothing moves further, and the mean reached is the result; so with all rows alike, and with f = 0.

    Fourth powers of huge numbers, which a hostile client may send, and of tiny ones are none in single precision: such
    rows are taken in double precision.
    """
    fits = 1e-6 < rows.abs().max() < 1e6
    return _caf(rows if fits else rows.double(), tolerated).to(rows)


def _caf(rows: Tensor, tolerated: int) -> Tensor:
    """Return CAF of rows whose fourth powers are numbers of their precision."""
    count = len(rows)
    weights = rows.new_ones(count)
    result, least = rows.mean(0), torch.inf
    for _ in range(CAF_STEPS):
        if not weights.sum() > count - 2 * tolerated:
            break
        mean = (weights[:, None] * rows).sum(0) / weights.sum()
        away = rows - mean
        direction = torch.randn(rows.shape[1], device=rows.device).to(rows)
        direction = direction / direction.norm()
        moved = (weights[:, None] * away * (away @ direction)[:, None]).sum(0) / weights.sum()
        axis = moved / moved.norm()
        spread = axis.dot(moved)
        if spread < least:
            result, least = mean, spread
        squares = (away @ axis) ** 2
        lighter = weights * (1 - squares / squares.max())
        if not lighter.isfinite().all() or torch.equal(lighter, weights):
            break
        weights = lighter
    return result


def aggregator(name: Aggregator, tolerated: int) -> Any:
    """Return an aggregator of rows [n, d] that bears so many hostile ones among them.

    The geometric median takes 100 steps with a smoothing of 1e-6; ByzFL's three of 0.1 are far from it.
    """
    library = byzfl()
    if name == "caf":
        return partial(caf, tolerated=tolerated)
    if name == "average":
        return library.Average()
    if name == "median":
        return library.Median()
    if name == "geometric_median":
        return library.GeometricMedian(nu=1e-6, T=100)
    if name == "centered_clipping":
        return library.CenteredClipping(L=3, tau=1.0)
    of_name = {
        "trmean": library.TrMean,
        "krum": library.Krum,
        "multikrum": library.MultiKrum,
        "meamed": library.Meamed,
        "mda": library.MDA,
    }
    return of_name[name](f=tolerated)


def pre_aggregator(name: PreAggregator, tolerated: int) -> Any:
    """Return what changes rows [n, d] before they are aggregated."""
    library = byzfl()
    if name == "bucketing":
        return library.Bucketing(s=2)
    if name == "clipping":
        return library.Clipping(c=2.0)
    return {"nnm": library.NNM, "arc": library.ARC}[name](f=tolerated)


def attack(
    name: Attack,
    strength: float | None,
    against: Aggregator,
    pre: Sequence[PreAggregator],
    tolerated: int,
    hostile: int = 1,
) -> Callable[[Tensor], Tensor]:
    """Return what hostile clients send, [d], from the updates of honest ones, [h, d].

    Args:
        name: which attack.
        strength: tau of ``ipm`` (2 by default) and ``alie`` (1.5), sigma of ``gaussian`` (1).
        against: the aggregator that ``optimal_...`` attacks know.
        pre: its pre-aggregators.
        tolerated: how many hostile rows that one bears.
        hostile: how many rows are the attack's, which ``optimal_...`` searches its strength for.
    """
    own: dict[str, Callable[[Tensor], Tensor]] = {
        "nan": lambda rows: torch.full_like(rows[0], torch.nan),
        "inf": lambda rows: torch.full_like(rows[0], torch.inf),
        "huge": lambda rows: rows.mean(0) * HUGE,
        "zero": lambda rows: torch.zeros_like(rows[0]),
    }
    if name in own:
        return own[name]
    library = byzfl()
    if name in ("optimal_ipm", "optimal_alie"):
        known = aggregator(against, tolerated)
        before = [pre_aggregator(one, tolerated) for one in pre]
        kind = library.Optimal_InnerProductManipulation if name == "optimal_ipm" else library.Optimal_ALittleIsEnough
        found: Callable[[Tensor], Tensor] = kind(agg=known, pre_agg_list=before, f=hostile)
        return found if name == "optimal_ipm" else _with_a_spread(found)
    if name == "sign_flipping":
        return library.SignFlipping()
    if name == "mimic":
        return library.Mimic(epsilon=0)
    if name == "gaussian":
        return library.Gaussian(mu=0.0, sigma=1.0 if strength is None else strength)
    if name == "ipm":
        return library.InnerProductManipulation(tau=2.0 if strength is None else strength)
    return _with_a_spread(library.ALittleIsEnough(tau=1.5 if strength is None else strength))


def _with_a_spread(found: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an attack along the standard deviation of honest rows, which is 0 of a single one and not NaN."""
    return lambda rows: found(rows) if len(rows) > 1 else rows[0]
