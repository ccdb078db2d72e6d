"""A table's lines, read from the records of a row on one data group, and their numbers, one for each seed."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from benchmark.cells.identity import Cell
from benchmark.cells.outcome import Outcome
from benchmark.errors import ConfigurationError
from benchmark.metrics import GAINS, STATISTICS, gains, scale_of
from benchmark.records.class_values import class_statistic, class_values
from benchmark.records.hashes import canonical
from benchmark.records.record import RunRecord
from benchmark.records.stored_run import StoredRun, stored_run
from benchmark.records.summary import client_values
from benchmark.tables.layout import Column, DataGroup, Preset, Table, refuse_equal_headings, rows_of
from benchmark.tables.numbers import scaled

SUMMARY_NOTES = {
    "last": "the last round",
    "last10": "the mean of the last ten evaluated rounds",
    "best_on_test": "the best round, chosen on the test data itself (optimistic)",
}


class Number(NamedTuple):
    """A number of one run; ``kind`` is "column", "statistic" or "cost". Accuracies in per cent."""

    line: int
    seed: int
    kind: str
    summary: str
    column: str
    value: float


@dataclass(frozen=True)
class Line:
    """One reading of one row on one data group, over its finished seeds."""

    position: int  # in the table
    group: DataGroup
    dataset: str  # what the table calls the group
    columns: list[Column]
    method: str
    reading: str
    point: str
    seeds: int
    numbers: list[Number] = field(default_factory=list)
    clients: dict[int, list[float]] = field(default_factory=dict)  # by seed the table's metric, one value per client
    runs: dict[int, StoredRun] = field(default_factory=dict)  # by seed
    errors: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.method}, {self.reading}" if self.reading else self.method

    @property
    def records(self) -> dict[int, RunRecord]:
        return {seed: run.record for seed, run in self.runs.items()}

    @property
    def seeds_by_code(self) -> list[list[int]]:
        """The finished seeds, grouped by the code that made them; older records do not name their code."""
        found: dict[bytes, list[int]] = {}
        for seed, record in self.records.items():
            found.setdefault(canonical(record.code), []).append(seed)
        return list(found.values())


def read_lines(
    table: Table, preset: Preset, cells: dict[tuple[str, str, int], Cell], outcomes: dict[str, Outcome]
) -> list[Line]:
    """Read all lines of a table: per data group its rows, below each its further readings."""
    rows = rows_of(table, preset)
    lines: list[Line] = []
    for group in preset.data:
        by_row = [{seed: outcomes[cells[group.name, row.label, seed].name] for seed in preset.seeds} for row in rows]
        by_row = _of_the_same_images(by_row)
        columns = _expanded(group, by_row)
        dataset = preset.called(group)
        for row, entry in zip(rows, by_row, strict=True):
            for reading, point in {"": row.point, **row.also}.items():
                line = Line(len(lines), group, dataset, columns, row.label, reading, point, len(entry))
                lines.append(_read_seeds(line, entry, table))
        add_gains([line for line in lines if line.group is group], table)
    return lines


def add_gains(lines: Sequence[Line], table: Table) -> None:
    """Add the columns of a data group that show what clients gain over one of its rows (:data:`GAINS`).

    A seed's clients are compared with those of the row's run with the same seed, and must have the same partition. The
    row itself, and a seed that one of the two lacks, have no number.
    """
    import numpy as np

    for line in lines:
        for column in line.columns:
            if (over := column.gains_over) is None or (of := GAINS[column.statistic].of) is None:
                continue
            other = next(each for each in lines if each.method == over and not each.reading)
            metric, split = column.metric or table.metric, column.split or table.split
            for seed, run in line.runs.items():
                value = math.nan
                beside = other.runs.get(seed)
                if other is not line and beside and beside.record.manifest_hash == run.record.manifest_hash:
                    try:
                        ours, theirs = (
                            np.asarray(_of_clients(each, point, split, metric, table.summary))
                            for each, point in ((run, line.point), (beside, other.point))
                        )
                    except ConfigurationError as error:
                        line.errors.append(str(error))
                    else:
                        found = gains(ours * scale_of(metric), theirs * scale_of(metric), metric)
                        value = of(found, False) if len(found) else math.nan
                line.numbers.append(Number(line.position, seed, "column", table.summary, column.heading, value))


def _of_clients(run: StoredRun, point: str, split: str, metric: str, which: str) -> list[float]:
    """Return a run's values by client, or raise an error that names its folder."""
    try:
        return client_values(run.metrics, run.record, point, split, metric, which)
    except ConfigurationError as error:
        raise ConfigurationError(f"{run.folder}: {error}") from error


def _finished(by_row: Sequence[dict[int, Outcome]]) -> list[StoredRun]:
    return [stored_run(outcome.run_dir) for entry in by_row for outcome in entry.values() if outcome.run_dir]


