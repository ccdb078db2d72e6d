"""Paper tables: from a YAML in ``configs/tables/`` to runs, and from their records to a table beside the paper's.

Paths in a table are relative to the folder the command is started in, the repository's root::

    title: pFedPG Table 1
    paper: [results/paper/pfedpg_table1.csv]  # published numbers; `method` is a row's label
    metric: accuracy                          # of metrics.parquet; default accuracy
    split: test                               # default test
    summary: last                             # last | last10 | best_on_test; default last
    baseline: FedAvg                          # optional: a row; the others are compared with it, pair by pair
    presets:
      paper:
        note: One sentence under the title.   # optional
        seeds: [0, 1, 2]
        rows: [FedVPT, pFedPG]                # optional; the labels of the rows that this preset runs, default all
        summary: last                         # optional; in place of the table's
        base: [configs/x.yaml]                # optional; configs of every run of the preset
        overrides: ["--trainer.max_epochs=100"]  # optional; as on the command line, one string each
        data:                                 # column groups; one run gives all columns of a group
          - name: office_caltech10            # [a-z0-9_]; part of run directories
            label: Office-Caltech10           # heading
            suite: office_vit                 # optional; of configs/suites, for the rows that name a method
            panel: Domains                    # optional; groups of one panel stand side by side under this heading
            configs: [configs/base.yaml]      # optional; read before method and suite
            overrides: ["--data.init_args.root={data_dir}"]  # {data_dir}: the folder given by --data_dir
            columns:                          # default: every client, then the average
              - {client: amazon, label: A, paper: {dataset: Office-Caltech10, setting: domain=A}}
              - {client: "*"}                 # one column per client, named as in the record
              - {statistic: average, label: Avg, paper: {dataset: Office-Caltech10, setting: avg over domains}}
                # statistic: average | worst | worst_decile | std | pooled; `paper` may name metric (default accuracy)
                # and backbone (needed where the CSV has several). No `paper`: no published number, no difference.
              - {statistic: average, label: F1, metric: macro_f1}  # another metric or split than the table's
              - {label: HM, harmonic: [Local, Base, Novel]}        # of columns further left
            cost: {dataset: both, setting: communication cost, metric: params per round}  # optional: floats one way
    rows:
      - label: pFedPG                         # the paper's name of the method
        method: pfedpg                        # optional; of configs/methods, read with the group's suite
        name: pfedpg_slow                     # [a-z0-9_]; part of run directories, default: method
        configs: [configs/x.yaml]             # optional; read last
        overrides: {paper: ["--model.lr=0.1"]}   # optional; per preset
        point: local                          # server | local: where the row's number is read
        also: {generated prompts: server}     # optional; further readings of the same run, below it

A *cell* is one run: row x data x seed. Its directory is ``<row>-<data>-s<seed>-<hash>``, where the hash is of the
configs' contents and the overrides alone. So a finished cell is never run again, not by another table either; a killed
one continues from its checkpoint (:mod:`benchmark.cells.queue`).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from benchmark.cells.queue import Cell, Cluster, Outcome, Work, cell_command, content_hash, run_cells
from benchmark.drawing import Curve, learning_curves
from benchmark.errors import ConfigurationError
from benchmark.records.record import METRICS, SPLITS, RunRecord
from benchmark.records.results import StoredRun, client_values, is_finished, stored_run, write_text
from benchmark.run.command import PROGRAM
from benchmark.tables.paired import Comparison, paired_comparison
from benchmark.tables.readings import of_configuration, of_record
from benchmark.yaml_files import read_mapping

if TYPE_CHECKING:
    import pandas as pd

Point = Literal["server", "local"]
Statistic = Literal["average", "worst", "worst_decile", "std", "pooled"]
Summary = Literal["last", "last10", "best_on_test"]

RUNNER_OPTIONS = ("--config", "--run_dir", "--seed_everything", "--ckpt_path")
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
POINT_NOTES = {
    "server": "what the server holds after the round, with the client's own state",
    "local": "the client's state at the end of its local training, before aggregation",
}
PERCENT = ("accuracy", "balanced_accuracy", "macro_f1")


# --- the table's YAML -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperNumber:
    """Which published number stands beside a column: columns ``dataset``, ``setting``, ... of the paper's CSV."""

    dataset: str
    setting: str
    metric: str = "accuracy"
    backbone: str | None = None


@dataclass(frozen=True)
class Column:
    """One client (``"*"``: every client), a statistic over clients, or the harmonic mean of columns to the left."""

    label: str | None = None
    client: str | None = None
    statistic: Statistic = "average"
    metric: str | None = None
    split: str | None = None
    harmonic: list[str] = field(default_factory=list)
    paper: PaperNumber | None = None


