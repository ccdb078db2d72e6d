"""Intervals of 95 %: of a share, of a mean over clients, of what is made of images, of an AUROC.

What is drawn anew says which question an interval answers: images of these clients, or other clients like them.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # slow to import
    from collections.abc import Sequence

    import numpy as np

LEVEL = 0.95
#: Times that images or clients are drawn anew.
DRAWS = 2000
#: Below so many clients their mean has a t interval: drawing a few anew can only give back their range.
FEW_CLIENTS = 20
#: Share of the draws in which a metric must be defined.
DEFINED = 0.9
#: A variance of a difference, as a part of the sum of both variances, that is rounding alone.
ROUNDING = 1e-12


class Interval(NamedTuple):
    """Both ends; NaN where there is none."""

    low: float
    high: float


NONE = Interval(math.nan, math.nan)


def of_share(right: int, images: int) -> Interval:
    """Return Wilson's interval of a share."""
    from scipy.stats import binomtest

    if not images:
        return NONE
    found = binomtest(right, images).proportion_ci(LEVEL, method="wilson")
    return Interval(float(found.low), float(found.high))


def of_draws(values: "np.ndarray") -> Interval:
    """Return the percentile interval of a metric's values in images or clients that were drawn anew.

    Draws in which it is not defined are left out; where they are more than a tenth there is no interval.
    """
    import numpy as np

    defined = values[np.isfinite(values)]
    if len(defined) < DEFINED * len(values):
        return NONE
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(defined, [tail, 100 - tail])
    return Interval(float(low), float(high))


def of_clients(values: "np.ndarray", rng: "np.random.Generator | None" = None, few: int = FEW_CLIENTS) -> Interval:
    """Return the interval of the mean over clients like these: by t for a few, else by drawing clients anew.

    Args:
        values: of the clients that have one, [n].
        rng: draws; by default always alike.
        few: clients below which it is by t.
    """
    import numpy as np
    from scipy.stats import t

    n = len(values)
    if n < 2 or not np.isfinite(values).all():
        return NONE
    if n < few:
        half = float(t.ppf((1 + LEVEL) / 2, n - 1)) * float(values.std(ddof=1)) / math.sqrt(n)
        return Interval(float(values.mean()) - half, float(values.mean()) + half)
    rng = np.random.default_rng(0) if rng is None else rng
    return of_draws(values[rng.integers(0, n, (DRAWS, n))].mean(1))


def drawn(groups: "Sequence[np.ndarray]", rng: "np.random.Generator", draws: int = DRAWS) -> "list[np.ndarray]":
    """Draw the images of each client anew, with replacement: images of a group together, as many groups as there are.

    Args:
        groups: per client the group of each of its images, [n]; where all differ, images are drawn.
        rng: draws.
        draws: how many.

    Returns:
        Per client how often each of its images is in each draw, int32 [draws, n].
    """
    import numpy as np
    import pandas as pd

    places = [pd.factorize(group)[0] for group in groups]
    sizes = [place.max(initial=-1) + 1 for place in places]
    made = [np.zeros((draws, len(place)), dtype="int32") for place in places]
    for draw in range(draws):
        for times, place, size in zip(made, places, sizes, strict=True):
            times[draw] = np.bincount(rng.integers(0, size, size), minlength=size)[place]
    return made


class Areas(NamedTuple):
    """AUROCs of some methods on the same images, and their covariance by DeLong.

    Attributes:
        values: [methods].
        covariance: [methods, methods].
    """

    values: "np.ndarray"
    covariance: "np.ndarray"

    def interval(self, method: int = 0) -> Interval:
        """Return the interval of one method's area, made on its logit so that it stays within 0 and 1."""
        from scipy.special import expit, logit
        from scipy.stats import norm

        area, variance = float(self.values[method]), float(self.covariance[method, method])
        if not 0 < area < 1 or math.isnan(variance):
            return NONE
        half = float(norm.ppf((1 + LEVEL) / 2)) * math.sqrt(variance) / (area * (1 - area))
        return Interval(float(expit(logit(area) - half)), float(expit(logit(area) + half)))

    def error(self) -> float:
        """Return the standard error of the first two methods' difference; exactly 0 where images never tell them apart.

        NaN where the covariance is.
        """
        of_both = float(self.covariance[0, 0] + self.covariance[1, 1])
        variance = of_both - 2 * float(self.covariance[0, 1])
        return 0.0 if variance <= ROUNDING * of_both else math.sqrt(variance)

    def p_value(self) -> float:
        """Return the two-sided p value of the first two methods' difference; NaN where it has no spread."""
        from scipy.stats import norm

        error = self.error()
        return float(2 * norm.sf(abs(self.values[0] - self.values[1]) / error)) if error > 0 else math.nan


def delong(scores: "np.ndarray", positive: "np.ndarray") -> Areas:
    """Return AUROCs and their covariance, after DeLong, DeLong and Clarke-Pearson (1988); ties count half.

    It takes images to be independent: it knows no patients of several images.

    Args:
        scores: [methods, n].
        positive: bool [n]; with fewer than two of either kind the covariance is NaN.
    """
    import numpy as np
    from scipy.stats import rankdata

    m, n = int(positive.sum()), int((~positive).sum())
    if not m or not n:
        nothing = np.full(len(scores), math.nan)
        return Areas(nothing, np.full((len(scores), len(scores)), math.nan))
    whole = rankdata(scores, axis=1)
    of_positive = (whole[:, positive] - rankdata(scores[:, positive], axis=1)) / n
    of_negative = 1 - (whole[:, ~positive] - rankdata(scores[:, ~positive], axis=1)) / m
    values = of_positive.mean(1)
    if m < 2 or n < 2:
        return Areas(values, np.full((len(scores), len(scores)), math.nan))
    covariance = np.atleast_2d(np.cov(of_positive)) / m + np.atleast_2d(np.cov(of_negative)) / n
    return Areas(values, covariance)


class Discordant(NamedTuple):
    """Images that one of two methods alone is right on, and McNemar's exact p value (binomial on these images).

    Attributes:
        first: images that the first method alone is right on.
        second: those of the second one.
        p_value: two-sided; 1 without such images.
    """

    first: int
    second: int
    p_value: float


def mcnemar(first: "np.ndarray", second: "np.ndarray") -> Discordant:
    """Test whether two methods have the same accuracy, by the images that one of them alone is right on.

    It takes images to be independent: it knows no patients of several images.

    Args:
        first: where the first method is right, bool [n].
        second: where the second one is.
    """
    from scipy.stats import binomtest

    alone = int((first & ~second).sum()), int((second & ~first).sum())
    return Discordant(*alone, float(binomtest(alone[0], sum(alone)).pvalue) if sum(alone) else 1.0)


def holm(p_values: "Sequence[float]") -> list[float]:
    """Return p values adjusted for there being several of them, in the same order.

    The smallest of m is multiplied by m, the next one by m - 1 and so on; none is below a smaller one's, or above 1
    (Holm, Scand. J. Statist. 1979).
    """
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted
