"""Two finished runs on the same images, compared image by image: differences with intervals and tests."""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from benchmark import intervals
from benchmark.errors import ConfigurationError, did_you_mean
from benchmark.formulas import ranked_classes
from benchmark.intervals import Interval
from benchmark.metrics import MEANS_OVER_CLASSES, METRICS, Metric
from benchmark.records.drawn_images import (
    at_places,
    by_client,
    draw_images,
    has_groups,
    mean_over,
    number,
    of_drawn,
    values_in,
)
from benchmark.records.predictions import images_of
from benchmark.records.run_intervals import POOLED, THESE
from benchmark.records.stored_run import StoredRun

if TYPE_CHECKING:  # slow to import
    import numpy as np
    import pandas as pd

    from benchmark.counts import ScoredBatch

_T = TypeVar("_T")
#: Metrics that are compared if none are named: all of runs with clinical metrics, the first one of others.
USUAL = ("accuracy", "balanced_accuracy", "auroc")
#: Metrics that can be made of kept images.
OF_IMAGES = tuple(name for name, each in METRICS.items() if each.of is not None or each.of_images is not None)
#: Why there is no p value.
GROUPED = "several images of one group, such as a patient, are not independent"
FEW = "fewer than two images of the class, or of the others"
AT_END = "an AUROC is 0 or 1"
ALIKE = "both rank the images alike"


@dataclass(frozen=True)
class PairedTest:
    """A test of two runs' values on the same images.

    Attributes:
        p_value: two-sided; None where there is none.
        alone: images that the first run alone and the second one alone is right on; None if it is not about these.
        error: the difference's standard error; None if it is not about that, or where there is none.
        why: there is no p value; empty where there is one.
    """

    p_value: float | None = None
    alone: tuple[int, int] | None = None
    error: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Difference:
    """Two runs' values on the same images.

    Attributes:
        of: a client's name, or that of a mean or of all images together.
        images: that the values are made of.
        first: the first run's; None where it is not defined.
        second: the second run's.
        interval: of the second value minus the first one, both ends; NaN where there is none.
        test: None where the line has none.
    """

    of: str
    images: int
    first: float | None
    second: float | None
    interval: Interval
    test: PairedTest | None = None

    @property
    def value(self) -> float | None:
        """Return the second value minus the first one; None where one is not defined."""
        return None if self.first is None or self.second is None else self.second - self.first


@dataclass(frozen=True)
class Comparison:
    """A metric of two runs on the same images.

    Attributes:
        metric: its name.
        of_class: the label of the class that an AUROC is of; None where it is of none.
        clients: a line for each client that has images.
        over: lines of the mean over clients and, if the metric is pooled, of all images together.
        span_clients: whether a group has images at several clients.
    """

    metric: str
    of_class: int | None
    clients: tuple[Difference, ...]
    over: tuple[Difference, ...]
    span_clients: bool

    @property
    def unpaired(self) -> list[str]:
        """Return the clients that one run alone has a value of."""
        return [line.of for line in self.clients if (line.first is None) != (line.second is None)]

    @property
    def undefined(self) -> list[str]:
        """Return the clients that neither run has a value of."""
        return [line.of for line in self.clients if line.first is None and line.second is None]

    @property
    def adjusted(self) -> list[float | None]:
        """Return the clients' p values by Holm's method, None for a client without one; none at all for one alone."""
        values = [line.test.p_value if line.test else None for line in self.clients]
        there = [value for value in values if value is not None]
        if len(there) < 2:
            return []
        made = iter(intervals.holm(there))
        return [None if value is None else next(made) for value in values]


def chosen_metrics(
    given: Sequence[str], first: StoredRun, second: StoredRun, points: tuple[str, str], split: str
) -> tuple[str, ...]:
    """Return the names of the metrics to compare: those that are given, or :data:`USUAL` ones.

    Raises:
        ConfigurationError: one cannot be made of kept images, or is a mean over other classes in each run.
    """
    from difflib import get_close_matches

    for name in given:
        if name not in OF_IMAGES:
            like = did_you_mean(get_close_matches(name[:100], OF_IMAGES))
            raise ConfigurationError(
                f"{name[:100]!r} is no metric that is made of predictions{like}; these are {', '.join(OF_IMAGES)}"
            )
    both = [
        run.record.summary.get(point, {}).get(split, {}) for run, point in zip((first, second), points, strict=True)
    ]
    names = tuple(dict.fromkeys(given)) or (USUAL if all("auroc" in each for each in both) else USUAL[:1])
    supports = first.min_support, second.min_support
    for name in names:
        if name in MEANS_OVER_CLASSES and supports[0] != supports[1]:
            raise ConfigurationError(
                f"{name} of {first.folder} and {second.folder} are means over other classes: data.min_support is "
                f"{supports[0]} and {supports[1]}; compare others, as in --metric accuracy"
            )
    return names


