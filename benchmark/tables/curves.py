"""A table's metric over the rounds, or over the seconds of a virtual clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmark.drawing import line_style, new_figure, save_figure
from benchmark.metrics import scale_of
from benchmark.records.stored_run import StoredRun
from benchmark.records.summary import average_by_round, clock_of
from benchmark.records.words import unit_of
from benchmark.tables.layout import Table
from benchmark.tables.lines import Line

if TYPE_CHECKING:  # slow to import
    import pandas as pd


CLOCK = "seconds of the virtual clock"


@dataclass(frozen=True)
class Curve:
    """A row's metric where it was evaluated, one array [T] for each seed.

    Attributes:
        name: of the method.
        places: rounds, or seconds of a virtual clock, ascending [T].
        seeds: the values, as many at each seed.
    """

    name: str
    places: NDArray[Any]
    seeds: Sequence[NDArray[np.float64]]


def learning_curves(
    panels: Sequence[tuple[str, Sequence[Curve]]], y_label: str, path: str | Path, x_label: str = "round"
) -> None:
    """Draw metrics over the rounds as a PNG: a panel for each setting, a line for each method.

    Args:
        panels: heading and curves of each; with several seeds the band is one standard deviation.
        y_label: of the metric.
        path: of the PNG; missing folders are made.
        x_label: what the curves' places are.
    """
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = new_figure(3.2 + 3.8 * columns, 0.6 + 3.2 * rows)
    names = list(dict.fromkeys(curve.name for _, curves in panels for curve in curves))
    lines = {}
    for place, (heading, curves) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        for curve in curves:
            style = line_style(names.index(curve.name))
            mean = np.mean(curve.seeds, axis=0)
            (lines[curve.name],) = axes.plot(curve.places, mean, **style, linewidth=1.4)
            if len(curve.seeds) > 1:
                spread = np.std(curve.seeds, axis=0, ddof=1)
                axes.fill_between(curve.places, mean - spread, mean + spread, color=style["color"], alpha=0.15, lw=0)
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel(x_label)
        if place % columns == 0:
            axes.set_ylabel(y_label)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    figure.legend([lines[name] for name in names], names, loc="outside right upper", fontsize=8, frameon=False)
    save_figure(figure, path)


def draw_curves(table: Table, lines: Sequence[Line], path: Path) -> None:
    """Draw the table's metric over the rounds, averaged over clients; no picture if no line has a run.

    Where all runs have a virtual clock, it is drawn over the clock's seconds, of several seeds over their mean.
    """
    import pandas as pd

    clocks = {run.folder: clock_of(run.record) for line in lines for run in line.runs.values()}
    timed = all(clocks.values())
    panels: dict[str, list[Curve]] = {}
    for line in lines:
        if line.runs:
            averages = [_average_by_round(run, line.point, table) for run in line.runs.values()]
            shared = pd.concat(averages, axis=1, join="inner")
            heading = ", ".join(filter(None, [line.group.panel, line.group.label]))
            places = shared.index.to_numpy()
            if timed:
                places = np.mean([[clocks[run.folder][at] for at in places] for run in line.runs.values()], axis=0)
            curve = Curve(line.name, places, list(shared.to_numpy().T))
            panels.setdefault(heading, []).append(curve)
    if panels:
        y_label = f"{table.metric.replace('_', ' ')} on {table.split}{unit_of(table.metric)}, average over clients"
        learning_curves(list(panels.items()), y_label, path, CLOCK if timed else "round")


def _average_by_round(run: StoredRun, point: str, table: Table) -> "pd.Series[float]":
    """Per round the average over clients of the table's metric, as its records take it; accuracies in per cent."""
    import pandas as pd

    rounds, found = average_by_round(run.metrics, run.record.test_sizes, point, table.split, table.metric)
    return pd.Series(found.get("average"), rounds) * scale_of(table.metric)