@dataclass(frozen=True)
class DataGroup:
    """One data set and partition, and the columns that a run on it fills."""

    name: str
    label: str
    configs: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    columns: list[Column] = field(default_factory=lambda: [Column(client="*"), Column(statistic="average")])
    cost: PaperNumber | None = None
    panel: str | None = None
    suite: str | None = None


@dataclass(frozen=True)
class Preset:
    """At which size, on which data, and with which seeds a table is made."""

    data: list[DataGroup]
    seeds: list[int]
    base: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    note: str = ""
    rows: list[str] = field(default_factory=list)
    summary: Summary | None = None


@dataclass(frozen=True)
class Row:
    """One method."""

    label: str
    point: Point
    name: str | None = None
    method: str | None = None
    configs: list[str] = field(default_factory=list)
    also: dict[str, Point] = field(default_factory=dict)
    overrides: dict[str, list[str]] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """The first part of its run directories' names."""
        return self.name or self.method or ""


@dataclass(frozen=True)
class Table:
    """A table's YAML; the keys are explained at the top of this file."""

    title: str
    presets: dict[str, Preset]
    rows: list[Row]
    paper: list[str] = field(default_factory=list)
    metric: str = "accuracy"
    split: str = "test"
    summary: Summary = "last"
    baseline: str | None = None


