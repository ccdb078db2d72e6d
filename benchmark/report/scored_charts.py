"""Charts of scored images: of one run, one client and one class at a time, which the page's fields choose.

They are the charts' parameters ``run``, ``client``, ``of`` and ``names``; the page's script sets them.
"""

from collections.abc import Sequence
from typing import Any

from benchmark.counts import BINS
from benchmark.metrics import POOLED_CLIENT
from benchmark.report.charts import FRAME, Chart, Spec, said
from benchmark.report.scored import Scored

#: Up to so many classes the cells of a confusion matrix have their numbers in them.
MOST_NUMBERED = 12
SQUARE = 300
#: Acting on every image loses without bound as the threshold rises.
LOWEST = -0.1


def scored_charts(runs: Sequence[Scored]) -> list[Chart]:
    """Return the charts of a board's kept images; none where there are none."""
    if not runs:
        return []
    undefined = "Empty where a client has no image of the class, or no other, and where one has no prediction."
    return [
        Chart("Confusion matrix", _confusion(runs), "Images by true and predicted class", "Shades: share of a row."),
        Chart(
            "Reliability diagram",
            _reliability(runs),
            _label("Accuracy by confidence", runs, "reliability"),
            f"Accuracy in {BINS} bins, dots at their mean confidence. Below the diagonal a model is too sure.",
        ),
        Chart("ROC curve, one class against the rest", _roc(runs), _label("ROC curve", runs, "roc"), undefined),
        Chart(
            "Precision by recall, one class against the rest",
            _precision(runs),
            _label("Precision by recall", runs, "precision_recall"),
            undefined,
        ),
        Chart(
            "Decision curve, acting on one class",
            _decision(runs),
            _label("Net benefit by threshold", runs, "decision"),
            f"Dashed: acting on every image, and on none (0). Below {LOWEST} it is cut off.",
        ),
    ]


def _label(what: str, runs: Sequence[Scored], rows: str) -> str:
    """Say what a chart shows of all clients together at first, for those who do not see it."""
    first = [
        f"{each.label}: {row['said']}"
        for each in runs
        for row in getattr(each, rows)
        if row["client"] == POOLED_CLIENT and row.get("of", each.first) == each.first
    ]
    return f"{what}, all clients together; {'; '.join(first)}"


def _spec(runs: Sequence[Scored], rows: str, by_class: bool, height: int, layer: Sequence[Spec]) -> Spec:
    chosen = {"run": 0, "client": POOLED_CLIENT, "of": runs[0].first, "names": list(runs[0].classes)}
    fields = ("run", "client", "of") if by_class else ("run", "client")
    return {
        **FRAME,
        "height": height,
        "data": {"values": [{"run": number, **row} for number, run in enumerate(runs) for row in getattr(run, rows)]},
        "params": [{"name": name, "value": value} for name, value in chosen.items()],
        "transform": [{"filter": " && ".join(f"datum.{field} === {field}" for field in fields)}],
        "layer": layer,
        "usermeta": {"chosen": True},  # the page's script sets these parameters
    }


def _confusion(runs: Sequence[Scored]) -> Spec:
    count = max(len(run.classes) for run in runs)
    last = max(place for run in runs for row in run.confusion for place in row["predicted"])
    axis: Spec = {
        "labelExpr": "datum.value < length(names) ? names[datum.value] : 'none'",
        "labelLimit": 90,
        "labelOverlap": count > MOST_NUMBERED,
        "domain": False,
        "ticks": False,
    }
    places: Spec = {
        "x": {
            "field": "predicted",
            "type": "ordinal",
            "title": "predicted",
            "axis": {**axis, "labelAngle": -45},
            "scale": {"domain": list(range(max(count, last + 1)))},
        },
        "y": {"field": "label", "type": "ordinal", "title": "true", "axis": axis, "scale": {"domain": [*range(count)]}},
    }
    shares: list[Spec] = [
        {"flatten": ["label", "predicted", "images"]},
        {"joinaggregate": [{"op": "sum", "field": "images", "as": "all"}], "groupby": ["label"]},
        {"calculate": "datum.images / datum.all", "as": "share"},
        {"calculate": "names[datum.label]", "as": "true class"},
        {"calculate": "datum.predicted < length(names) ? names[datum.predicted] : 'none'", "as": "predicted class"},
    ]
    tooltip: list[Spec] = [
        said("true class"),
        said("predicted class"),
        said("images", ","),
        said("share", ".0%", "of the row"),
    ]
    cells = {
        "mark": "rect",
        "transform": shares,
        "encoding": {
            **places,
            "color": {"field": "share", "type": "quantitative", "scale": {"domain": [0, 1]}, "legend": None},
            "tooltip": tooltip,
        },
    }
    numbers: list[Spec] = [
        {
            "mark": {"type": "text", "tooltip": False, **style},
            "transform": [*shares, {"filter": test}],
            "encoding": {**places, "text": {"field": "images", "type": "quantitative", "format": ","}},
        }
        for test, style in (("datum.share <= 0.5", {}), ("datum.share > 0.5", {"style": "on-mark"}))
    ]
    row = 26 if count <= MOST_NUMBERED else 18 if count <= 30 else 6
    layer = [cells, *(numbers if count <= MOST_NUMBERED else [])]
    return _spec(runs, "confusion", False, row * count, layer)


