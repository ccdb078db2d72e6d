"""Intervals of a finished run's metrics: over the images that it kept, and over its clients."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmark import intervals
from benchmark.errors import ConfigurationError, printable
from benchmark.intervals import DRAWS, Interval
from benchmark.metrics import CORRUPTED_DROP, MEANS_OVER_CLASSES, METRICS, POOLED_CLIENT, Metric, value_of_images
from benchmark.records.averaged_classes import Averaged, averaged_classes, not_alike
from benchmark.records.predictions import PREDICTIONS, by_class, images_of
from benchmark.records.stored_run import StoredRun, stored_run
from benchmark.records.summary import client_values, values_of_round
from benchmark.records.words import metric_number, metric_words, unit_of
from benchmark.seeds import numpy_generator

if TYPE_CHECKING:  # slow to import
    import numpy as np
    import pandas as pd
    from torch import Tensor

    from benchmark.counts import ScoredBatch

#: Images in the draws that are computed together, for memory.
MOST_AT_ONCE = 1_000_000
#: Lines beside those of clients, and what is drawn anew for each.
THESE, LIKE_THESE, POOLED = "mean, these clients", "mean, clients like these", "all images together"
#: What is said below the tables.
NO_INTERVAL = (
    "A value has no interval if the metric is undefined in more than a tenth of the draws, or the same in nearly all: "
    "such images, few and all ranked right for example, bound nothing."
)
BEYOND = "By t, the interval of a mean over few clients may go beyond 0 or 1: so few clients say little about others."
#: Metrics between 0 and 1.
SHARES = {*(name for name, each in METRICS.items() if each.per_cent), *MEANS_OVER_CLASSES, "ece"} - {CORRUPTED_DROP}


class Line(NamedTuple):
    """A value with its interval.

    Attributes:
        of: a client's name, or one of the three above.
        images: that it is made of; None where that is not known.
        value: None where it is not defined.
        interval: its ends.
        how: it was made.
        classes: those that the value is a mean over; None where it is no such mean, or one over clients.
    """

    of: str
    images: int | None
    value: float | None
    interval: Interval
    how: str
    classes: tuple[int, ...] | None = None


def print_intervals(run_dir: str | Path, metric: str) -> None:
    """Print a metric of a run's last evaluation with its intervals, a table for each point and split.

    Raises:
        ConfigurationError: the run is not finished, its files are others than it wrote, or it has no such metric.
    """
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    run, console = stored_run(run_dir), Console(highlight=False, markup=False)
    scored = [
        (split, point, name)
        for point, splits in run.record.summary.items()
        for split, metrics in splits.items()
        for name in metrics
        if split != "train"
    ]
    places = [(split, point) for split, point, name in sorted(scored) if name == metric]
    if not places:
        known = ", ".join(sorted({name for *_, name in scored}))
        raise ConfigurationError(f"{run_dir} has no metric {metric!r:.80}; it has {known}")
    said = []
    for split, point in places:
        lines = lines_of(run, metric, point, split)
        means = [line for line in lines if line.classes is not None]
        title = printable(title_of(run, metric, point, split))
        counted = [Column("auroc_classes", no_wrap=True)] if means else []
        heads: list[str | Column] = ["", "images", *counted, "value", "95 % from", "to", "by"]
        shown = Table(*heads, title=title)
        for line in lines:
            numbers = [
                "" if number is None or math.isnan(number) else metric_number(number, metric)
                for number in (line.value, *line.interval)
            ]
            of_mean = None if line.classes is None else len(line.classes)
            counts = [line.images, *([of_mean] if means else [])]
            whole = ["" if count is None else str(count) for count in counts]
            shown.add_row(Text(printable(line.of)), *whole, *numbers, line.how)
        console.print(shown)
        if any(line.value is not None and math.isnan(line.interval.low) for line in lines if line.images is not None):
            said.append(NO_INTERVAL)
        low, high = lines[-1].interval
        if metric in SHARES and lines[-1].how == "t" and (low < 0 or high > 1):
            said.append(BEYOND)
        own = [line for line in means if line.of != POOLED]
        said.append(not_alike({n: line.classes or () for n, line in enumerate(own)}, [line.of for line in own]))
    if PREDICTIONS not in run.record.files:
        said.append(
            "The run kept no images, of which single clients have intervals: --data.keep_predictions=last does."
        )
    for sentence in dict.fromkeys(filter(None, said)):
        console.print(Text(printable(sentence)))


def title_of(run: StoredRun, metric: str, point: str, split: str) -> str:
    """Name what the lines are of, with their round where it may be another one than the last."""
    best = run.keep == "best_on_val" and _of_kept(run, metric)
    words = metric_words(split, metric, point) + unit_of(metric)
    return words + (f", round {_kept_round(run)}, best on val" if best else "")


def _of_kept(run: StoredRun, metric: str) -> bool:
    """Return whether a metric can be made of the images that a run kept; others are another program's, say."""
    return run.has(PREDICTIONS) and (METRICS[metric].of is not None or METRICS[metric].of_images is not None)


