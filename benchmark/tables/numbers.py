"""Numbers as text."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from benchmark.metrics import scale_of


def scaled(value: float | None, metric: str) -> float:
    """Return a stored value as people read it, accuracies in per cent; NaN for None."""
    return math.nan if value is None else scale_of(metric) * value


def number(value: float, digits: int = 2) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def with_std(mean: float, std: float, digits: int = 2) -> str:
    return number(mean, digits) + ("" if math.isnan(std) else f" ± {std:.{digits}f}")


def mean_std(values: Iterable[float | None], digits: int = 2) -> str:
    """Mean and, of several, standard deviation (n - 1) of the values; empty if none is known and finite."""
    given = list(values)
    known = [value for value in given if value is not None and math.isfinite(value)]
    if known and len(known) < len(given):
        return "not finite"  # a seed has diverged: the others' mean would flatter
    return with_std(fmean(known), stdev(known) if len(known) > 1 else math.nan, digits) if known else ""


def signed(value: float, digits: int = 2) -> str:
    return "" if math.isnan(value) else f"{value:+.{digits}f}"


def floats(value: float) -> str:
    """A number of floats in the papers' manner: 7.68e3."""
    if value == 0 or math.isnan(value):
        return "" if math.isnan(value) else "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def published_number(value: float) -> str:
    """A published number: accuracies with two digits, costs in powers of ten."""
    return floats(value) if value >= 1000 else number(value)


def span(values: Sequence[int]) -> str:
    return "" if not values else str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"


def each_once(texts: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(texts))
