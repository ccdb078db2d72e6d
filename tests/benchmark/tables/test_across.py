"""Rows of a table over its data groups: the numbers, the picture and the report's charts, against ones set by hand."""

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmark.report.across_charts import across_charts
from benchmark.tables.across import Across, across_groups, draw_across
from benchmark.tables.frame import LONG_COLUMNS


def long_form(*, axis: str | None = "bits", bytes_up: tuple[float, float] = (4000.0, 1000.0)) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for group, sent, shift in (("32", bytes_up[0], 0.0), ("8", bytes_up[1], -2.0)):
        for method, reading, value in (("A", "", 70.0), ("A", "local", 75.0), ("B", "", 60.0)):
            line = {"dataset": group, "method": method, "reading": reading, "bytes_up": sent, "split": "test"}
            line |= {"metric": "accuracy"}
            rows.append(line | {"kind": "column", "summary": "last", "column": "Avg", "ours": 1.0})
            for summary, ours in (("last", value + shift), ("last10", 2.0)):
                rows.append(
                    line | {"kind": "statistic", "summary": summary, "column": "average", "ours": ours, "std": 1.5}
                )
                rows.append(line | {"kind": "statistic", "summary": summary, "column": "worst", "ours": 3.0})
    rows += [{"kind": "note", "column": "a note"}]
    rows += [{"kind": "axis", "column": axis}] if axis else []
    return pd.DataFrame(rows).reindex(columns=list(LONG_COLUMNS))


def across(**changes: Any) -> Across:
    found = across_groups(long_form(**changes))
    assert found is not None
    return found


def test_averages_of_the_tables_own_rounds_in_its_order() -> None:
    found = across()
    assert found.axis == "bits"
    assert found.measure == "accuracy on test, %, average over clients"
    shown = found.numbers[["method", "group", "value", "std", "kB"]].to_numpy().tolist()
    assert shown == [
        ["A", "32", 70.0, 1.5, 4.0],
        ["A, local", "32", 75.0, 1.5, 4.0],
        ["B", "32", 60.0, 1.5, 4.0],
        ["A", "8", 68.0, 1.5, 1.0],
        ["A, local", "8", 73.0, 1.5, 1.0],
        ["B", "8", 58.0, 1.5, 1.0],
    ]


def test_groups_in_no_order_are_not_drawn() -> None:
    assert across_groups(long_form(axis=None)) is None


def test_the_picture_has_a_line_for_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("benchmark.tables.across.save_figure", lambda figure, path: drawn.append(figure))
    draw_across(across(), tmp_path / "two.png")
    by_group, by_bytes = drawn[0].axes
    assert [label.get_text() for label in by_group.get_xticklabels()] == ["32", "8"]
    assert list(by_group.lines[0].get_ydata()) == [70.0, 68.0]
    assert list(by_bytes.lines[0].get_xdata()) == [4.0, 1.0]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["A", "A, local", "B"]
    draw_across(across(bytes_up=(4000.0, 4000.0)), tmp_path / "one.png")
    assert len(drawn[1].axes) == 1, "all send the same: nothing to draw it against"


def test_the_reports_charts_have_the_same_numbers() -> None:
    over, sent = across_charts(across())
    assert over.spec["encoding"]["x"]["sort"] == ["32", "8"]
    first = over.spec["data"]["values"][0]
    assert first == {"method": "A", "group": "32", "value": 70.0, "kB": 4.0, "low": 68.5, "high": 71.5}
    assert "8 B 58.0" in over.label
    assert over.caption == "Bars are one standard deviation over seeds."
    assert sent.spec["encoding"]["x"]["field"] == "kB"
    found = across()
    single = Across(found.axis, found.measure, found.numbers.assign(std=math.nan), False)
    (one,) = across_charts(single)
    assert "low" not in one.spec["data"]["values"][0]
    assert one.caption == "One seed."