def load_table(name: str) -> Table:
    """Read ``configs/tables/<name>.yaml``, or the YAML file ``name``, and check it.

    Raises:
        ConfigurationError: no such table, an unknown or missing key, a value of the wrong type.
    """
    from jsonargparse import ArgumentError as ParserError
    from jsonargparse import ArgumentParser

    path = Path(name) if name.endswith((".yaml", ".yml")) else Path("configs/tables") / f"{name}.yaml"
    if not path.is_file():
        known = sorted(entry.stem for entry in Path("configs/tables").glob("*.yaml"))
        raise ConfigurationError(
            f"there is no table {path}; tables here: {', '.join(known) or 'none (start the command in the root)'}"
        )
    content = read_mapping(path)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--table", type=Table)
    try:
        table: Table = parser.instantiate_classes(parser.parse_object({"table": content})).table
    except (ParserError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(f"{path} is not a table: {' '.join(str(error).split())}") from error
    _check_table(table, path)
    return table


def _check_table(table: Table, path: Path) -> None:
    groups = [group for preset in table.presets.values() for group in preset.data]
    for name in [row.prefix for row in table.rows] + [group.name for group in groups]:
        if not re.fullmatch(r"[a-z0-9_]+", name):
            raise ConfigurationError(f"{path}: the name {name!r} is part of a directory's: use a-z, 0-9 and _ only")
    labels = [row.label for row in table.rows]
    if not labels or not table.presets:
        raise ConfigurationError(f"{path}: a table needs at least one row and one preset")
    if len(set(labels)) < len(labels):
        raise ConfigurationError(f"{path}: two rows have the same label")
    overrides = [
        *(entry for preset in table.presets.values() for entry in preset.overrides),
        *(entry for group in groups for entry in group.overrides),
        *(entry for row in table.rows for entries in row.overrides.values() for entry in entries),
    ]
    for entry in overrides:
        option, equals, _ = entry.partition("=")
        if not option.startswith("--") or not equals or option in RUNNER_OPTIONS:
            raise ConfigurationError(
                f"{path}: the override {entry!r} is not of the form --key=value, or sets what the runner sets itself "
                f"({', '.join(RUNNER_OPTIONS)})"
            )
    for preset_name, preset in table.presets.items():
        if not preset.data:
            raise ConfigurationError(f"{path}: the preset {preset_name} needs at least one data group")
        _check_seeds(preset.seeds, f"{path}, preset {preset_name}: ")
        if unknown := sorted(set(preset.rows) - set(labels)):
            raise ConfigurationError(f"{path}: the preset {preset_name} names {unknown[0]!r}, which is no row's label")
        if len({group.name for group in preset.data}) < len(preset.data):
            raise ConfigurationError(f"{path}: two data groups of the preset {preset_name} have the same name")
    for row in table.rows:
        if row.method is None and not row.configs:
            raise ConfigurationError(f"{path}: row {row.label} names no method of configs/methods and no configs")
        if row.method and (bare := next((group.name for group in groups if group.suite is None), None)):
            raise ConfigurationError(
                f"{path}: row {row.label} names a method, and the data group {bare} no suite for it"
            )
        unknown = sorted(set(row.overrides) - set(table.presets))
        if unknown:
            raise ConfigurationError(f"{path}: row {row.label} has overrides for {unknown[0]}, which is no preset")
    for group in groups:
        _check_columns(table, group, path)
    _check_baseline(table, path)


def _check_seeds(seeds: Sequence[int], where: str = "") -> None:
    if not seeds or not all(0 <= seed < 2**32 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ConfigurationError(
            f"{where}seeds are at least one seed, different integers from 0 to {2**32 - 1}, got {list(seeds)}"
        )


def _check_columns(table: Table, group: DataGroup, path: Path) -> None:
    left: list[str] = []
    for column in group.columns:
        metric, split = column.metric or table.metric, column.split or table.split
        if metric not in METRICS or split not in SPLITS:
            raise ConfigurationError(
                f"{path}: there is no {metric} on {split}; metrics are {', '.join(METRICS)}, splits {', '.join(SPLITS)}"
            )
        missing = [label for label in column.harmonic if label not in left]
        if missing:
            raise ConfigurationError(f"{path}: no column {missing[0]!r} stands left of the harmonic mean that names it")
        if column.label is not None:
            left.append(column.label)


def _check_baseline(table: Table, path: Path | str) -> None:
    labels = [row.label for row in table.rows]
    if table.baseline is not None and table.baseline not in labels:
        raise ConfigurationError(f"{path}: the baseline {table.baseline!r} is no row; rows are {', '.join(labels)}")


# --- cells ----------------------------------------------------------------------------------------------------------


def rows_of(table: Table, preset: Preset) -> list[Row]:
    """The rows that a preset runs."""
    return [row for row in table.rows if not preset.rows or row.label in preset.rows]


def make_cell(row: Row, preset_name: str, preset: Preset, group: DataGroup, seed: int) -> Cell:
    """The run of this row on this data with this seed.

    Raises:
        ConfigurationError: a config file is missing or is no YAML.
    """
    named = () if row.method is None else (f"configs/methods/{row.method}.yaml", f"configs/suites/{group.suite}.yaml")
    configs = (*preset.base, *group.configs, *named, *row.configs)
    overrides = (*preset.overrides, *group.overrides, *row.overrides.get(preset_name, ()))
    return Cell(f"{row.prefix}-{group.name}-s{seed}-{content_hash(configs, overrides)}", configs, overrides, seed)


def make_cells(table: Table, preset_name: str, preset: Preset) -> dict[tuple[str, str, int], Cell]:
    """Every run of a preset, by (data group's name, row's label, seed); two rows can share a run.

    Raises:
        ConfigurationError: as :func:`make_cell`.
    """
    return {
        (group.name, row.label, seed): make_cell(row, preset_name, preset, group, seed)
        for group in preset.data
        for row in rows_of(table, preset)
        for seed in preset.seeds
    }


def check_readings(table: Table, preset: Preset, cells: dict[tuple[str, str, int], Cell], work: Work) -> None:
    """Refuse a point, split or client that a run does not have, before anything runs.

    What a cell has is said by its record where there is one, else by its configuration: that of the first data group
    for every row that is read at the point "local", that of the first row for every group with clients or held-out
    splits of its own.

    Raises:
        ConfigurationError: one line, for the first that is not there.
    """
    rows = rows_of(table, preset)
    for group in preset.data:
        columns = [column for column in group.columns if not column.harmonic]
        clients = [None if column.client == "*" else column.client for column in columns]
        splits = [column.split or table.split for column in columns]
        special = any(clients) or {"val", "new"} & set(splits)
        for row in rows:
            cell = cells[group.name, row.label, preset.seeds[0]]
            points = list(dict.fromkeys([row.point, *row.also.values()]))
            asked = ("local" in points and group is preset.data[0]) or (special and row is rows[0])
            found = next((folder / cell.name for folder in work.folders if is_finished(folder / cell.name)), None)
            if found is not None:
                try:
                    there = of_record(stored_run(found).record)
                except ConfigurationError:
                    continue  # a damaged record fails alone
            elif asked and work.program == PROGRAM:
                there = of_configuration(cell_command(cell, work.runs_dir / cell.name, work.data_dir, ())[1:])
            else:
                continue
            for client, split in zip(clients, splits, strict=True):
                for point in points:
                    there.check(point, split, client, f"row {row.label}, {group.label}")


# --- reading the records ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
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


def read_paper(paths: Sequence[str]) -> "pd.DataFrame":
    """Published numbers, columns as ``results/paper/README.md`` explains them.

    Raises:
        ConfigurationError: a file is missing or has other columns.
    """
    import pandas as pd

    columns = ["paper", "table", "dataset", "setting", "backbone", "method", "metric", "value", "std"]
    tables = []
    for path in paths:
        try:
            table = pd.read_csv(path, dtype=dict.fromkeys(columns[:-2], "str"), keep_default_na=False, na_values=[""])
            table = table[columns].astype({"value": "float64", "std": "float64"})
        except (OSError, KeyError, ValueError) as error:
            raise ConfigurationError(f"{path} is not a CSV with the columns {', '.join(columns)}: {error}") from error
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def paper_value(paper: "pd.DataFrame", method: str, number: PaperNumber) -> float | None:
    """The published number of a method, in the paper's unit (per cent for accuracies); None where there is none.

    Raises:
        ConfigurationError: several numbers fit (name the backbone).
    """
    fits = (paper["method"] == method) & (paper["dataset"] == number.dataset) & (paper["setting"] == number.setting)
    fits &= paper["metric"] == number.metric
    if number.backbone is not None:
        fits &= paper["backbone"] == number.backbone
    found = paper.loc[fits, "value"]
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} published numbers fit {method}, {number.dataset}, {number.setting}, {number.metric}; "
            "name the backbone in the column's `paper`"
        )
    return float(found.iloc[0]) if len(found) else None


