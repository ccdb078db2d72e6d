"""Aggregators, pre-aggregators and attacks of ByzFL (extra ``robust``), as functions of rows in host memory."""

from collections.abc import Callable, Sequence
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


def aggregator(name: Aggregator, tolerated: int) -> Any:
    """Return an aggregator of rows [n, d] that bears so many hostile ones among them.

    The geometric median takes 100 steps with a smoothing of 1e-6; ByzFL's three of 0.1 are far from it.
    """
    library = byzfl()
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
        "caf": library.CAF,
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
    name: Attack, strength: float | None, against: Aggregator, pre: Sequence[PreAggregator], tolerated: int
) -> Callable[[Tensor], Tensor]:
    """Return what hostile clients send, [d], from the updates of honest ones, [h, d].

    Args:
        name: which attack.
        strength: tau of ``ipm`` (2 by default) and ``alie`` (1.5), sigma of ``gaussian`` (1).
        against: the aggregator that ``optimal_...`` attacks know.
        pre: its pre-aggregators.
        tolerated: how many hostile rows that one bears.
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
        return lambda rows: kind(agg=known, pre_agg_list=before, f=tolerated)(rows)
    if name == "sign_flipping":
        return library.SignFlipping()
    if name == "mimic":
        return library.Mimic(epsilon=0)
    if name == "gaussian":
        return library.Gaussian(mu=0.0, sigma=1.0 if strength is None else strength)
    if name == "ipm":
        return library.InnerProductManipulation(tau=2.0 if strength is None else strength)
    return library.ALittleIsEnough(tau=1.5 if strength is None else strength)
