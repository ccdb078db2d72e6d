"""Intervals of a finished run's metrics: over the images that it kept, and over its clients."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmark import intervals
from benchmark.errors import ConfigurationError, printable
from benchmark.intervals import DRAWS, Interval
from benchmark.metrics import METRICS, Metric, value_of_images
from benchmark.records.predictions import PREDICTIONS, images_of
from benchmark.records.stored_run import StoredRun, stored_run
from benchmark.records.summary import client_values
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


class Line(NamedTuple):
    """A value with its interval.

    Attributes:
        of: a client's name, or one of the three above.
        images: that it is made of; None where that is not known.
        value: None where it is not defined.
        interval: its ends.
        how: it was made.
    """

    of: str
    images: int | None
    value: float | None
    interval: Interval
    how: str


def print_intervals(run_dir: str | Path, metric: str) -> None:
    """Print a metric of a run's last evaluation with its intervals, a table for each point and split.

    Raises:
        ConfigurationError: the run is not finished, its files are others than it wrote, or it has no such metric.
    """
    from rich.console import Console
    from rich.table import Table
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
    for split, point in places:
        title = printable(metric_words(split, metric, point) + unit_of(metric))
        shown = Table("", "images", "value", "95 % from", "to", "by", title=title)
        for line in lines_of(run, metric, point, split):
            numbers = [
                "" if number is None or math.isnan(number) else metric_number(number, metric)
                for number in (line.value, *line.interval)
            ]
            images = "" if line.images is None else str(line.images)
            shown.add_row(Text(printable(line.of)), images, *numbers, line.how)
        console.print(shown)


def lines_of(run: StoredRun, metric: str, point: str, split: str) -> list[Line]:
    """Return a metric of the last evaluation with its intervals, for each client and over clients.

    Over clients it is made of any run, and of single clients' test accuracy; all else needs images that were kept, and
    a metric that is known here: one of the user's own is not imported.

    Raises:
        ConfigurationError: the run has no such metric at this point and split.
    """
    import numpy as np

    entry = run.record.summary.get(point, {}).get(split, {}).get(metric)
    if entry is None:
        raise ConfigurationError(f"the run has no {metric} on {split} at the point '{point}'")
    values = np.asarray(client_values(run.metrics, run.record, point, split, metric, "last"))
    defined = values[np.isfinite(values)]
    few = len(defined) < intervals.FEW_CLIENTS
    like = Line(
        LIKE_THESE, None, entry["last"]["average"], intervals.of_clients(defined), "t" if few else "clients drawn anew"
    )
    computed = METRICS[metric].of is not None or METRICS[metric].of_images is not None  # else it is another program's
    if computed and PREDICTIONS in run.record.files and (run.folder / PREDICTIONS).exists():
        rows = run.predictions
        rows = rows[(rows["point"] == point) & (rows["split"] == split)]
        return [*_of_images(rows, METRICS[metric], run.record.client_names), like]
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


def _of_images(rows: "pd.DataFrame", metric: Metric, names: tuple[str, ...]) -> list[Line]:
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
            lines.append(Line(names[client], len(places), _number(value[0]), intervals.of_draws(values), how))
    mean, means = (_mean_where_defined(np.stack(values)) for values in (of_once, of_draws))
    value, values = (values_in(metric, images, times) for times in (once, drawn))
    return [
        *lines,
        Line(THESE, len(rows), _number(mean[0]), intervals.of_draws(means), f"{how} within clients"),
        Line(POOLED, len(rows), _number(value[0]), intervals.of_draws(values), f"{how} within clients"),
    ]


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
    if metric.of_draws is not None and (images.predictions < images.classes).all():
        return metric.of_draws(images, weights).numpy()
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