def _expanded(group: DataGroup, records: Sequence[RunRecord]) -> list[Column]:
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


def _summaries(record: RunRecord, point: str, split: str, metric: str) -> dict[str, Any]:
    try:
        return dict(record.summary[point][split][metric])
    except KeyError:
        raise ConfigurationError(f"the run has no {metric} on {split} at the point '{point}'") from None


def _scaled(value: float | None, metric: str) -> float:
    return math.nan if value is None else 100 * value if metric in PERCENT else value


class _Reader:
    """Reads one run at one point for the columns of a table."""

    def __init__(self, run: StoredRun, table: Table, point: str) -> None:
        self.record = run.record
        self.metrics = run.metrics
        self.table = table
        self.point = point

    def clients(self, metric: str, split: str) -> list[float]:
        values = client_values(self.metrics, self.record, self.point, split, metric, self.table.summary)
        return [_scaled(value, metric) for value in values]

    def value(self, column: Column, so_far: dict[str, float]) -> float:
        metric, split = column.metric or self.table.metric, column.split or self.table.split
        if column.harmonic:
            parts = [so_far[label] for label in column.harmonic]
            return len(parts) / sum(1 / part for part in parts) if all(parts) else 0.0
        if column.client is None:
            entry = _summaries(self.record, self.point, split, metric)
            return _scaled(entry.get(self.table.summary, {}).get(column.statistic), metric)
        if column.client not in self.record.client_names:
            names = ", ".join(self.record.client_names)
            raise ConfigurationError(f"no client {column.client!r}; the run has {names}")
        return self.clients(metric, split)[self.record.client_names.index(column.client)]


def _line(
    row: Row,
    reading: str,
    point: str,
    columns: Sequence[Column],
    outcomes: dict[int, Outcome],
    table: Table,
) -> _Line:
    line = _Line(row.label, reading, point, {str(c.label): [] for c in columns}, {}, {}, {}, len(outcomes), [])
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
            entry = _summaries(reader.record, point, table.split, table.metric)
        except ConfigurationError as error:
            line.errors.append(f"{outcome.run_dir}: {error}")
            continue
        for label, value in found.items():
            line.values[label].append(value)
        for summary in SUMMARY_NOTES:
            for statistic, value in entry.get(summary, {}).items():
                if statistic in STATISTIC_LABELS and value is not None:
                    line.statistics.setdefault((summary, statistic), []).append(_scaled(value, table.metric))
        line.clients[seed] = clients
        line.records[seed] = reader.record
    return line


def _against(line: _Line, baseline: _Line) -> Comparison | None:
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


# --- numbers as text -------------------------------------------------------------------------------------------------


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and standard deviation over seeds (n - 1 in the denominator; NaN for one seed)."""
    import numpy as np

    if not values:
        return math.nan, math.nan
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _number(value: float, digits: int = 2) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def _with_std(values: Sequence[float], digits: int) -> str:
    mean, std = _mean_std(values)
    return _number(mean, digits) + ("" if math.isnan(std) else f" ± {std:.{digits}f}")


def _signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}"


def _floats(value: float) -> str:
    """A number of floats in the papers' manner: 7.68e3."""
    if value == 0 or math.isnan(value):
        return "" if math.isnan(value) else "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _published(value: float | None) -> str:
    """A published number: accuracies with two digits, costs in powers of ten."""
    return "" if value is None else _number(value) if value < 1000 else _floats(value)


def _span(values: Sequence[int]) -> str:
    return "" if not values else str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"


def _digits(metric: str) -> int:
    return 2 if metric in PERCENT else 4


# --- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    heading: str
    header: list[str]
    body: list[list[str]]


@dataclass(frozen=True)
class _Read:
    """A data group with its columns and what was read of its runs; the lines of all groups are in the same order."""

    group: DataGroup
    columns: list[Column]
    lines: list[_Line]


def _heading(text: str, table: Table) -> str:
    return f"{text}, best round, chosen on test data" if table.summary == "best_on_test" else text


