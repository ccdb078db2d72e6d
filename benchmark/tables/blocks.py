"""The blocks of a table as text: ours beside the paper's, statistics and costs, paired comparisons."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmark.tables.layout import Table
from benchmark.tables.lines import Read, against
from benchmark.tables.numbers import digits_of, floats, mean_std, number, published_number, signed, span, with_std
from benchmark.tables.paper import paper_value

if TYPE_CHECKING:  # slow to import
    import pandas as pd


STATISTIC_COLUMNS = (
    ("Last", "last", "average"),
    ("Last ten", "last10", "average"),
    ("Best (chosen on test data)", "best_on_test", "average"),
    ("Worst client", "", "worst"),
    ("Worst decile", "", "worst_decile"),
    ("Spread over clients", "", "std"),
)


@dataclass(frozen=True)
class Block:
    heading: str
    header: list[str]
    body: list[list[str]]


def our_block(panel: str, reads: Sequence[Read], paper: "pd.DataFrame", table: Table) -> Block:
    """The groups of a panel side by side: per method a line of ours and, where the paper has numbers, its line and the
    difference.
    """
    placed = [(position, column) for position, read in enumerate(reads) for column in read.columns]
    several = len(reads) > 1
    labels = [
        str(column.label)
        if not several
        else reads[position].group.label
        if len(reads[position].columns) == 1
        else f"{reads[position].group.label}: {column.label}"
        for position, column in placed
    ]
    compared = any(column.paper for _, column in placed)
    header = ["Method", *(["Source"] if compared else []), *labels, "Floats up", "MB up + down", "Rounds", "Seconds"]
    body = []
    for lines in zip(*(read.lines for read in reads), strict=True):
        name, done = lines[0].name, min(len(line.records) for line in lines)
        if done and done < lines[0].seeds:
            name += f" ({done} of {lines[0].seeds} seeds)"
        cells = [
            with_std(lines[position].values[str(column.label)], digits_of(column.metric or table.metric))
            if lines[position].records
            else "failed"
            for position, column in placed
        ]
        tails = [
            (
                floats(mean_std(line.communicated("up_floats"))[0]),
                number(mean_std(line.communicated("up_bytes", "down_bytes"))[0] / 1e6, 3),
                span(line.rounds()),
                number(mean_std(line.seconds())[0], 0),
            )
            for line in lines
            if line.records
        ]
        tail = [" / ".join(dict.fromkeys(column)) for column in zip(*tails, strict=True)] if tails else [""] * 4
        body.append([name, *(["ours"] if compared else []), *cells, *tail])
        if not compared or lines[0].reading:
            continue
        published = [
            paper_value(paper, lines[0].method, column.paper) if column.paper else None for _, column in placed
        ]
        costs = [paper_value(paper, lines[0].method, read.group.cost) for read in reads if read.group.cost]
        cost = " / ".join(dict.fromkeys(published_number(value) for value in costs if value is not None))
        if not cost and all(value is None for value in published):
            continue
        body.append(["", "paper", *map(published_number, published), cost, "", "", ""])
        differences = [
            ""
            if value is None or not lines[position].values[str(column.label)]
            else signed(mean_std(lines[position].values[str(column.label)])[0] - value)
            for value, (position, column) in zip(published, placed, strict=True)
        ]
        body.append(["", "difference", *differences, "", "", "", ""])
    return Block(_heading(panel, table), header, body)


def statistics_block(read: Read, table: Table) -> Block:
    """Rounds, clients and costs of each method on one data group."""
    digits = digits_of(table.metric)
    header = ["Method", *(label for label, _, _ in STATISTIC_COLUMNS), "kB up", "kB down", "Seconds", "Peak MB"]
    body = []
    for line in read.lines:
        if not line.records:
            continue
        values = [
            with_std(line.statistics.get((summary or table.summary, statistic), []), digits)
            for _, summary, statistic in STATISTIC_COLUMNS
        ]
        up, down = (number(mean_std(line.communicated(name))[0] / 1e3, 1) for name in ("up_bytes", "down_bytes"))
        peak = mean_std(line.peaks())[0] / 1e6
        body.append([line.name, *values, up, down, number(mean_std(line.seconds())[0], 0), number(peak, 0)])
    return Block(f"{read.group.label}: rounds, clients and costs", header, body)


def paired_block(read: Read, baseline: str, table: Table) -> Block | None:
    """Every method minus the baseline, paired by seed and client; None where the baseline has no run."""
    reference = next(line for line in read.lines if line.method == baseline and not line.reading)
    digits = digits_of(table.metric)
    body = []
    for line in read.lines:
        found = None if line is reference else against(line, reference)
        if found is None:
            continue
        interval = "" if math.isnan(found.low) else f"{signed(found.low, digits)} to {signed(found.high, digits)}"
        body.append([line.name, signed(found.mean, digits), interval, str(found.pairs), str(found.seeds), found.over])
    header = ["Method", "Difference", "95 % interval", "Pairs", "Seeds", "Interval over"]
    return Block(f"{read.group.label}: against {baseline}, paired", header, body) if body else None


def paper_blocks(table: Table, paper: "pd.DataFrame") -> list[Block]:
    """The paper's own numbers for the table's methods, one block per data set of its CSV."""
    labels = [row.label for row in table.rows]
    paper = paper[paper["method"].isin(labels)].fillna({"backbone": "", "setting": "", "metric": ""})
    blocks = []
    for dataset, part in paper.groupby("dataset", sort=False):
        names = [name for name in ("setting", "metric", "backbone") if part[name].nunique() > 1 or name == "setting"]
        part = part.assign(column=part[names].agg(", ".join, axis=1))
        columns = list(dict.fromkeys(part["column"]))
        numbers = {(method, column): value for method, column, value in part[["method", "column", "value"]].to_numpy()}
        body = [
            [label, *(published_number(numbers.get((label, column))) for column in columns)]
            for label in labels
            if label in set(part["method"])
        ]
        blocks.append(Block(f"{dataset} (paper)", ["Method", *columns], body))
    return blocks


def _heading(text: str, table: Table) -> str:
    return f"{text}, best round, chosen on test data" if table.summary == "best_on_test" else text
