"""Intervals of a finished run's metrics: over the images that it kept, and over its clients."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmark import intervals
from benchmark.errors import ConfigurationError, printable
from benchmark.intervals import Interval
from benchmark.metrics import CORRUPTED_DROP, EVALUATED, MEANS_OVER_CLASSES, METRICS, POOLED_CLIENT, Metric
from benchmark.records.averaged_classes import Averaged, averaged_classes, not_alike
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
from benchmark.records.predictions import PREDICTIONS, by_class, images_of
from benchmark.records.stored_run import StoredRun, stored_run
from benchmark.records.summary import client_values, values_of_round
from benchmark.records.words import metric_number, metric_words, unit_of

if TYPE_CHECKING:  # slow to import
    import pandas as pd

    from benchmark.counts import ScoredBatch

#: Lines beside those of clients, and what is resampled for each.
THESE, LIKE_THESE, POOLED = "mean, these clients", "mean, clients like these", "all images together"
#: What is said below the tables.
NO_INTERVAL = (
    "A value has no interval if the metric is undefined in more than a tenth of the resamples, or the same in nearly "
    "all: such images, few and all ranked right for example, bound nothing."
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
        wrong = f"{run_dir} has no metric {metric!r:.80}; it" if metric else f"--intervals needs a metric; {run_dir}"
        raise ConfigurationError(f"{wrong} has {known}")
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
                "" if each is None or math.isnan(each) else metric_number(each, metric)
                for each in (line.value, *line.interval)
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
            "The run stored no predictions, of which single clients have intervals: --data.keep_predictions=last does."
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

    def of_clients(metric: str) -> "np.ndarray":
        if kept:
            return np.asarray(values_of_round(run.metrics, run.record, point, split, metric, _kept_round(run)))
        return np.asarray(client_values(run.metrics, run.record, point, split, metric, "last"))

    values = of_clients(metric)
    defined = values[np.isfinite(values)]
    if _lacks_none(metric) and (np.isfinite(of_clients(EVALUATED)) & ~np.isfinite(values)).any():
        defined = values[:0]  # a client has diverged: the mean of the others is not the run's
    how = "t" if len(defined) < intervals.FEW_CLIENTS else "clients resampled"
    average = float(defined.mean()) if len(defined) else None
    like = Line(LIKE_THESE, None, average, intervals.of_clients(defined), how)
    if kept:
        rows = run.scored(point, split)
        averaged = (
            averaged_classes(by_class(rows), run.min_support)[point, split] if metric in MEANS_OVER_CLASSES else {}
        )
        return [*lines_of_images(rows, run.metric(metric), run.record.client_names, averaged), like]
    if metric == "accuracy" and split == "test":
        sizes = run.record.test_sizes
        known = [client for client, value in enumerate(values) if np.isfinite(value)]
        return [
            *(_share(run.record.client_names[each], round(values[each] * sizes[each]), sizes[each]) for each in known),
            like,
        ]
    return [like]


def _lacks_none(metric: str) -> bool:
    """Return whether each evaluated client has a value, or has diverged."""
    return metric != EVALUATED and metric in METRICS and METRICS[metric].always_defined


def _share(of: str, right: int, images: int) -> Line:
    return Line(of, images, right / images, intervals.of_share(right, images), "Wilson")


def _of_area(images: "ScoredBatch") -> Interval:
    """Return DeLong's interval of the AUROC of two classes; none at 0 and 1, or with one image of a class."""
    scores, positive = images.probabilities[:, 1].numpy(), (images.y == 1).numpy()
    return intervals.delong(scores[None], positive).interval()


def lines_of_images(rows: "pd.DataFrame", metric: Metric, names: Sequence[str], averaged: Averaged) -> list[Line]:
    """Return a line for each client, for their mean, and for all images together.

    Args:
        rows: of one point and split.
        metric: made of images.
        names: of all clients.
        averaged: the classes that a mean over classes is of; empty for another metric.
    """
    images, draws = images_of(rows), draw_images(rows, metric.name)
    clustered = any(has_groups(rows["group"].to_numpy()[places]) for places in draws.own.values())
    how = "groups of images resampled" if clustered else "images resampled"
    of_once, of_draws = (by_client(metric, images, draws.own, times) for times in (draws.once, draws.times))
    lines = []
    for client, places in draws.own.items():
        value = number(of_once[client][0])
        if metric.name == "accuracy" and not clustered and value is not None:
            lines.append(_share(names[client], round(value * len(places)), len(places)))
            continue
        ends, by = of_drawn(of_draws[client]), how
        if metric.name == "auroc" and images.classes == 2 and not clustered and value is not None:
            exact = _of_area(at_places(images, places))
            ends, by = (ends, by) if math.isnan(exact.low) else (exact, "DeLong")
        lines.append(Line(names[client], len(places), value, ends, by, averaged.get(client)))
    of_over = by_client(metric, images, draws.own, draws.over) if draws.span_clients else of_draws
    there = [client for client, value in of_once.items() if _lacks_none(metric.name) or number(value[0]) is not None]
    mean, means = (mean_over(there, values) for values in (of_once, of_over))
    pooled, values = (values_in(metric, images, times) for times in (draws.once, draws.over))
    of_all, by = averaged.get(POOLED_CLIENT), f"{how} within clients"
    if draws.span_clients:
        by = "groups of images resampled, of all clients at once"
    count = sum(len(draws.own[client]) for client in there)
    return [
        *lines,
        Line(THESE, count, number(mean[0]), of_drawn(means), by),
        Line(POOLED, len(rows), number(pooled[0]), of_drawn(values), by, of_all),
    ]