def _our_block(panel: str, reads: Sequence[_Read], paper: "pd.DataFrame", table: Table) -> _Block:
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
            _with_std(lines[position].values[str(column.label)], _digits(column.metric or table.metric))
            if lines[position].records
            else "failed"
            for position, column in placed
        ]
        tails = [
            (
                _floats(_mean_std(line.communicated("up_floats"))[0]),
                _number(_mean_std(line.communicated("up_bytes", "down_bytes"))[0] / 1e6, 3),
                _span(line.rounds()),
                _number(_mean_std(line.seconds())[0], 0),
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
        cost = " / ".join(dict.fromkeys(_published(value) for value in costs if value is not None))
        if not cost and all(value is None for value in published):
            continue
        body.append(["", "paper", *map(_published, published), cost, "", "", ""])
        differences = [
            ""
            if value is None or not lines[position].values[str(column.label)]
            else _signed(_mean_std(lines[position].values[str(column.label)])[0] - value)
            for value, (position, column) in zip(published, placed, strict=True)
        ]
        body.append(["", "difference", *differences, "", "", "", ""])
    return _Block(_heading(panel, table), header, body)


STATISTIC_COLUMNS = (
    ("Last", "last", "average"),
    ("Last ten", "last10", "average"),
    ("Best (chosen on test data)", "best_on_test", "average"),
    ("Worst client", "", "worst"),
    ("Worst decile", "", "worst_decile"),
    ("Spread over clients", "", "std"),
)


def _statistics_block(read: _Read, table: Table) -> _Block:
    """Rounds, clients and costs of each method on one data group."""
    digits = _digits(table.metric)
    header = ["Method", *(label for label, _, _ in STATISTIC_COLUMNS), "kB up", "kB down", "Seconds", "Peak MB"]
    body = []
    for line in read.lines:
        if not line.records:
            continue
        values = [
            _with_std(line.statistics.get((summary or table.summary, statistic), []), digits)
            for _, summary, statistic in STATISTIC_COLUMNS
        ]
        up, down = (_number(_mean_std(line.communicated(name))[0] / 1e3, 1) for name in ("up_bytes", "down_bytes"))
        peak = _mean_std(line.peaks())[0] / 1e6
        body.append([line.name, *values, up, down, _number(_mean_std(line.seconds())[0], 0), _number(peak, 0)])
    return _Block(f"{read.group.label}: rounds, clients and costs", header, body)


def _paired_block(read: _Read, baseline: str, table: Table) -> _Block | None:
    """Every method minus the baseline, paired by seed and client; None where the baseline has no run."""
    reference = next(line for line in read.lines if line.method == baseline and not line.reading)
    digits = _digits(table.metric)
    body = []
    for line in read.lines:
        found = None if line is reference else _against(line, reference)
        if found is None:
            continue
        interval = "" if math.isnan(found.low) else f"{_signed(found.low, digits)} to {_signed(found.high, digits)}"
        body.append([line.name, _signed(found.mean, digits), interval, str(found.pairs), str(found.seeds), found.over])
    header = ["Method", "Difference", "95 % interval", "Pairs", "Seeds", "Interval over"]
    return _Block(f"{read.group.label}: against {baseline}, paired", header, body) if body else None


def _paper_blocks(table: Table, paper: "pd.DataFrame") -> list[_Block]:
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
            [label, *(_published(numbers.get((label, column))) for column in columns)]
            for label in labels
            if label in set(part["method"])
        ]
        blocks.append(_Block(f"{dataset} (paper)", ["Method", *columns], body))
    return blocks


def _markdown(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*|<>\[\]])", r"\\\1", text)


PAIRED_NOTE = (
    "Paired: client by client and seed by seed on the same partition, method minus baseline; a t-interval whose "
    "variance is that over clients plus, with several seeds, that over seeds (Welch-Satterthwaite degrees of freedom)."
)


