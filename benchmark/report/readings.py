"""The numbers of an experiment that the report shows."""

import math
from typing import Any

import numpy as np

from benchmark.records.environment import threads_of
from benchmark.records.grouped_runs import Experiment, Run
from benchmark.records.summary import average_by_round, client_values, clock_of
from benchmark.records.words import POINT_WORDS
from benchmark.tables.numbers import scaled


def accuracy_of(run: Run, point: str) -> dict[str, Any]:
    """The record's summary of test accuracy at a point; empty if it was not evaluated there."""
    entry = run.record.summary.get(point, {}).get("test", {}).get("accuracy", {})
    return dict(entry)


def statistic_of(experiment: Experiment, point: str, which: str, statistic: str) -> list[float | None]:
    values = [accuracy_of(run, point).get(which, {}).get(statistic) for run in experiment.runs]
    return [None if value is None else scaled(value, "accuracy") for value in values]


def points_of(experiment: Experiment) -> list[str]:
    return [point for point in POINT_WORDS if all(accuracy_of(run, point) for run in experiment.runs)]


def evaluated_rounds(run: Run, point: str) -> int:
    """Return the number of training rounds after which the test images were evaluated at a point."""
    metrics = run.metrics
    there = (metrics["point"] == point) & (metrics["split"] == "test") & (metrics["metric"] == "accuracy")
    return int(metrics.loc[there & (metrics["round"] > 0), "round"].nunique())


def learning_curve(experiment: Experiment, point: str) -> list[dict[str, Any]]:
    """Average over clients by round: the mean over seeds, and the lowest and highest seed where there are several.

    Where all seeds have a virtual clock, ``clock`` is the mean of its seconds when the round closed.
    """
    clocks = [clock_of(run.record) for run in experiment.runs]
    curves = []
    for run in experiment.runs:
        rounds, statistics = average_by_round(run.metrics, run.record.test_sizes, point, "test", "accuracy")
        curves.append({int(r): 100 * float(v) for r, v in zip(rounds, statistics.get("average", ()), strict=True)})
    rows = []
    for number in sorted(set.intersection(*(set(curve) for curve in curves))):
        values = [curve[number] for curve in curves]
        if all(map(math.isfinite, values)):
            span = {"low": round(min(values), 3), "high": round(max(values), 3)} if len(values) > 1 else {}
            mean = round(math.fsum(values) / len(values), 3)
            time = (
                {"clock": round(math.fsum(clock[number] for clock in clocks) / len(clocks), 3)} if all(clocks) else {}
            )
            rows.append({"method": experiment.name, "round": number, "accuracy": mean, **span, **time})
    return rows


def last_by_client(experiment: Experiment, point: str) -> list[tuple[str, float]]:
    """Name and last test accuracy of every client, the mean over seeds; clients without a value are left out."""
    runs = [run for run in experiment.runs if run.record.client_names == experiment.first.record.client_names]
    values = [client_values(run.metrics, run.record, point, "test", "accuracy", "last") for run in runs]
    means = 100 * np.array(values).mean(axis=0)
    names = experiment.first.record.client_names
    return [(name, float(value)) for name, value in zip(names, means, strict=True) if math.isfinite(value)]


def traffic_of(experiment: Experiment) -> list[float]:
    """Bytes up and down of a participating client in a round."""
    return [run.record.communication["up_bytes"] + run.record.communication["down_bytes"] for run in experiment.runs]


def hardware_of(run: Run) -> str:
    """The accelerator, or the cores, the CPU and how many threads a run computed with, if it says so."""
    if run.record.device != "cpu":
        return run.record.device
    machine = run.record.environment.get("hardware", {})
    return f"{machine.get('cores', '?')} cores of {machine.get('cpu', 'an unknown CPU')}{threads_of(run.record)}"
