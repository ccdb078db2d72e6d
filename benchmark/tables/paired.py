"""Paired comparison of two methods over seeds and clients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """A method minus its baseline.

    Attributes:
        mean: of the differences: over clients within a seed, then over seeds.
        low: end of the confidence interval; NaN where there is only one client and one seed, where all differences are
            equal (clients with one model and the same test images are no further measurements), or where they differ
            and their means do not: neither those of clients nor those of seeds, which then tell no spread.
        high: the other end.
        seeds: how many are compared.
        pairs: how many (seed, client) pairs are compared.
        over: what the interval speaks of: ``"clients"`` (one seed), ``"seeds"`` (one client), ``"clients and seeds"``,
            or ``"nothing"``.
    """

    mean: float
    low: float
    high: float
    seeds: int
    pairs: int
    over: str


def paired_comparison(
    method: Sequence[Sequence[float]],
    baseline: Sequence[Sequence[float]],
    same_clients: bool,
    confidence: float = 0.95,
) -> Comparison:
    """A t-interval for the mean difference of paired values, with the variation over clients and over seeds added.

    With ``d[s, k]`` the difference of client k under seed s, the variance of the mean is estimated as ``V_k + V_s``:
    ``V_k`` is the sample variance over clients by their number (of each client's mean over seeds if the clients are the
    same under every seed, else of all differences within their seeds), ``V_s`` that of the seeds' means by their
    number; with one seed ``V_s`` is left out and the interval speaks of the clients alone. The quantile is the mean of
    those of the two parts' own degrees of freedom, weighted with the parts (Cochran and Cox, Experimental Designs,
    1957): degrees of freedom that are themselves estimated, as Welch's and Satterthwaite's, cover 0.88 instead of 0.95
    where two seeds happen to be alike. The noise of a single (seed, client) pair is in both parts, which makes the
    interval a little too wide. The smaller the number of clients and seeds, the more it rests on differences that are
    about normal. It knows nothing of test images that several clients share: it speaks of the clients' models then.

    Args:
        method: per seed, one value per client; NaN where a client has none. A pair with a NaN is left out.
        baseline: the same shape, same order.
        same_clients: client k of one seed may have something in common with client k of another; where it has nothing,
            the interval is a little wider than it need be.
        confidence: of the interval.

    Raises:
        ValueError: the shapes differ, or no pair is left.
    """
    import numpy as np
    from scipy.special import stdtrit  # the quantile of t; scipy.stats takes a second to import

    if len(method) != len(baseline) or any(len(a) != len(b) for a, b in zip(method, baseline, strict=True)):
        raise ValueError("method and baseline need the same seeds and the same clients")
    if same_clients and len({len(row) for row in method}) > 1:
        raise ValueError("same_clients needs the same number of clients under every seed")
    differences = [
        np.asarray(a, dtype=float) - np.asarray(b, dtype=float) for a, b in zip(method, baseline, strict=True)
    ]
    present = [row[~np.isnan(row)] for row in differences]
    if not present or any(len(row) == 0 for row in present):
        raise ValueError("a seed has no client with a value on both sides")
    means = np.array([row.mean() for row in present])
    mean = float(means.mean())
    parts: list[tuple[float, int]] = []  # variance of the mean, degrees of freedom
    if same_clients:
        grid = np.stack(differences)
        units = np.nanmean(grid[:, ~np.isnan(grid).all(axis=0)], axis=0)
        if len(units) > 1:
            parts.append((float(units.var(ddof=1)) / len(units), len(units) - 1))
    else:
        free = sum(len(row) - 1 for row in present)
        if free:
            within = sum(float(((row - row.mean()) ** 2).sum()) for row in present) / free
            parts.append((within / sum(map(len, present)), free))
    names = ["clients"] * len(parts)
    if len(means) > 1:
        parts.append((float(means.var(ddof=1)) / len(means), len(means) - 1))
        names.append("seeds")
    variance = sum(part for part, _ in parts)
    alike = np.allclose(np.concatenate(present), mean, rtol=0, atol=1e-9)
    if alike or math.sqrt(variance) <= 1e-9:
        low, high, names = math.nan, math.nan, []
    else:
        quantile = sum(part * float(stdtrit(free, 0.5 + confidence / 2)) for part, free in parts) / variance
        low, high = mean - quantile * math.sqrt(variance), mean + quantile * math.sqrt(variance)
    pairs = sum(map(len, present))
    return Comparison(mean, low, high, len(means), pairs, " and ".join(names) or "nothing")