def _footnotes(
    table: Table, preset: Preset, reads: Sequence[_Read], records: Sequence[RunRecord], paired: bool
) -> list[str]:
    lines = [line for read in reads for line in read.lines]
    unit = ", in per cent" if table.metric in PERCENT else ""
    seeds = f"one seed ({preset.seeds[0]}), hence no standard deviation"
    if len(preset.seeds) > 1:
        seeds = f"mean ± standard deviation over seeds {', '.join(map(str, preset.seeds))}"
    metric = table.metric.replace("_", " ").capitalize()
    notes = [f"{metric} on the {table.split} split{unit}, of {SUMMARY_NOTES[table.summary]}; {seeds}."]
    for point in dict.fromkeys(line.point for line in lines):
        named = dict.fromkeys(line.name for line in lines if line.point == point)
        notes.append(f"Read at the point '{point}' ({POINT_NOTES[point]}): {'; '.join(named)}.")
    servers = dict.fromkeys(
        f"{line.method}: {record.other_server} in place of {record.default_server}"
        for line in lines
        for record in line.records.values()
        if record.other_server
    )
    if servers:
        notes.append(f"Other servers than the methods' own: {'; '.join(servers)}.")
    early = dict.fromkeys(
        f"{line.name}: {last} of {record.rounds_trained}"
        for line in lines
        for record in line.records.values()
        if (last := _summaries(record, line.point, table.split, table.metric)["last"]["round"]) < record.rounds_trained
    )
    if early:
        notes.append(f"The last round is the last evaluated one, which is not the run's last: {'; '.join(early)}.")
    notes.append(
        "Floats up: numbers one participating client sends in a round. MB and kB: 10^6 and 10^3 bytes, per "
        "participating client and round. Peak MB: of the GPU, or of the process on a CPU."
    )
    notes.append(
        "Worst client, worst decile (mean of the worst tenth) and spread (standard deviation over clients) are of "
        f"{SUMMARY_NOTES[table.summary]}. The best round is chosen on test data and hence optimistic."
    )
    if paired:
        notes.append(PAIRED_NOTE)
    if records:
        hardware = dict.fromkeys(
            f"{record.device} ({record.environment.get('hardware', {}).get('cpu', 'unknown')}, "
            f"{record.environment.get('hardware', {}).get('cores', '?')} cores)"
            for record in records
        )
        revisions = dict.fromkeys(
            f"{str(git.get('revision'))[:12]}{' with changes' if git.get('dirty') else ''}"
            for record in records
            if (git := record.environment.get("git", {})).get("revision")
        )
        total = sum(record.seconds["total"] for record in records)
        notes.append(f"Hardware: {'; '.join(hardware)}. {len(records)} runs, {total:.0f} s in all.")
        if revisions:
            notes.append(f"Code: {'; '.join(revisions)}.")
    return notes


# --- the long form ---------------------------------------------------------------------------------------------------


def _long_rows(read: _Read, table: Table, paper: "pd.DataFrame", baseline: str | None) -> list[dict[str, Any]]:
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
            "floats_up": _mean_std(line.communicated("up_floats"))[0],
            "bytes_up": _mean_std(line.communicated("up_bytes"))[0],
            "bytes_down": _mean_std(line.communicated("down_bytes"))[0],
            "rounds": _span(line.rounds()),
            "seconds": _mean_std(line.seconds())[0],
            "peak_memory_bytes": _mean_std(line.peaks())[0],
            "error": " / ".join(dict.fromkeys(line.errors)),
        }
        of_table: dict[str, Any] = {"split": table.split, "metric": table.metric}
        for column in read.columns:
            mean, std = _mean_std(line.values[str(column.label)])
            published = paper_value(paper, line.method, column.paper) if column.paper and not line.reading else None
            entry: dict[str, Any] = {"split": column.split or table.split, "metric": column.metric or table.metric}
            entry |= {"kind": "column", "column": column.label, "summary": table.summary, "ours": mean, "std": std}
            entry |= {"paper": published, "difference": None if published is None else mean - published}
            rows.append(shared | entry)
        for (summary, statistic), values in line.statistics.items():
            mean, std = _mean_std(values)
            entry = {"kind": "statistic", "column": statistic, "summary": summary, "ours": mean, "std": std}
            rows.append(shared | of_table | entry)
        found = _against(line, reference) if reference is not None and line is not reference else None
        if found is not None:
            entry = {"kind": "paired", "column": f"minus {baseline}", "summary": table.summary, "ours": found.mean}
            entry |= {"low": found.low, "high": found.high, "pairs": found.pairs, "seeds": found.seeds}
            rows.append(shared | of_table | entry)
    return rows


LONG_COLUMNS = (
    *("table", "preset", "title", "kind", "dataset", "method", "reading", "point", "split", "metric", "summary"),
    *("column", "ours", "std", "seeds", "paper", "difference", "low", "high", "pairs"),
    *("floats_up", "bytes_up", "bytes_down", "rounds", "seconds", "peak_memory_bytes", "error"),
)
"""Columns of a table's CSV. ``kind``: "column" is a number of the table itself, "statistic" one over clients for each
summary, "paired" a difference to the baseline with its interval ``low`` to ``high``, "note" the preset's note (its text
stands under ``column``). Accuracies in per cent."""


def _title(table: Table, preset_name: str) -> str:
    """The table's title, and which preset it is; the paper's setting has the plain title."""
    known = {"demo": f"Demo: {table.title}", "paper": table.title}
    return known.get(preset_name, f"{table.title} (preset {preset_name})")


# --- the whole -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rendered:
    """A table as Markdown, CSV (long: one line per number, :data:`LONG_COLUMNS`) and LaTeX.

    ``problems``: finished cells without the numbers that the table shows, one sentence each.
    """

    markdown: str
    csv: str
    latex: str
    problems: list[str]