def auroc_of(of_class: int) -> Metric:
    """Return the AUROC of one class against the rest as a metric."""
    return Metric(
        "auroc",
        (),
        of_draws=lambda images, times: ranked_classes(images, times, of_class).auroc[:, of_class],
        pooled="counts",
        always_defined=False,
    )


def compared(
    rows: "tuple[pd.DataFrame, pd.DataFrame]", metric: Metric, names: Sequence[str], of_class: int | None = None
) -> Comparison:
    """Compare a metric of two runs, for each client, averaged over them, and of all images together if it is pooled.

    Images are drawn anew, the same ones for both runs, those of a group together
    (:class:`benchmark.records.drawn_images.Draws`).

    Args:
        rows: of both runs (:func:`benchmark.records.same_images.paired_images`).
        metric: made of images.
        names: of all clients.
        of_class: the class that the metric is the AUROC of; None if it is of none.
    """
    import numpy as np

    images, group = _both(images_of(each) for each in rows), rows[0]["group"].to_numpy()
    draws = draw_images(rows[0], metric.name, "comparison")
    once, drawn = (
        _both(by_client(metric, each, draws.own, times) for each in images) for times in (draws.once, draws.times)
    )
    line = functools.partial(_line, metric.name, of_class)
    clients = [
        line(
            names[client],
            _both(at_places(each, places) for each in images),
            group[places],
            _both(each[client] for each in once),
            _both(each[client] for each in drawn),
        )
        for client, places in draws.own.items()
    ]
    of_over = drawn
    if draws.span_clients:
        of_over = _both(by_client(metric, each, draws.own, draws.over) for each in images)
    there = [client for client, each in zip(draws.own, clients, strict=True) if each.value is not None]
    means, drawn_means = (_both(mean_over(there, each) for each in values) for values in (once, of_over))
    of_mean = np.concatenate([draws.own[client] for client in there]) if there else np.zeros(0, dtype=int)
    at_mean = _both(at_places(each, of_mean) for each in images)
    over = [_line("", None, THESE, at_mean, group[of_mean], means, drawn_means)]  # no test of a mean
    if metric.pooled is not None:
        values, drawn_values = (
            _both(values_in(metric, each, times) for each in images) for times in (draws.once, draws.over)
        )
        over.append(line(POOLED, images, group, values, drawn_values))
    return Comparison(metric.name, of_class, tuple(clients), tuple(over), draws.span_clients)


def _both(two: "Iterable[_T]") -> "tuple[_T, _T]":
    first, second = two
    return first, second


def _line(
    metric: str,
    of_class: int | None,
    of: str,
    images: "tuple[ScoredBatch, ScoredBatch]",
    group: "np.ndarray",
    once: "tuple[np.ndarray, np.ndarray]",
    drawn: "tuple[np.ndarray, np.ndarray]",
) -> Difference:
    """Return a line of values [1] and values in draws [draws] of both runs."""
    first, second = (number(values[0]) for values in once)
    differences = drawn[1] - drawn[0]
    alike = bool((images[0].logits == images[1].logits).all())  # then no draw can differ, and 0 to 0 is right
    ends = intervals.of_draws(differences) if alike else of_drawn(differences)
    test = None
    if first is not None and second is not None:
        if of_class is not None:
            test = _delong(images, of_class, has_groups(group))
        elif metric == "accuracy":
            test = _mcnemar(images, has_groups(group))
    return Difference(of, len(group), first, second, ends, test)


def _mcnemar(images: "tuple[ScoredBatch, ScoredBatch]", grouped: bool) -> PairedTest:
    first, second = ((each.predictions == each.y).numpy() for each in images)
    found = intervals.mcnemar(first, second)
    alone = found.first, found.second
    return PairedTest(alone=alone, why=GROUPED) if grouped else PairedTest(found.p_value, alone)


def _delong(images: "tuple[ScoredBatch, ScoredBatch]", of_class: int, grouped: bool) -> PairedTest:
    import numpy as np

    if grouped:
        return PairedTest(why=GROUPED)
    scores = np.stack([each.probabilities[:, of_class].numpy() for each in images])
    areas = intervals.delong(scores, (images[0].y == of_class).numpy())
    error = areas.error()
    if math.isnan(error):
        return PairedTest(why=FEW)
    if not ((areas.values > 0) & (areas.values < 1)).all():
        return PairedTest(error=error, why=AT_END)
    return PairedTest(areas.p_value(), error=error) if error > 0 else PairedTest(error=error, why=ALIKE)