def _kept_round(run: StoredRun) -> int:
    return int(run.predictions["round"].max())


def lines_of(run: StoredRun, metric: str, point: str, split: str) -> list[Line]:
    """Return a metric with its intervals, for each client and over clients, of the last evaluation.

    Of a run that keeps the images of the round that is best on ``val``, it is that round's.

    Over clients it is made of any run, and of single clients' test accuracy; all else needs images that were kept, and
    a metric that is known here: one of the user's own is not imported.

    Raises:
        ConfigurationError: the run has no such metric at this point and split.
    """
    import numpy as np

    entry = run.record.summary.get(point, {}).get(split, {}).get(metric)
    if entry is None:
        raise ConfigurationError(f"the run has no {metric} on {split} at the point '{point}'")
    kept = _of_kept(run, metric)
    values = np.asarray(
        values_of_round(run.metrics, run.record, point, split, metric, _kept_round(run))
        if kept
        else client_values(run.metrics, run.record, point, split, metric, "last")
    )
    defined = values[np.isfinite(values)]
    how = "t" if len(defined) < intervals.FEW_CLIENTS else "clients drawn anew"
    average = float(defined.mean()) if len(defined) else None
    like = Line(LIKE_THESE, None, average, intervals.of_clients(defined), how)
    if kept:
        rows = run.predictions
        rows = rows[(rows["point"] == point) & (rows["split"] == split)]
        averaged = (
            averaged_classes(by_class(rows), run.min_support)[point, split] if metric in MEANS_OVER_CLASSES else {}
        )
        return [*_of_images(rows, run.metric(metric), run.record.client_names, averaged), like]
    if metric == "accuracy" and split == "test":
        sizes = run.record.test_sizes
        known = [client for client, value in enumerate(values) if np.isfinite(value)]
        return [
            *(_share(run.record.client_names[each], round(values[each] * sizes[each]), sizes[each]) for each in known),
            like,
        ]
    return [like]


def _share(of: str, right: int, images: int) -> Line:
    return Line(of, images, right / images, intervals.of_share(right, images), "Wilson")


