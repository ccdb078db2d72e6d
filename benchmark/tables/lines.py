"""What is read of a row's records on one data group: a line of a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmark.cells.outcome import Outcome
from benchmark.errors import ConfigurationError
from benchmark.records.record import RunRecord
from benchmark.records.stored_run import StoredRun, stored_run
from benchmark.records.summary import client_values
from benchmark.tables.layout import Column, DataGroup, Row, Table
from benchmark.tables.numbers import scaled
from benchmark.tables.paired import Comparison, paired_comparison

STATISTIC_LABELS = {
    "average": "Avg",
    "worst": "Worst",
    "worst_decile": "Worst decile",
    "std": "Std",
    "pooled": "Pooled",
}
SUMMARY_NOTES = {
    "last": "the last round",
    "last10": "the mean of the last ten evaluated rounds",
    "best_on_test": "the best round, chosen on the test data itself (optimistic)",
}


@dataclass(frozen=True)
class Line:
    """One reading of one row on one data group, over its finished seeds."""

    method: str
    reading: str
    point: str
    values: dict[str, list[float]]  # column label -> one value per finished seed
    statistics: dict[tuple[str, str], list[float]]  # (summary, statistic) of the table's metric -> likewise
    clients: dict[int, list[float]]  # seed -> the table's metric, one value per client
    records: dict[int, RunRecord]  # seed -> record
    seeds: int
    errors: list[str]

    @property
    def name(self) -> str:
        return f"{self.method}, {self.reading}" if self.reading else self.method

    def communicated(self, *names: str) -> list[float]:
        """Sums of these entries of the records' communication, one per finished seed."""
        return [sum(record.communication[name] for name in names) for record in self.records.values()]

    def seconds(self) -> list[float]:
        return [record.seconds["total"] for record in self.records.values()]

    def rounds(self) -> list[int]:
        return [record.rounds_trained for record in self.records.values()]

    def peaks(self) -> list[float]:
        """Peak memory in bytes, of the seeds where it is known."""
        return [float(r.peak_memory_bytes) for r in self.records.values() if r.peak_memory_bytes is not None]


@dataclass(frozen=True)
class Read:
    """A data group with its columns and what was read of its runs; the lines of all groups are in the same order."""

    group: DataGroup
    columns: list[Column]
    lines: list[Line]


def expanded(group: DataGroup, records: Sequence[RunRecord]) -> list[Column]:
    """The group's columns, ``"*"`` replaced by the clients of the finished runs, every label filled in."""
    names: tuple[str, ...] = next((record.client_names for record in records), ())
    columns = []
    for column in group.columns:
        if column.client == "*":
            columns += [replace(column, label=name, client=name) for name in names]
        else:
            default = "HM" if column.harmonic else column.client or STATISTIC_LABELS[column.statistic]
            columns.append(replace(column, label=column.label or default))
    return columns


def read_line(
    row: Row,
    reading: str,
    point: str,
    columns: Sequence[Column],
    outcomes: dict[int, Outcome],
    table: Table,
) -> Line:
    line = Line(row.label, reading, point, {str(c.label): [] for c in columns}, {}, {}, {}, len(outcomes), [])
    for seed, outcome in outcomes.items():
        if outcome.run_dir is None:
            line.errors.append(outcome.error)
            continue
        try:
            reader = _Reader(stored_run(outcome.run_dir), table, point)
            found: dict[str, float] = {}
            for column in columns:
                found[str(column.label)] = reader.value(column, found)
            clients = reader.clients(table.metric, table.split)
            entry = summaries(reader.record, point, table.split, table.metric)
        except ConfigurationError as error:
            line.errors.append(f"{outcome.run_dir}: {error}")
            continue
        for label, value in found.items():
            line.values[label].append(value)
        for summary in SUMMARY_NOTES:
            for statistic, value in entry.get(summary, {}).items():
                if statistic in STATISTIC_LABELS and value is not None:
                    line.statistics.setdefault((summary, statistic), []).append(scaled(value, table.metric))
        line.clients[seed] = clients
        line.records[seed] = reader.record
    return line


def against(line: Line, baseline: Line) -> Comparison | None:
    """The line minus the baseline over the seeds that both have; None where there is nothing to compare.

    A seed counts only if both ran on the same partition.
    """
    shared = [
        seed
        for seed, record in line.records.items()
        if seed in baseline.records and record.manifest_hash == baseline.records[seed].manifest_hash
    ]
    if not shared:
        return None
    partitions = {line.records[seed].manifest_hash for seed in shared}
    ours, theirs = ([side.clients[seed] for seed in shared] for side in (line, baseline))
    try:
        return paired_comparison(ours, theirs, same_clients=len(partitions) == 1)
    except ValueError:  # no client has a value on both sides
        return None


def summaries(record: RunRecord, point: str, split: str, metric: str) -> dict[str, Any]:
    try:
        return dict(record.summary[point][split][metric])
    except KeyError:
        raise ConfigurationError(f"the run has no {metric} on {split} at the point '{point}'") from None


class _Reader:
    """Reads one run at one point for the columns of a table."""

    def __init__(self, run: StoredRun, table: Table, point: str) -> None:
        self.record = run.record
        self.metrics = run.metrics
        self.table = table
        self.point = point

    def clients(self, metric: str, split: str) -> list[float]:
        values = client_values(self.metrics, self.record, self.point, split, metric, self.table.summary)
        return [scaled(value, metric) for value in values]

    def value(self, column: Column, so_far: dict[str, float]) -> float:
        metric, split = column.metric or self.table.metric, column.split or self.table.split
        if column.harmonic:
            parts = [so_far[label] for label in column.harmonic]
            return len(parts) / sum(1 / part for part in parts) if all(parts) else 0.0
        if column.client is None:
            entry = summaries(self.record, self.point, split, metric)
            return scaled(entry.get(self.table.summary, {}).get(column.statistic), metric)
        if column.client not in self.record.client_names:
            names = ", ".join(self.record.client_names)
            raise ConfigurationError(f"no client {column.client!r}; the run has {names}")
        return self.clients(metric, split)[self.record.client_names.index(column.client)]
