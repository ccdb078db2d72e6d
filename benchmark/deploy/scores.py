"""Scores that clients send, and how many images they hold out: nothing of it is taken unseen."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from benchmark.deploy.messages import line
from benchmark.metrics import EVALUATED, Metric

#: Metrics that a client may send at a time.
MOST_METRICS = 1000
#: Its name: point, split and metric.
METRIC = re.compile(r"(server|local)/[a-z0-9_]{1,100}/[a-z0-9_]{1,100}", re.ASCII)
SPLIT = re.compile(r"[a-z0-9_]{1,100}", re.ASCII)


def held_out_of(fields: Mapping[str, Any]) -> dict[str, int] | None:
    """Return how many held-out images a client says it has, by split; None where that is no number of images."""
    found = {name.partition("/")[2]: value for name, value in fields.items() if name.startswith("held_out/")}
    right = all(SPLIT.fullmatch(split) and type(n) is int and 0 <= n < 2**31 for split, n in found.items())
    return found if right and len(found) <= MOST_METRICS else None


def are_metrics(fields: Mapping[str, Any]) -> bool:
    """Return whether fields are values of metrics by their names."""
    return len(fields) <= MOST_METRICS and all(
        type(value) is float and METRIC.fullmatch(name) for name, value in fields.items()
    )


def _in_range(value: float, metric: Metric) -> bool:
    """Return whether a metric can have a value; NaN says that it is not defined, or that a loss diverged."""
    if math.isnan(value):
        return not metric.always_defined or metric.name == "loss"
    if metric.name == "loss":
        return value >= 0
    return 0 <= value <= 1 if metric.per_cent else math.isfinite(value)


def why_no_scores(fields: Mapping[str, Any], splits: Collection[str], metrics: Mapping[str, Metric]) -> str:
    """Return why fields are no scores of a client's held-out images, or nothing.

    At the point "local" a client that has not trained has NaN for all of them.

    Args:
        fields: values by point, split and metric.
        splits: of which the client has images.
        metrics: those of the deployment, by name.
    """
    if not are_metrics(fields):
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
