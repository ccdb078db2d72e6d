"""The page's charts as Vega-Lite specifications, which the page's script draws.

A chart leaves out the methods that its parameter ``hidden`` names, so that those of one board hide and show a method
together. Colours are the page's: a method has the same one in all charts of its board.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmark.errors import ConfigurationError
from benchmark.records.stored_run import stored_run
from benchmark.records.words import POINT_WORDS
from benchmark.report.boards import Board
from benchmark.report.readings import last_by_client, learning_curve, points_of, statistic_of, traffic_of

Spec = dict[str, Any]

COLOURS = 10
ROW = 26
DASHES = ([1, 0], [6, 3], [2, 3], [9, 3, 2, 3])
LEAST_SPAN = 5.0  # hundredths of a point are not to look like much
FRAME = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
ACCURACY = "average test accuracy, %"
#: The wheel alone scrolls the page. A trackpad's pinch comes as Ctrl and the wheel.
ZOOM = {"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.ctrlKey]"}, "bind": "scales"}


@dataclass(frozen=True)
class Chart:
    """One drawing.

    Attributes:
        heading: above it.
        spec: in Vega-Lite, its data in it.
        label: what is shown, for those who do not see it.
        caption: below it.
    """

    heading: str
    spec: Spec
    label: str
    caption: str


def curves(board: Board) -> list[Chart]:
    """Average test accuracy by round, a chart for each point of a round at which it was evaluated.

    Methods whose runs have a virtual clock stand in a further chart, by its seconds.
    """
    charts = []
    for point in board.points:
        rows = [row for each in _evaluated(board, point) for row in learning_curve(each, point)]
        if not rows:
            continue
        last = {row["method"]: row["accuracy"] for row in rows}
        label = f"Average test accuracy by round, {POINT_WORDS[point]}; in the last round: {_listed(last)}"
        bands = " Bands span the seeds." if any("low" in row for row in rows) else ""
        x = {
            "field": "round",
            "type": "quantitative",
            "axis": {"format": "d", **_whole_ticks([row["round"] for row in rows])},
            "scale": {"domain": _span([row["round"] for row in rows]), "nice": False},
        }
        spec = _curves(board, rows, x)
        charts.append(Chart(f"By round, {POINT_WORDS[point]}", spec, label, f"Round 0 is before any training.{bands}"))
        if timed := [row for row in rows if "clock" in row]:
            seconds = {row["method"]: row["clock"] for row in timed}
            label = f"Average test accuracy by seconds of the virtual clock; the last round ends at {_listed(seconds)}"
            x = _quantity("clock", "seconds of the virtual clock", _span([row["clock"] for row in timed]))
            spec = _curves(board, timed, x)
            charts.append(
                Chart(f"By the virtual clock, {POINT_WORDS[point]}", spec, label, f"Simulated seconds.{bands}")
            )
    return charts


def _curves(board: Board, rows: Sequence[Spec], x: Spec) -> Spec:
    """Return a chart of accuracies along ``x``, a line a method, with the seeds' span where there are several."""
    bands = any("low" in row for row in rows)
    values = [row[name] for row in rows for name in ("accuracy", "low", "high") if name in row]
    y = _quantity("accuracy", ACCURACY, widened(values))
    told = [said("method"), said("round"), said("accuracy", ".2f")]
    told += [said("low", ".2f", "lowest seed"), said("high", ".2f", "highest seed")] if bands else []
    line = {
        "mark": {"type": "line", "point": {"size": 28}},
        "params": [ZOOM],
        "encoding": {
            "y": y,
            "strokeDash": {"field": "method", "type": "nominal", "legend": None, "scale": _dashes(board)},
            "tooltip": told,
        },
    }
    band = {
        "mark": {"type": "area", "opacity": 0.14, "tooltip": False},
        "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}},
        "transform": [{"filter": "isValid(datum.low)"}],
    }
    return _spec(board, rows, {"x": x, "color": _colour(board)}, layer=[*([band] if bands else []), line])


