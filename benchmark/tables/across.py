"""A table's rows over its data groups, where these stand in an order: accuracy against epsilon, losses or bytes."""

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.drawing import line_style, new_figure, save_figure
from benchmark.records.words import unit_of

if TYPE_CHECKING:  # slow to import
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Across:
    """The table's metric, averaged over clients, of each row in each data group.

    Attributes:
        axis: how the groups differ.
        measure: of the metric, with its split and unit.
        numbers: columns ``method``, ``group``, ``value``, its ``std`` over seeds (NaN of one) and ``kB``, what a client
            sends in a round; ordered as the table's groups and rows are.
        sends_less: whether some row sends less in one group than in another.
    """

    axis: str
    measure: str
    numbers: "pd.DataFrame"
    sends_less: bool


def across_groups(numbers: "pd.DataFrame") -> Across | None:
    """Read the rows over the groups from a table's long form; None if its groups stand in no order."""
    axis = numbers.loc[numbers["kind"] == "axis", "column"]
    columns = numbers[numbers["kind"] == "column"]
    if axis.empty or columns.empty:
        return None
    first = columns.iloc[0]
    averages = (numbers["kind"] == "statistic") & (numbers["column"] == "average")
    found = numbers[averages & (numbers["summary"] == first["summary"]) & numbers["ours"].notna()]
    reading = found["reading"].fillna("").astype(str)
    named = found["method"].astype(str) + reading.where(reading == "", ", " + reading)
    rows = found.assign(method=named, group=found["dataset"], value=found["ours"], kB=found["bytes_up"] / 1e3)
    rows = rows[["method", "group", "value", "std", "kB"]].reset_index(drop=True)
    if rows.empty:
        return None
    metric = str(found["metric"].iloc[0])
    measure = f"{metric.replace('_', ' ')} on {found['split'].iloc[0]}{unit_of(metric)}, average over clients"
    return Across(str(axis.iloc[0]), measure, rows, bool((rows.groupby("method")["kB"].nunique() > 1).any()))


def draw_across(across: Across, path: str | Path) -> None:
    """Draw the rows over the groups as a PNG, and against what a client sends where that differs.

    Bars are one standard deviation over seeds.
    """
    panels = 2 if across.sends_less else 1
    figure = new_figure(3.2 + 4.4 * panels, 3.8)
    groups = list(dict.fromkeys(across.numbers["group"]))
    by_group, *by_bytes = (figure.add_subplot(1, panels, place + 1) for place in range(panels))
    _lines(by_group, across, "group")
    by_group.set_xticks(range(len(groups)), [textwrap.fill(group, 12) for group in groups])
    by_group.set_xlabel(across.axis)
    by_group.set_ylabel(across.measure)
    for axes in by_bytes:
        _lines(axes, across, "kB")
        axes.set_xscale("log")
        axes.set_xlabel("kB that a client sends in a round")
    handles, names = by_group.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8, frameon=False)
    save_figure(figure, path)


def _lines(axes: "Axes", across: Across, against: str) -> None:
    places = {group: place for place, group in enumerate(dict.fromkeys(across.numbers["group"]))}
    for number, (name, rows) in enumerate(across.numbers.groupby("method", sort=False)):
        x = rows["group"].map(places) if against == "group" else rows["kB"]
        style = line_style(number) | ({} if against == "group" else {"linestyle": ""})
        bars = rows["std"].fillna(0) if rows["std"].notna().any() else None
        axes.errorbar(x, rows["value"], bars, label=str(name), marker="o", markersize=4, **style)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
