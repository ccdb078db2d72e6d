"""Charts of a table's rows over its data groups, as Vega-Lite specifications."""

from benchmark.report.charts import FRAME, Chart, Spec, said, widened
from benchmark.tables.across import Across


def across_charts(across: Across) -> list[Chart]:
    """Draw the metric over the groups, and against what a client sends where that differs."""
    groups = list(dict.fromkeys(across.numbers["group"]))
    x: Spec = {"field": "group", "type": "ordinal", "sort": groups, "title": across.axis, "axis": {"labelAngle": 0}}
    numbers = zip(across.numbers["group"], across.numbers["method"], across.numbers["value"], strict=True)
    label = ", ".join(f"{group} {name} {value:.1f}" for group, name, value in numbers)
    made = [Chart("Over the data groups", _spec(across, x, "line"), f"{across.measure}; {label}", _caption(across))]
    if across.sends_less:
        sent: Spec = {"field": "kB", "type": "quantitative", "title": "kB that a client sends in a round"}
        sent["scale"] = {"type": "log", "nice": False, "padding": 14}
        caption = "Further left sends less, further up is better."
        made.append(
            Chart("Against what is sent", _spec(across, sent, "point"), f"{across.measure}, against kB", caption)
        )
    return made


def _caption(across: Across) -> str:
    return "Bars are one standard deviation over seeds." if across.numbers["std"].notna().any() else "One seed."


def _spec(across: Across, x: Spec, mark: str) -> Spec:
    found = across.numbers.assign(
        low=across.numbers["value"] - across.numbers["std"],
        high=across.numbers["value"] + across.numbers["std"],
    )
    records = found.drop(columns="std").round(3).to_dict("records")
    rows = [{str(key): value for key, value in record.items() if value == value} for record in records]  # without NaN
    reached = [row[name] for row in rows for name in ("value", "low", "high") if name in row]
    y: Spec = {"field": "value", "type": "quantitative", "title": across.measure, "scale": {"domain": widened(reached)}}
    legend = {"title": None, "orient": "top", "columns": 2, "labelLimit": 220}
    names = list(dict.fromkeys(across.numbers["method"]))
    colour = {"field": "method", "type": "nominal", "legend": legend, "scale": {"domain": names}}
    told = [said("method"), said("group", title=across.axis), said("value", ".2f"), said("kB", ",.2f")]
    marks = {"line": {"type": "line", "point": {"size": 40}}, "point": {"type": "point", "filled": True, "size": 60}}
    drawn = {"mark": marks[mark], "encoding": {"y": y, "tooltip": told}}
    bar = {
        "mark": {"type": "rule", "strokeWidth": 1.2},
        "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}},
        "transform": [{"filter": "isValid(datum.low)"}],
    }
    layer = [bar, drawn] if any("low" in row for row in rows) else [drawn]
    return {**FRAME, "height": 280, "data": {"values": rows}, "encoding": {"x": x, "color": colour}, "layer": layer}