def clients(board: Board) -> list[Chart]:
    """Every client's test accuracy in the last round, a row a method."""
    charts = []
    for point in board.points:
        rows = []
        for each in _evaluated(board, point):
            for place, (client, value) in enumerate(sorted(last_by_client(each, point), key=lambda entry: entry[1])):
                shift = place * 5 % 9 - 4  # so that equal values do not hide each other
                rows.append({"method": each.name, "client": client, "accuracy": round(value, 3), "shift": shift})
        if not rows:
            continue
        values = [row["accuracy"] for row in rows]
        axis = {"labelLimit": 130, "labelPadding": 8, "domain": False, "ticks": False}
        names = [each.name for each in board.experiments]
        y = {"field": "method", "type": "nominal", "sort": names, "title": None, "axis": axis}
        x = _quantity("accuracy", "test accuracy, %", widened(values))
        offset = {"field": "shift", "type": "quantitative", "scale": {"domain": [-9, 9]}, "axis": None}
        dots = {
            "mark": {"type": "point", "filled": True, "size": 34, "opacity": 0.6},
            "params": [{**ZOOM, "select": {**ZOOM["select"], "encodings": ["x"]}}],  # type: ignore[dict-item]
            "encoding": {
                "x": x,
                "yOffset": offset,
                "tooltip": [said("method"), said("client"), said("accuracy", ".2f")],
            },
        }
        mean = {
            "mark": {"type": "tick", "thickness": 2, "size": 20},
            "encoding": {"x": {**x, "aggregate": "mean"}, "color": {"value": "gray"}},
        }
        spec = _spec(board, rows, {"y": y, "color": _colour(board)}, layer=[dots, mean], height=ROW * len(board.ranked))
        spec["usermeta"] = {"row": ROW}  # the page's script keeps each row as high when methods are hidden or shown
        spans = {row["method"]: row["accuracy"] for row in rows}
        label = f"Test accuracy of every client in the last round, {POINT_WORDS[point]}; highest: {_listed(spans)}"
        charts.append(
            Chart(f"Every client, {POINT_WORDS[point]}", spec, label, "A mark a client; the tick is their mean.")
        )
    return charts


def costs(board: Board) -> list[Chart]:
    """Average test accuracy in the last round against what a client sends and receives."""
    charts = []
    for point in board.points:
        rows = []
        for each in _evaluated(board, point):
            known = [value for value in statistic_of(each, point, "last", "average") if value is not None]
            if known:
                sent = float(np.mean(traffic_of(each))) / 1e3
                rows.append({"method": each.name, "kB": round(sent, 3), "accuracy": round(float(np.mean(known)), 3)})
        if not rows:
            continue
        sizes = [row["kB"] for row in rows if row["kB"] > 0] or [1.0]
        powers = range(math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes))) + 1)
        marks = [0.0, *(10.0**power for power in powers)]
        domain = _span([row["kB"] for row in rows])
        scale = {
            "type": "symlog",
            "constant": 10.0 ** powers[0] / 2,
            "domain": domain,
            "nice": False,
            "padding": 14,
        }
        x = {"field": "kB", "type": "quantitative", "title": "kB up and down, per client and round", "scale": scale}
        encoding = {
            "x": {**x, "axis": {"values": marks, "format": ",~r"}},
            "y": _quantity("accuracy", ACCURACY, widened([row["accuracy"] for row in rows])),
            "color": _colour(board),
            "tooltip": [said("method"), said("kB", ",.1f"), said("accuracy", ".2f")],
        }
        mark = {"type": "point", "filled": True, "size": 90, "opacity": 0.75}
        spec = _spec(board, rows, encoding, mark=mark)
        spec["params"].append(ZOOM)
        label = f"Accuracy against kilobytes, {POINT_WORDS[point]}: " + ", ".join(
            f"{row['method']} {row['kB']:,.1f} kB {row['accuracy']:.1f}" for row in rows
        )
        caption = "Further left sends less, further up is better."
        charts.append(Chart(f"Accuracy and communication, {POINT_WORDS[point]}", spec, label, caption))
    return charts


