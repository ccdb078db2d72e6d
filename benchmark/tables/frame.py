"""The long form of a table: one row per number."""

from typing import TYPE_CHECKING, Any

from benchmark.tables.layout import Table
from benchmark.tables.lines import Read, against
from benchmark.tables.numbers import mean_std, span
from benchmark.tables.paper import paper_value

if TYPE_CHECKING:  # slow to import
    import pandas as pd


LONG_COLUMNS = (
    *("table", "preset", "title", "kind", "dataset", "method", "reading", "point", "split", "metric", "summary"),
    *("column", "ours", "std", "seeds", "paper", "difference", "low", "high", "pairs"),
    *("floats_up", "bytes_up", "bytes_down", "rounds", "seconds", "peak_memory_bytes", "error"),
)
"""Columns of a table's CSV. ``kind``: "column" is a number of the table itself, "statistic" one over clients for each
summary, "paired" a difference to the baseline with its interval ``low`` to ``high``, "note" the preset's note (its text
stands under ``column``). Accuracies in per cent."""


def long_rows(read: Read, table: Table, paper: "pd.DataFrame", baseline: str | None) -> list[dict[str, Any]]:
    """One entry per number of a group: its columns, every summary and statistic, and the paired comparisons."""
    rows: list[dict[str, Any]] = []
    reference = next((line for line in read.lines if line.method == baseline and not line.reading), None)
    for line in read.lines:
        shared: dict[str, Any] = {
            "dataset": read.group.label,
            "method": line.method,
            "reading": line.reading,
            "point": line.point,
            "seeds": len(line.records),
            "floats_up": mean_std(line.communicated("up_floats"))[0],
            "bytes_up": mean_std(line.communicated("up_bytes"))[0],
            "bytes_down": mean_std(line.communicated("down_bytes"))[0],
            "rounds": span(line.rounds()),
            "seconds": mean_std(line.seconds())[0],
            "peak_memory_bytes": mean_std(line.peaks())[0],
            "error": " / ".join(dict.fromkeys(line.errors)),
        }
        of_table: dict[str, Any] = {"split": table.split, "metric": table.metric}
        for column in read.columns:
            mean, std = mean_std(line.values[str(column.label)])
            published = paper_value(paper, line.method, column.paper) if column.paper and not line.reading else None
            entry: dict[str, Any] = {"split": column.split or table.split, "metric": column.metric or table.metric}
            entry |= {"kind": "column", "column": column.label, "summary": table.summary, "ours": mean, "std": std}
            entry |= {"paper": published, "difference": None if published is None else mean - published}
            rows.append(shared | entry)
        for (summary, statistic), values in line.statistics.items():
            mean, std = mean_std(values)
            entry = {"kind": "statistic", "column": statistic, "summary": summary, "ours": mean, "std": std}
            rows.append(shared | of_table | entry)
        found = against(line, reference) if reference is not None and line is not reference else None
        if found is not None:
            entry = {"kind": "paired", "column": f"minus {baseline}", "summary": table.summary, "ours": found.mean}
            entry |= {"low": found.low, "high": found.high, "pairs": found.pairs, "seeds": found.seeds}
            rows.append(shared | of_table | entry)
    return rows