def render(
    name: str,
    table: Table,
    preset_name: str,
    preset: Preset,
    cells: dict[tuple[str, str, int], Cell],
    outcomes: dict[str, Outcome],
) -> Rendered:
    """The table from its cells (:func:`make_cells`) and their outcomes (:func:`benchmark.cells.queue.run_cells`).

    Raises:
        ConfigurationError: the paper's CSV cannot be read, or a column names a number that is not unique.
    """
    import pandas as pd
    from tabulate import tabulate

    paper = read_paper(table.paper)
    reads: list[_Read] = []
    records: dict[Path, RunRecord] = {}
    failed: dict[str, Outcome] = {}
    rows = rows_of(table, preset)
    for group in preset.data:
        by_row = []
        for row in rows:
            names = {seed: cells[group.name, row.label, seed].name for seed in preset.seeds}
            by_row.append({seed: outcomes[cell] for seed, cell in names.items()})
            failed |= {cell: outcomes[cell] for cell in names.values() if outcomes[cell].run_dir is None}
        by_row = _of_the_same_images(by_row)
        finished = [outcome.run_dir for entry in by_row for outcome in entry.values() if outcome.run_dir]
        here = {run_dir: stored_run(run_dir).record for run_dir in finished}
        records |= here
        columns = _expanded(group, list(here.values()))
        lines = [
            _line(row, reading, point, columns, entry, table)
            for row, entry in zip(rows, by_row, strict=True)
            for reading, point in {"": row.point, **row.also}.items()
        ]
        reads.append(_Read(group, columns, lines))
    panels: dict[str, list[_Read]] = {}
    for read in reads:
        panels.setdefault(read.group.panel or read.group.label, []).append(read)
    blocks = [_our_block(panel, part, paper, table) for panel, part in panels.items()]
    blocks += [_statistics_block(read, table) for read in reads]
    paired = [] if table.baseline is None else [_paired_block(read, table.baseline, table) for read in reads]
    blocks += [block for block in paired if block is not None]
    long = [row for read in reads for row in _long_rows(read, table, paper, table.baseline)]
    title = _title(table, preset_name)
    long += [{"kind": "note", "column": preset.note}] if preset.note else []
    frame = pd.DataFrame(long).assign(table=name, preset=preset_name, title=title)
    any_paired = any(block is not None for block in paired)
    notes = _footnotes(table, preset, reads, list(records.values()), any_paired)
    problems = [f"{cell}: {outcome.error}" for cell, outcome in failed.items()]
    known = {outcome.error for outcome in failed.values()}
    unread = [error for read in reads for line in read.lines for error in line.errors if error not in known]
    problems += unread
    published_blocks = _paper_blocks(table, paper) if not any(c.paper for g in preset.data for c in g.columns) else []
    aside = "The paper's numbers, on other data with another backbone: not comparable with the numbers above."

    def markdown_block(block: _Block) -> str:
        body = [[_markdown(cell) for cell in line] for line in block.body]
        shown = tabulate(body, [_markdown(cell) for cell in block.header], tablefmt="pipe", disable_numparse=True)
        return f"## {_markdown(block.heading)}\n\n{shown}\n"

    def latex_block(block: _Block) -> str:
        shown = tabulate(block.body, block.header, tablefmt="latex_booktabs", disable_numparse=True)
        return f"% {block.heading}\n" + re.sub(r"(?<= )-(?=\d)", "$-$", shown.replace("±", r"$\pm$")) + "\n"

    parts = [f"# {_markdown(title)}\n", *([f"{_markdown(preset.note)}\n"] if preset.note else [])]
    parts += [markdown_block(block) for block in blocks]
    if problems:
        parts.append("Failed:\n\n" + "".join(f"- {_markdown(problem)}\n" for problem in dict.fromkeys(problems)))
    parts.append("Notes:\n\n" + "".join(f"- {_markdown(note)}\n" for note in notes))
    if published_blocks:
        parts += [f"# {_markdown(aside)}\n", *map(markdown_block, published_blocks)]
    latex = [f"% {title}\n", *map(latex_block, blocks), *(f"% {note}\n" for note in notes)]
    latex += [f"% failed: {problem}\n" for problem in dict.fromkeys(problems)]
    if published_blocks:
        latex += [f"% {aside}\n", *map(latex_block, published_blocks)]
    frame = frame.reindex(columns=list(LONG_COLUMNS)).astype({"seeds": "Int64"})
    unread = list(dict.fromkeys(unread))
    return Rendered("\n".join(parts), frame.to_csv(index=False), "\n".join(latex), unread)