def _of_images(rows: "pd.DataFrame", metric: Metric, names: tuple[str, ...], averaged: Averaged) -> list[Line]:
    """Return a line for each client, for their mean, and for all images together."""
    import numpy as np

    rng = numpy_generator(0, "bootstrap", metric.name, str(rows["split"].iloc[0]))
    numbers = rows["client"].to_numpy()
    own = {int(client): np.flatnonzero(numbers == client) for client in np.unique(numbers)}
    group = rows["group"].to_numpy()
    drawn = np.zeros((DRAWS, len(rows)), dtype="int32")
    for places, times in zip(own.values(), intervals.drawn([group[each] for each in own.values()], rng), strict=True):
        drawn[:, places] = times
    once = np.ones((1, len(rows)), dtype="int32")
    images = images_of(rows)
    clustered = any(len(np.unique(group[places])) < len(places) for places in own.values())
    how = "groups of images drawn anew" if clustered else "images drawn anew"
    lines, of_draws, of_once = [], [], []
    for client, places in own.items():
        theirs = _at(images, places)
        value, values = (values_in(metric, theirs, times[:, places]) for times in (once, drawn))
        of_once.append(value)
        of_draws.append(values)
        if metric.name == "accuracy" and not clustered:
            lines.append(_share(names[client], round(float(value[0]) * len(places)), len(places)))
        else:
            ends = _of_drawn(values)
            lines.append(Line(names[client], len(places), _number(value[0]), ends, how, averaged.get(client)))
    mean, means = (_mean_where_defined(np.stack(values)) for values in (of_once, of_draws))
    value, values = (values_in(metric, images, times) for times in (once, drawn))
    ends, of_all = _of_drawn(values), averaged.get(POOLED_CLIENT)
    return [
        *lines,
        Line(THESE, len(rows), _number(mean[0]), _of_drawn(means), f"{how} within clients"),
        Line(POOLED, len(rows), _number(value[0]), ends, f"{how} within clients", of_all),
    ]


def _of_drawn(values: "np.ndarray") -> Interval:
    """Return the interval of drawn images; none where all draws are alike, which a few easy images give at 0 or 1."""
    ends = intervals.of_draws(values)
    return intervals.NONE if ends.low == ends.high else ends


def _number(value: float) -> float | None:
    return float(value) if value == value else None


def _mean_where_defined(values: "np.ndarray") -> "np.ndarray":
    """Return the mean over clients [draws] of values [clients, draws]; NaN where no client has one."""
    import numpy as np

    there = np.isfinite(values)
    sums, count = np.where(there, values, 0.0).sum(0), there.sum(0)
    made: np.ndarray = np.where(count > 0, sums / np.maximum(count, 1), np.nan)
    return made


def _at(images: "ScoredBatch", places: "np.ndarray") -> "ScoredBatch":
    from benchmark.counts import ScoredBatch

    return ScoredBatch(images.logits[places], images.y[places])


def values_in(metric: Metric, images: "ScoredBatch", times: "np.ndarray") -> "np.ndarray":
    """Return a metric of draws of images, float64 [draws]; NaN where it is not defined.

    Args:
        metric: which.
        images: n of them.
        times: how often each image is in each draw, [draws, n].
    """
    import numpy as np

    together = max(1, MOST_AT_ONCE // len(images.y))
    parts = [_in_draws(metric, images, times[start : start + together]) for start in range(0, len(times), together)]
    return np.concatenate(parts)


def _in_draws(metric: Metric, images: "ScoredBatch", times: "np.ndarray") -> "np.ndarray":
    import numpy as np
    import torch

    weights = torch.from_numpy(times)
    if metric.of is not None:
        made = metric.of(*(_counted(kind.count(_apart(images)), weights) for kind in metric.counts))
        return np.asarray(made, dtype="float64")
    if metric.of_draws is not None:
        unknown = images.predictions == images.classes  # without a prediction: it counts for nothing if not drawn
        drawn = (weights[:, unknown] > 0).any(1)
        return metric.of_draws(images, weights).masked_fill(drawn, float("nan")).numpy()
    rows = [torch.arange(len(images.y)).repeat_interleave(each) for each in weights]
    return np.asarray([value_of_images(metric, _at(images, each.numpy())) for each in rows])


def _apart(images: "ScoredBatch") -> "ScoredBatch":
    """Return images as if each were a client's."""
    from benchmark.counts import ScoredBatch

    return ScoredBatch(images.logits.unsqueeze(1), images.y.unsqueeze(1))


def _counted(of_images: "Tensor", times: "Tensor") -> "Tensor":
    """Sum what each image counts for, [n, ...], as often as it is in each draw: float64 [draws, ...]."""
    whole = times.double() @ of_images.double().reshape(len(of_images), -1)
    return whole.view(len(times), *of_images.shape[1:])