def _reliability(runs: Sequence[Scored]) -> Spec:
    flat = {"flatten": ["bin", "images", "confidence", "accuracy"]}
    x, y = _share("confidence", "confidence, the largest probability"), _share("accuracy", "accuracy")
    ends: list[Spec] = [
        {"calculate": f"datum.bin / {BINS}", "as": "low"},
        {"calculate": f"(datum.bin + 1) / {BINS}", "as": "high"},
    ]
    told = [said("images", ","), said("confidence", ".3f", "mean confidence"), said("accuracy", ".3f")]
    bars = {
        "mark": {"type": "rect", "opacity": 0.35},
        "transform": [flat, *ends],
        "encoding": {
            "x": {**x, "field": "low"},
            "x2": {"field": "high"},
            "y": y,
            "y2": {"datum": 0},
            "tooltip": [said("low", ".3f", "confidence from"), said("high", ".3f", "to"), *told],
        },
    }
    dots = {
        "mark": {"type": "point", "filled": True, "size": 40},
        "transform": [flat],
        "encoding": {"x": x, "y": y, "tooltip": told},
    }
    return _spec(runs, "reliability", False, SQUARE, [bars, _diagonal(x, y), dots, _number(0.02, 0.97, "left")])


def _roc(runs: Sequence[Scored]) -> Spec:
    x, y = _share("x", "false positive rate"), _share("y", "true positive rate")
    line = _line(x, y, "linear")
    return _spec(runs, "roc", True, SQUARE, [_diagonal(x, y), line, _number(0.98, 0.04, "right")])


def _precision(runs: Sequence[Scored]) -> Spec:
    line = _line(_share("x", "recall"), _share("y", "precision"), "step-before")
    return _spec(runs, "precision_recall", True, SQUARE, [line, _number(0.02, 0.04, "left")])


def _decision(runs: Sequence[Scored]) -> Spec:
    x = _share("x", "threshold: probability from which one acts")
    y: Spec = {"field": "y", "type": "quantitative", "title": "net benefit", "scale": {"domainMin": LOWEST}}
    line = _line(x, y, "linear")
    line["mark"]["clip"] = True
    dashed: dict[str, Any] = {"type": "line", "color": "gray", "strokeDash": [4, 4], "tooltip": False, "clip": True}
    every = {
        "mark": dashed,
        "transform": [{"flatten": ["x", "every"]}],
        "encoding": {"x": x, "y": {**y, "field": "every"}, "order": {"value": None}},
    }
    none = {"data": {"values": [{"x": 0, "y": 0}, {"x": 1, "y": 0}]}, "mark": dashed, "encoding": {"x": x, "y": y}}
    number = {
        "mark": {"type": "text", "align": "right", "dy": -8, "tooltip": False},
        "encoding": {"x": {"value": "width"}, "y": {"value": "height"}, "text": {"field": "said", "type": "nominal"}},
    }
    return _spec(runs, "decision", True, SQUARE, [none, every, line, number])


def _line(x: Spec, y: Spec, interpolate: str) -> Spec:
    tooltip = [said("x", ".3f", x["title"]), said("y", ".3f", y["title"])]
    return {
        "mark": {"type": "line", "interpolate": interpolate, "point": {"size": 12}},
        "transform": [{"flatten": ["x", "y"]}],
        "encoding": {"x": x, "y": y, "order": {"value": None}, "tooltip": tooltip},
    }


def _diagonal(x: Spec, y: Spec) -> Spec:
    ends = [{x["field"]: end, y["field"]: end} for end in (0, 1)]
    mark: dict[str, Any] = {"type": "line", "color": "gray", "strokeDash": [4, 4], "tooltip": False}
    return {"data": {"values": ends}, "mark": mark, "encoding": {"x": x, "y": y}}


def _number(x: float, y: float, align: str) -> Spec:
    """Write what a row says of itself at a place of the chart."""
    places = {name: {"datum": at, "type": "quantitative"} for name, at in (("x", x), ("y", y))}
    mark = {"type": "text", "align": align, "tooltip": False}
    return {"mark": mark, "encoding": {**places, "text": {"field": "said", "type": "nominal"}}}


def _share(field: str, title: str) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, "scale": {"domain": [0, 1]}}