def partition(board: Board) -> list[Chart]:
    """Images of each class at each client, of the first run that kept its partition; several seeds can have several."""
    for run in (run for each in board.experiments for run in each.runs):
        try:
            kept = stored_run(run.folder).partition or {"clients": [], "class_names": []}
            counts = np.array([client["train_classes"] for client in kept["clients"]], dtype=np.int64)
            classes = [str(entry) for entry in kept["class_names"]]
            names = [str(client["name"]) for client in kept["clients"]]
        except (ConfigurationError, ValueError, KeyError, TypeError):
            continue
        if counts.ndim != 2 or counts.shape != (len(names), len(classes)) or not counts.size:
            continue
        rows = [
            {"client": names[n], "class": classes[c], "images": int(counts[n, c])} for n, c in np.argwhere(counts > 0)
        ]
        totals, held = counts.sum(axis=1), (counts > 0).sum(axis=1)
        fewest, most = held.min(), held.max()
        label = (
            f"Training images of {len(classes)} classes at {len(names)} clients: {totals.min():,} to {totals.max():,} "
            f"images and {most if fewest == most else f'{fewest} to {most}'} classes a client"
        )
        axis = {"labelLimit": 90, "labelAngle": 0, "labelOverlap": True, "domain": False, "ticks": False}
        order = {"type": "nominal", "axis": axis, "title": None}
        encoding = {
            "x": {"field": "client", **order, "scale": {"domain": list(dict.fromkeys(names))}},
            "y": {"field": "class", **order, "scale": {"domain": list(dict.fromkeys(classes))}},
            "color": {
                "field": "images",
                "type": "quantitative",
                "scale": {"type": "sqrt", "domainMin": 0},
                "legend": {"orient": "top", "gradientLength": 160},
            },
            "tooltip": [said("client"), said("class"), said("images", ",")],
        }
        height = (18 if len(classes) <= 30 else 6) * len(classes)
        spec = {**FRAME, "height": height, "data": {"values": rows}, "mark": "rect", "encoding": encoding}
        return [Chart("Images a client trains on", spec, label, f"{label} (seed {run.record.seed}).")]
    return []


def _evaluated(board: Board, point: str) -> list[Any]:
    return [each for each in board.experiments if point in points_of(each)]


def _spec(board: Board, rows: Sequence[Spec], encoding: Spec, height: int = 260, **drawn: Any) -> Spec:
    return {
        **FRAME,
        "height": height,
        "data": {"values": rows},
        "params": [{"name": "hidden", "value": [each.name for each in board.variants]}],
        "transform": [{"filter": "indexof(hidden, datum.method) < 0"}],
        "encoding": encoding,
        **drawn,
    }


def _colour(board: Board) -> Spec:
    names = [each.name for each in board.experiments]
    return {"field": "method", "type": "nominal", "legend": None, "scale": {"domain": names}}


def _dashes(board: Board) -> Spec:
    names = [each.name for each in board.experiments]
    return {"domain": names, "range": [DASHES[place // COLOURS % len(DASHES)] for place in range(len(names))]}


def _quantity(field: str, title: str, domain: Sequence[float]) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, "scale": {"domain": domain, "nice": True}}


def said(field: str, form: str = "", title: str = "") -> Spec:
    """A line of what the pointer is told."""
    kind = {"type": "quantitative", "format": form} if form else {"type": "nominal"}
    return {"field": field, "title": title or field, **kind}


def _span(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


def _whole_ticks(values: Sequence[int]) -> Spec:
    """Put a tick at each whole number of a short span, where Vega-Lite would also put some between."""
    low, high = min(values), max(values)
    return {"values": list(range(low, high + 1))} if high - low < 10 else {"tickMinStep": 1}


def widened(values: Sequence[float]) -> list[float]:
    """Return lowest and highest value, moved apart so that a small difference does not look like a large one."""
    low, high = min(values), max(values)
    spare = max(0.0, LEAST_SPAN - (high - low)) / 2
    return [round(low - spare, 3), round(high + spare, 3)]


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in values.items())
