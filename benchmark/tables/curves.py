"""A table's metric over the rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from benchmark.cells.identity import Cell
from benchmark.cells.outcome import Outcome
from benchmark.drawing import new_figure, save_figure
from benchmark.records.stored_run import stored_run
from benchmark.tables.layout import Preset, Table, rows_of

if TYPE_CHECKING:  # slow to import
    import pandas as pd


@dataclass(frozen=True)
class Curve:
    """A row's metric over the rounds, one array [rounds] for each seed.

    Attributes:
        name: of the method.
        rounds: where it was evaluated.
        seeds: the values, as many at each seed.
    """

    name: str
    rounds: NDArray[np.int64]
    seeds: Sequence[NDArray[np.float64]]


def learning_curves(panels: Sequence[tuple[str, Sequence[Curve]]], y_label: str, path: str | Path) -> None:
    """Draw metrics over the rounds as a PNG: a panel for each setting, a line for each method.

    Args:
        panels: heading and curves of each; with several seeds the band is one standard deviation.
        y_label: of the metric.
        path: of the PNG; missing folders are made.
    """
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = new_figure(3.2 + 3.8 * columns, 0.6 + 3.2 * rows)
    names = list(dict.fromkeys(curve.name for _, curves in panels for curve in curves))
    lines = {}
    for place, (heading, curves) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        for curve in curves:
            style = names.index(curve.name)
            dash = ("-", "--", ":", "-.")[style // 10 % 4]
            mean = np.mean(curve.seeds, axis=0)
            (lines[curve.name],) = axes.plot(curve.rounds, mean, color=f"C{style % 10}", linestyle=dash, linewidth=1.4)
            if len(curve.seeds) > 1:
                spread = np.std(curve.seeds, axis=0, ddof=1)
                axes.fill_between(curve.rounds, mean - spread, mean + spread, color=f"C{style % 10}", alpha=0.15, lw=0)
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel("round")
        if place % columns == 0:
            axes.set_ylabel(y_label)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    figure.legend([lines[name] for name in names], names, loc="outside right upper", fontsize=8, frameon=False)
    save_figure(figure, path)


def draw_curves(
    table: Table,
    preset: Preset,
    cells: dict[tuple[str, str, int], Cell],
    outcomes: dict[str, Outcome],
    path: Path,
) -> None:
    """The table's metric over the rounds, averaged over clients; no picture if no cell is finished."""
    panels = []
    for group in preset.data:
        curves = []
        for row in rows_of(table, preset):
            runs = [outcomes[cells[group.name, row.label, seed].name].run_dir for seed in preset.seeds]
            for reading, point in {"": row.point, **row.also}.items():
                seeds = [_average_by_round(run, point, table) for run in runs if run is not None]
                if seeds:
                    common = seeds[0].index[np.all([np.isin(seeds[0].index, s.index) for s in seeds], axis=0)]
                    name = f"{row.label}, {reading}" if reading else row.label
                    curves.append(
                        Curve(name, common.to_numpy(), [np.asarray(s.loc[common], np.float64) for s in seeds])
                    )
        if curves:
            panels.append((group.label if group.panel is None else f"{group.panel}, {group.label}", curves))
    if panels:
        learning_curves(panels, f"{table.metric.replace('_', ' ')} on {table.split}, %, average over clients", path)


def _average_by_round(run_dir: Path, point: str, table: Table) -> "pd.Series[float]":
    """Per round the mean over clients of the table's metric, in per cent (losses as they are)."""
    metrics = stored_run(run_dir).metrics
    part = metrics[
        (metrics["point"] == point) & (metrics["split"] == table.split) & (metrics["metric"] == table.metric)
    ]
    return part.groupby("round")["value"].mean() * (1 if table.metric == "loss" else 100)
