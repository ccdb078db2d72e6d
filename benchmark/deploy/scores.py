"""Scores that clients send, and how many images they hold out: nothing of it is taken unseen."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from benchmark.deploy.messages import line
from benchmark.metrics import EVALUATED, Metric
from benchmark.records.record import HUGE

#: Metrics that a client may send at a time.
MOST_METRICS = 1000
#: Its name: point, split and metric.
METRIC = re.compile(r"(server|local)/[a-z0-9_]{1,100}/[a-z0-9_]{1,100}", re.ASCII)
SPLIT = re.compile(r"[a-z0-9_]{1,100}", re.ASCII)
#: Beyond every number of float32, and so far below what a record takes that spreads over clients fit into one, too.
LARGEST = HUGE / 10


def held_out_of(fields: Mapping[str, Any]) -> dict[str, int] | None:
    """Return how many held-out images a client says it has, by split; None where that is no number of images."""
    found = {name.partition("/")[2]: value for name, value in fields.items() if name.startswith("held_out/")}
    right = all(SPLIT.fullmatch(split) and type(n) is int and 0 <= n < 2**31 for split, n in found.items())
    return found if right and len(found) <= MOST_METRICS else None


def reported(fields: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    """Return what a client says of its training and a record can hold, and what is wrong with the first of the rest.

    Args:
        fields: of its answer, by name.
    """
    given = {name: value for name, value in fields.items() if name.startswith("local/train/")}
    if len(given) > MOST_METRICS:
        return {}, f"{len(given)} numbers; expected at most {MOST_METRICS}"
    taken = {name: value for name, value in given.items() if not _why_no_metric(name, value)}
    return taken, next((_why_no_metric(name, given[name]) for name in sorted(given.keys() - taken.keys())), "")


def _why_no_metric(name: str, value: object) -> str:
    """Return why a field is no metric with a value that a record can hold, or nothing."""
    if not METRIC.fullmatch(name):
        return f"{line(name)} is no metric's name: point/split/metric of small letters, digits and underscores"
    if type(value) is not float:
        return f"{line(name)} is no number"
    return f"{line(name)} is {value:g}" if LARGEST < abs(value) < math.inf else ""


def _in_range(value: float, metric: Metric) -> bool:
    """Return whether a metric can have a value; NaN says that it is not defined, or that a loss diverged."""
    if math.isnan(value):
        return not metric.always_defined or metric.name == "loss"
    if metric.name == "loss":
        return 0 <= value <= LARGEST or value == math.inf
    return 0 <= value <= 1 if metric.per_cent else abs(value) <= LARGEST


def scores_of(fields: Mapping[str, Any], held_out: Mapping[str, int]) -> dict[str, Any]:
    """Return a client's scores without the NaN of splits that it says it has no images of.

    Args:
        fields: of its answer, by point, split and metric.
        held_out: by split, its number of images.
    """
    return {
        name: value
        for name, value in fields.items()
        if value == value or held_out.get("".join(name.split("/")[1:2]), 1)
    }


def why_no_scores(fields: Mapping[str, Any], splits: Collection[str], metrics: Mapping[str, Metric]) -> str:
    """Return why fields are no scores of a client's held-out images, or nothing.

    At the point "local" a client that has not trained has NaN for all of them.

    Args:
        fields: values by point, split and metric.
        splits: of which the client has images.
        metrics: those of the deployment, by name.
    """
    if len(fields) > MOST_METRICS or not all(
        type(value) is float and METRIC.fullmatch(name) for name, value in fields.items()
    ):
        return "they are no metrics"
    there: dict[tuple[str, str], set[str]] = {}
    for name, value in fields.items():
        point, split, metric = name.split("/")
        if split not in splits or metric not in metrics:
            return f"{line(name)} is not asked for"
        trained = point != "local" or not math.isnan(fields.get(f"local/{split}/{EVALUATED}", 0.0))
        if not (_in_range(value, metrics[metric]) if trained else math.isnan(value)):
            return f"{line(name)} is {value:g}"
        there.setdefault((point, split), set()).add(metric)
    always = {name for name, metric in metrics.items() if metric.always_defined}
    missing = next((f"{'/'.join(at)}/{min(always - names)}" for at, names in there.items() if always - names), "")
    return f"{missing} is missing" if missing else ""