def _expanded(group: DataGroup, by_row: Sequence[dict[int, Outcome]]) -> list[Column]:
    """The group's columns, ``"*"`` replaced by the clients of the first finished run, every label filled in.

    A label of such a column stands before each client's name.

    Raises:
        ConfigurationError: two columns have one heading, as a client has the name of another column.
    """
    names: tuple[str, ...] = next((run.record.client_names for run in _finished(by_row)), ())
    columns: list[Column] = []
    for column in group.columns:
        if column.client == "*":
            label = column.label
            columns += [replace(column, label=label and f"{label}, {name}", client=name) for name in names]
        else:
            columns.append(column)
    headings = [column.heading for column in columns]
    refuse_equal_headings(headings, group.name)
    return [replace(column, label=heading) for column, heading in zip(columns, headings, strict=True)]


def _of_the_same_images(by_row: Sequence[dict[int, Outcome]]) -> list[dict[int, Outcome]]:
    """Return a data group's outcomes by row and seed, without those on other images than its first finished run.

    Images of one name from another folder would count as another seed. Older records do not name their images.
    """
    images = {run.folder: run.record.images_sha256 for run in _finished(by_row)}
    first = next((run for run in images if images[run]), None)

    def checked(outcome: Outcome) -> Outcome:
        run = outcome.run_dir
        if run is None or first is None or images[run] in (None, images[first]):
            return outcome
        return Outcome(
            None, f"{run} was run on other images than {first} ({images[run]:.8} and {images[first]:.8}); remove one"
        )

    return [{seed: checked(outcome) for seed, outcome in entry.items()} for entry in by_row]


def _read_seeds(line: Line, outcomes: dict[int, Outcome], table: Table) -> Line:
    """Fill a line with what its finished seeds left; what cannot be read is an error of the line."""
    for seed, outcome in outcomes.items():
        if outcome.run_dir is None:
            line.errors.append(outcome.error)
            continue
        try:
            run = stored_run(outcome.run_dir)
            numbers, line.clients[seed] = _read(run, line, seed, table)
        except ConfigurationError as error:
            line.errors.append(f"{outcome.run_dir}: {error}")
            continue
        line.numbers.extend(numbers)
        line.runs[seed] = run
    return line


def summaries(record: RunRecord, point: str, split: str, metric: str) -> dict[str, Any]:
    try:
        return dict(record.summary[point][split][metric])
    except KeyError:
        raise ConfigurationError(f"the run has no {metric} on {split} at the point '{point}'") from None


def _read(run: StoredRun, line: Line, seed: int, table: Table) -> tuple[list[Number], list[float]]:
    """Every number of a run, and the table's metric of each client."""
    record, at = run.record, (line.position, seed)

    @functools.cache
    def clients(metric: str, split: str) -> list[float]:
        values = client_values(run.metrics, record, line.point, split, metric, table.summary)
        return [scaled(value, metric) for value in values]

    found: dict[str, float] = {}
    for column in (each for each in line.columns if each.gains_over is None):
        metric, split = column.metric or table.metric, column.split or table.split
        if column.harmonic:
            parts = [found[label] for label in column.harmonic]
            value = len(parts) / sum(1 / part for part in parts) if all(parts) else 0.0
        elif column.of_class is not None:
            value = _of_class(run, column, column.of_class, line.point, split, metric)
        elif column.client is None:
            known = summaries(record, line.point, split, metric).get(table.summary, {})
            if column.statistic in known:
                value = scaled(known[column.statistic], metric)
            else:  # one that is not in every record
                value = scaled(run.statistic(line.point, split, metric, table.summary, column.statistic), metric)
        else:
            value = clients(metric, split)[_number_of(record, column.client)]
        found[column.heading] = value
    of_clients, entry = clients(table.metric, table.split), summaries(record, line.point, table.split, table.metric)
    numbers = [Number(*at, "column", table.summary, label, value) for label, value in found.items()]
    numbers += [
        Number(*at, "statistic", summary, statistic, scaled(value, table.metric))
        for summary in SUMMARY_NOTES
        for statistic, value in entry.get(summary, {}).items()
        if statistic in STATISTICS
    ]
    costs: dict[str, float | None] = {
        "floats_up": record.communication["up_floats"],
        "bytes_up": record.communication["up_bytes"],
        "bytes_down": record.communication["down_bytes"],
        "seconds": record.seconds["total"],
        "peak_memory_bytes": record.peak_memory_bytes,
    }
    numbers += [Number(*at, "cost", "", name, value) for name, value in costs.items() if value is not None]
    return numbers, of_clients


def _of_class(run: StoredRun, column: Column, named: str, point: str, split: str, metric: str) -> float:
    """Return a class's value of a column's client, or its statistic over clients, as people read it."""
    if column.client is None:
        return scaled(class_statistic(run, point, split, metric, named, column.statistic), metric)
    return scaled(class_values(run, point, split, metric, named).get(_number_of(run.record, column.client)), metric)


def _number_of(record: RunRecord, client: str) -> int:
    if client not in record.client_names:
        raise ConfigurationError(f"no client {client!r}; the run has {', '.join(record.client_names)}")
    return record.client_names.index(client)