def _of_the_same_images(by_row: Sequence[dict[int, Outcome]]) -> list[dict[int, Outcome]]:
    """The outcomes of a data group per row and seed, without those on other images than its first finished run.

    Images of one name from another folder would count as another seed. Records of before don't name their images.
    """
    runs = [outcome.run_dir for entry in by_row for outcome in entry.values() if outcome.run_dir]
    images = {run: stored_run(run).record.images_sha256 for run in runs}
    first = next((run for run in runs if images[run]), None)

    def checked(outcome: Outcome) -> Outcome:
        run = outcome.run_dir
        if run is None or first is None or images[run] in (None, images[first]):
            return outcome
        return Outcome(
            None, f"{run} was run on other images than {first} ({images[run]:.8} and {images[first]:.8}); remove one"
        )

    return [{seed: checked(outcome) for seed, outcome in entry.items()} for entry in by_row]


@dataclass(frozen=True)
class TableResult:
    """The files of a table (Markdown, CSV, LaTeX), the cells that failed, by name, and what could not be read."""

    markdown: Path
    csv: Path
    latex: Path
    failed: dict[str, Outcome]
    problems: list[str] = field(default_factory=list)


def _draw_curves(
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


def run_table(
    name: str,
    preset: str = "demo",
    data_dir: str | Path | None = None,
    jobs: int | None = None,
    results_dir: str | Path = "results",
    runs_dir: str | Path = "runs",
    seeds: Sequence[int] | None = None,
    kept: bool = False,
    baseline: str | None = None,
    cluster: Cluster | None = None,
    program: Sequence[str] = PROGRAM,
    rerun_changed: bool = False,
) -> TableResult:
    """Run a table's missing cells, ``jobs`` at a time, then write ``results_dir/tables/<name>_<preset>.{md,csv,tex}``
    and, with the metric over the rounds, ``.png``.

    A cell counts as finished with a record in ``runs_dir``, and with ``kept`` also with a committed one in
    ``results_dir/runs``. ``seeds`` and ``baseline`` replace the table's own; ``cluster`` runs the cells as its jobs.
    One line says how many finished cells were made by other code than the present one; ``rerun_changed`` runs those
    again and puts the old ones into ``runs_dir/.replaced``. Records of before do not know their code; they are counted,
    and kept.

    Raises:
        ConfigurationError: a bad table, a missing config or paper CSV, an unknown preset or baseline, no ``data_dir``
            where the preset needs one, ``jobs`` below 1, no cluster, a point, split or client that a run does not have.
            All before anything runs.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP, after the children were ended.
    """
    table = load_table(name)
    if preset not in table.presets:
        raise ConfigurationError(f"table {name} has no preset {preset!r}; it has {', '.join(table.presets)}")
    if jobs is not None and jobs < 1:
        raise ConfigurationError(f"jobs is {jobs}, expected at least 1")
    chosen = table.presets[preset]
    if seeds is not None:
        _check_seeds(seeds)
        chosen = replace(chosen, seeds=list(seeds))
    if chosen.summary is not None:
        table = replace(table, summary=chosen.summary)
    if baseline is not None:
        table = replace(table, baseline=baseline)
        _check_baseline(table, name)
    if table.baseline not in [row.label for row in rows_of(table, chosen)]:
        if baseline is not None:
            raise ConfigurationError(f"the preset {preset} of table {name} does not run the baseline {baseline!r}")
        table = replace(table, baseline=None)
    read_paper(table.paper)
    cells = make_cells(table, preset, chosen)
    folder = None if data_dir is None else Path(data_dir).expanduser()
    if folder is None and any("{data_dir}" in entry for cell in cells.values() for entry in cell.overrides):
        raise ConfigurationError(
            f"the preset {preset} of table {name} reads data sets: give their folder with --data_dir or DATA_DIR"
        )
    if folder is not None and not folder.is_dir():
        raise ConfigurationError(f"data_dir {folder} is not a folder")
    results = Path(results_dir)
    work = Work(Path(runs_dir), results / "runs" if kept else None, folder, tuple(program), rerun_changed)
    check_readings(table, chosen, cells, work)
    outcomes = run_cells(list(cells.values()), work, jobs, cluster)
    rendered = render(Path(name).stem, table, preset, chosen, cells, outcomes)
    stem = f"{Path(name).stem}_{preset}"
    target = results / "tables"
    target.mkdir(parents=True, exist_ok=True)
    paths = {suffix: target / f"{stem}.{suffix}" for suffix in ("md", "csv", "tex")}
    write_text(paths["md"], rendered.markdown)
    write_text(paths["csv"], rendered.csv)
    write_text(paths["tex"], rendered.latex)
    _draw_curves(table, chosen, cells, outcomes, target / f"{stem}.png")
    failed = {cell: outcome for cell, outcome in outcomes.items() if outcome.run_dir is None}
    return TableResult(paths["md"], paths["csv"], paths["tex"], failed, rendered.problems)
