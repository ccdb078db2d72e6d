"""Paper tables: from a YAML in ``configs/tables/`` to runs, and from their records to a table beside the paper's.

Paths in a table are relative to the folder the command is started in, the repository's root::

    title: pFedPG Table 1
    paper: [results/paper/pfedpg_table1.csv]  # published numbers; `method` is a row's label
    metric: accuracy                          # of metrics.parquet; default accuracy
    split: test                               # default test
    summary: last                             # last | last10 | best_on_test; default last
    presets:
      paper:
        note: One sentence under the title.   # optional
        seeds: [0, 1, 2]
        base: [configs/x.yaml]                # optional; configs of every run of the preset
        overrides: ["--trainer.max_epochs=100"]  # optional; as on the command line, one string each
        data:                                 # column groups; one run gives all columns of a group
          - name: office_caltech10            # [a-z0-9_]; part of run directories
            label: Office-Caltech10           # heading
            configs: [configs/base.yaml]      # optional; read before the row's
            overrides: ["--data.init_args.root={data_dir}"]  # {data_dir}: the folder given by --data_dir
            columns:                          # default: every client, then the average
              - {client: amazon, label: A, paper: {dataset: Office-Caltech10, setting: domain=A}}
              - {client: "*"}                 # one column per client, named as in the record
              - {statistic: average, label: Avg, paper: {dataset: Office-Caltech10, setting: avg over domains}}
                # statistic: average | worst | worst_decile | std | pooled; `paper` may name metric (default accuracy)
                # and backbone (needed where the CSV has several). No `paper`: no published number, no difference.
            cost: {dataset: both, setting: communication cost, metric: params per round}  # optional: floats one way
    rows:
      - label: pFedPG                         # the paper's name of the method
        name: pfedpg                          # [a-z0-9_]; part of run directories
        configs: ["configs/pfedpg_{data}.yaml"]  # {data}: the group's name; read after base and data configs
        overrides: {paper: ["--model.lr=0.1"]}   # optional; per preset
        point: local                          # server | local: where the row's number is read
        also: {generated prompts: server}     # optional; further readings of the same run, below it

A *cell* is one run: row x data x seed. Its directory is ``<row>-<data>-s<seed>-<hash>``, where the hash is of the
configs' contents and the overrides alone. So a finished cell is never run again, not by another table either; a killed
one continues from its checkpoint; and two runners that share a directory do each cell once.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from benchmark.errors import ConfigurationError
from benchmark.results import (
    RunRecord,
    client_values,
    is_finished,
    read_metrics,
    read_record,
    verify_record,
    write_text,
)

if TYPE_CHECKING:
    import pandas as pd

Point = Literal["server", "local"]
Statistic = Literal["average", "worst", "worst_decile", "std", "pooled"]
Summary = Literal["last", "last10", "best_on_test"]

CELL_PROGRAM = (sys.executable, "-m", "benchmark.cli")
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
GRACE_SECONDS = 10.0


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
    """One client (``"*"``: every client), or a statistic over clients."""

    label: str | None = None
    client: str | None = None
    statistic: Statistic = "average"
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


@dataclass(frozen=True)
class Preset:
    """At which size, on which data, and with which seeds a table is made."""

    data: list[DataGroup]
    seeds: list[int]
    base: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One method."""

    label: str
    name: str
    configs: list[str]
    point: Point
    also: dict[str, Point] = field(default_factory=dict)
    overrides: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table's YAML; the keys are explained at the top of this file."""

    title: str
    presets: dict[str, Preset]
    rows: list[Row]
    paper: list[str] = field(default_factory=list)
    metric: str = "accuracy"
    split: Literal["test", "val"] = "test"
    summary: Summary = "last"


def _yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error}); start the command in the repository's root"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


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
    content = _yaml(path)
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
    for name in [row.name for row in table.rows] + [group.name for group in groups]:
        if not re.fullmatch(r"[a-z0-9_]+", name):
            raise ConfigurationError(f"{path}: the name {name!r} is part of a directory's: use a-z, 0-9 and _ only")
    labels = [row.label for row in table.rows]
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
        if not preset.seeds or not preset.data:
            raise ConfigurationError(f"{path}: the preset {preset_name} needs at least one seed and one data group")
        if len({group.name for group in preset.data}) < len(preset.data):
            raise ConfigurationError(f"{path}: two data groups of the preset {preset_name} have the same name")
    for row in table.rows:
        unknown = sorted(set(row.overrides) - set(table.presets))
        if unknown:
            raise ConfigurationError(f"{path}: row {row.label} has overrides for {unknown[0]}, which is no preset")


# --- cells ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run of a table: a row on a data group with a seed.

    Attributes:
        name: of the run directory.
        configs: files, later ones win.
        overrides: command line arguments, later ones win; may hold ``{data_dir}``.
        seed: of the run.
    """

    name: str
    configs: tuple[str, ...]
    overrides: tuple[str, ...]
    seed: int


def _content(path: Path) -> Any:
    """A config's content, with the YAML files it refers to put in their places."""

    def inlined(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): inlined(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [inlined(entry) for entry in value]
        if isinstance(value, str) and value.endswith((".yaml", ".yml")) and (path.parent / value).is_file():
            return _content(path.parent / value)
        return value

    return inlined(_yaml(path))


def _digest(configs: Sequence[str], overrides: Sequence[str]) -> str:
    content = [[_content(Path(entry)) for entry in configs], list(overrides)]
    spelled = json.dumps(content, sort_keys=True, default=str)  # default: YAML knows dates
    return hashlib.sha256(spelled.encode()).hexdigest()[:8]


def make_cell(row: Row, preset_name: str, preset: Preset, group: DataGroup, seed: int) -> Cell:
    """The run of this row on this data with this seed.

    Raises:
        ConfigurationError: a config file is missing or is no YAML.
    """
    configs = (*preset.base, *group.configs, *(entry.replace("{data}", group.name) for entry in row.configs))
    overrides = (*preset.overrides, *group.overrides, *row.overrides.get(preset_name, ()))
    return Cell(f"{row.name}-{group.name}-s{seed}-{_digest(configs, overrides)}", configs, overrides, seed)


def make_cells(table: Table, preset_name: str, preset: Preset) -> dict[tuple[str, str, int], Cell]:
    """Every run of a preset, by (data group's name, row's label, seed); two rows can share a run.

    Raises:
        ConfigurationError: as :func:`make_cell`.
    """
    return {
        (group.name, row.label, seed): make_cell(row, preset_name, preset, group, seed)
        for group in preset.data
        for row in table.rows
        for seed in preset.seeds
    }


def cell_command(cell: Cell, run_dir: Path, data_dir: Path | None, program: Sequence[str] = CELL_PROGRAM) -> list[str]:
    """The command of a cell; it continues from ``checkpoints/last.ckpt`` where that file is there."""
    command = [*program, "fit"]
    for entry in cell.configs:
        command += ["--config", entry]
    command += ["--run_dir", str(run_dir), "--seed_everything", str(cell.seed)]
    command += [entry.replace("{data_dir}", str(data_dir)) for entry in cell.overrides]
    checkpoint = run_dir / "checkpoints" / "last.ckpt"
    return [*command, "--ckpt_path", str(checkpoint)] if checkpoint.is_file() else command


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: the directory of its record, or else its error in one line and its log."""

    run_dir: Path | None
    error: str = ""
    log: Path | None = None


def finished_outcome(cell: Cell, folders: Sequence[Path]) -> Outcome | None:
    """The cell's outcome from a record in one of the folders; None where there is no record yet."""
    for folder in folders:
        run_dir = folder / cell.name
        if not is_finished(run_dir):
            continue
        problems = verify_record(run_dir)
        if not problems and read_record(run_dir).seed != cell.seed:
            problems = [f"{run_dir} was run with seed {read_record(run_dir).seed}, expected {cell.seed}"]
        if problems:
            return Outcome(None, f"{problems[0]}; remove {run_dir} to run it again")
        return Outcome(run_dir)
    return None


def _last_line(log: Path) -> str:
    """The last line of a log that says something, without colours, at most 300 characters."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - 16_384))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    return lines[-1][:300] if lines else ""


class _CellLock:
    """An advisory lock on a run directory, held by the runner *and* by the cell's process.

    The kernel frees it when the last of them ends, however they end: a killed runner blocks nobody, and while its cell
    still goes on, no other runner starts that cell a second time. The file says who has it, and whether the last
    attempt failed; it is never deleted (deleting would let two runners hold two files of one name).
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT, 0o666)

    def acquire(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.descriptor)
            return False
        return True

    def failed_before(self) -> bool:
        return os.pread(self.descriptor, 4096, 0).startswith(b"failed")

    def write(self, state: str) -> None:
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"{state}: process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self.descriptor)


class _Display:
    """How far the cells are: one live line in a terminal, plain lines elsewhere."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = Console(soft_wrap=True, highlight=False, markup=False)
        self.live = (
            Progress(
                TextColumn("runs"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[running]}", markup=False),
                console=self.console,
            )
            if self.console.is_terminal
            else None
        )
        self.task = self.live.add_task("runs", total=total, running="") if self.live else None

    def __enter__(self) -> "_Display":
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def line(self, text: str) -> None:
        if self.live:
            self.console.print(text)
        else:
            print(text, flush=True)

    def update(self, done: int, running: Sequence[str]) -> None:
        if self.live and self.task is not None:
            self.live.update(self.task, completed=done, running=", ".join(running))


@dataclass(frozen=True)
class _Running:
    cell: Cell
    lock: _CellLock
    process: "subprocess.Popen[bytes]"
    log: Path
    started: float


def _start(
    cell: Cell, lock: _CellLock, run_dir: Path, data_dir: Path | None, program: Sequence[str], jobs: int
) -> _Running:
    lock.write("running")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if jobs > 1:  # else every child would start as many threads as there are cores
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    log = run_dir / "log.txt"
    command = cell_command(cell, run_dir, data_dir, program)
    with log.open("ab") as stream:
        stream.write(f"$ {' '.join(command)}\n".encode())
        stream.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(lock.descriptor,),
            start_new_session=True,  # its loader workers end with it, and Ctrl-C reaches it through us only
        )
    return _Running(cell, lock, process, log, time.monotonic())


def _end(running: Sequence[_Running]) -> None:
    """End children and theirs: ask, wait a while, then kill."""
    deadline = time.monotonic() + GRACE_SECONDS
    for number in (signal.SIGTERM, signal.SIGKILL):
        for entry in running:
            if entry.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(entry.process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C: at once
            for entry in running:
                entry.process.wait(max(0.0, deadline - time.monotonic()) if number == signal.SIGTERM else None)
    for entry in running:
        entry.lock.release()


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the children like Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_cells(
    cells: Sequence[Cell],
    runs_dir: Path,
    kept_dir: Path | None,
    data_dir: Path | None = None,
    jobs: int = 1,
    program: Sequence[str] = CELL_PROGRAM,
) -> dict[str, Outcome]:
    """Do every cell that has no record in ``runs_dir`` or ``kept_dir``; outcomes by the cell's name.

    A cell that fails stops no other. A cell that another runner is at is waited for. Ctrl-C ends the children.
    """
    outcomes: dict[str, Outcome] = {}
    waited: set[str] = set()  # seen in another runner's hands
    running: list[_Running] = []
    folders = (runs_dir,) if kept_dir is None else (runs_dir, kept_dir)
    unique = {cell.name: cell for cell in cells}
    pending: deque[Cell] = deque()
    for cell in unique.values():
        outcome = finished_outcome(cell, folders)
        if outcome is None:
            pending.append(cell)
        else:
            outcomes[cell.name] = outcome
    with _Display(len(unique)) as display, _termination_as_interrupt():
        if outcomes:
            display.line(f"{len(outcomes)} of {len(unique)} runs are there already")

        def settle(cell: Cell, outcome: Outcome, seconds: float) -> None:
            outcomes[cell.name] = outcome
            said = "finished" if outcome.run_dir else f"FAILED: {outcome.error}"
            display.line(f"[{len(outcomes)}/{len(unique)}] {cell.name} {said} ({seconds:.0f} s)")

        try:
            while pending or running:
                for entry in [entry for entry in running if entry.process.poll() is not None]:
                    running.remove(entry)
                    outcome = finished_outcome(entry.cell, folders) or Outcome(None, _failure(entry), entry.log)
                    entry.lock.write("finished" if outcome.run_dir else "failed")
                    entry.lock.release()
                    settle(entry.cell, outcome, time.monotonic() - entry.started)
                for _ in range(len(pending)):
                    if len(running) >= jobs:
                        break
                    cell = pending.popleft()
                    run_dir = runs_dir / cell.name
                    lock = _CellLock(run_dir)
                    if not lock.acquire():
                        if cell.name not in waited:
                            display.line(f"{cell.name} is run by another process; waiting for it")
                        waited.add(cell.name)
                        pending.append(cell)
                        continue
                    found = finished_outcome(cell, folders)
                    if found is None and cell.name in waited and lock.failed_before():
                        log = run_dir / "log.txt"
                        found = Outcome(None, _last_line(log) or "failed in another process", log)
                    if found is not None:
                        lock.release()
                        settle(cell, found, 0.0)
                        continue
                    if not cell.name.endswith(_digest(cell.configs, cell.overrides)):
                        lock.release()
                        settle(cell, Outcome(None, "its configs changed while it waited; start the command again"), 0.0)
                        continue
                    display.line(f"{cell.name} started, log in {run_dir / 'log.txt'}")
                    running.append(_start(cell, lock, run_dir, data_dir, program, jobs))
                display.update(len(outcomes), [entry.cell.name for entry in running])
                if pending or running:
                    time.sleep(0.1)
        finally:
            _end(running)
    return outcomes


def _failure(entry: _Running) -> str:
    code = entry.process.returncode
    if code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    line = _last_line(entry.log)
    said = "" if line.startswith("$ ") else line
    return said or (f"exit status {code}" if code else "ended without writing a record")


# --- rendering ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """One reading of one row on one data group: what is printed, over seeds."""

    method: str
    reading: str
    point: str
    values: dict[str, list[float]]  # column label -> one value per finished seed
    floats: list[float]
    megabytes: list[float]
    rounds: list[int]
    seconds: list[float]
    seeds: int
    errors: list[str]


def _read_paper(paths: Sequence[str]) -> "pd.DataFrame":
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
            columns += [Column(label=name, client=name) for name in names]
        else:
            label = column.label or column.client or STATISTIC_LABELS[column.statistic]
            columns.append(Column(label, column.client, column.statistic, column.paper))
    return columns


def _value(column: Column, record: RunRecord, by_client: dict[str, float], table: Table, point: str) -> float:
    if column.client is not None:
        if column.client not in by_client:
            raise ConfigurationError(f"no client {column.client!r}; the run has {', '.join(record.client_names)}")
        value: float | None = by_client[column.client]
    else:
        try:
            value = record.summary[point][table.split][table.metric][table.summary].get(column.statistic)
        except KeyError:
            raise ConfigurationError(f"the run has no {table.metric} on {table.split} at the point '{point}'") from None
    if value is None:
        return math.nan
    return 100 * value if table.metric in PERCENT else value


def _line(
    row: Row, reading: str, point: str, columns: Sequence[Column], outcomes: Sequence[Outcome], table: Table
) -> _Line:
    line = _Line(
        row.label, reading, point, {str(column.label): [] for column in columns}, [], [], [], [], len(outcomes), []
    )
    for outcome in outcomes:
        if outcome.run_dir is None:
            line.errors.append(outcome.error)
            continue
        record = read_record(outcome.run_dir)
        try:
            by_client: dict[str, float] = {}
            if any(column.client is not None for column in columns):
                values = client_values(
                    read_metrics(outcome.run_dir), record, point, table.split, table.metric, table.summary
                )
                by_client = dict(zip(record.client_names, values, strict=True))
            found = [_value(column, record, by_client, table, point) for column in columns]
        except ConfigurationError as error:
            line.errors.append(f"{outcome.run_dir}: {error}")
            continue
        for column, value in zip(columns, found, strict=True):
            line.values[str(column.label)].append(value)
        line.floats.append(record.communication["up_floats"])
        line.megabytes.append((record.communication["up_bytes"] + record.communication["down_bytes"]) / 1e6)
        line.rounds.append(record.rounds_trained)
        line.seconds.append(record.seconds["total"])
    return line


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


def _signed(value: float) -> str:
    return f"{value:+.2f}"


def _floats(value: float) -> str:
    """A number of floats in the papers' manner: 7.68e3."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _published(value: float | None) -> str:
    """A published number: accuracies with two digits, costs in powers of ten."""
    return "" if value is None else _number(value) if value < 1000 else _floats(value)


def _span(values: Sequence[int]) -> str:
    return "" if not values else str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"


@dataclass(frozen=True)
class _Block:
    heading: str
    header: list[str]
    body: list[list[str]]


def _our_block(
    group: DataGroup, columns: Sequence[Column], lines: Sequence[_Line], paper: "pd.DataFrame", digits: int
) -> _Block:
    """A group's table: per method a line of ours and, where the paper has numbers, its line and the difference."""
    labels = [str(column.label) for column in columns]
    compared = any(column.paper for column in columns)
    header = ["Method", *(["Source"] if compared else []), *labels, "Floats up", "MB up + down", "Rounds", "Seconds"]
    body = []
    for line in lines:
        name = f"{line.method}, {line.reading}" if line.reading else line.method
        done = len(line.rounds)
        if done and done < line.seeds:
            name += f" ({done} of {line.seeds} seeds)"
        if done:
            cells = [_with_std(line.values[label], digits) for label in labels]
            tail = [
                _floats(_mean_std(line.floats)[0]),
                _number(_mean_std(line.megabytes)[0], 3),
                _span(line.rounds),
                _number(_mean_std(line.seconds)[0], 0),
            ]
        else:
            cells, tail = ["failed"] * len(labels), [""] * 4
        body.append([name, *(["ours"] if compared else []), *cells, *tail])
        if not compared or line.reading:
            continue
        published = [paper_value(paper, line.method, column.paper) if column.paper else None for column in columns]
        cost = paper_value(paper, line.method, group.cost) if group.cost else None
        if cost is None and all(value is None for value in published):
            continue
        body.append(["", "paper", *map(_published, published), _published(cost), "", "", ""])
        differences = [
            "" if value is None or not line.values[label] else _signed(_mean_std(line.values[label])[0] - value)
            for value, label in zip(published, labels, strict=True)
        ]
        body.append(["", "difference", *differences, "", "", "", ""])
    return _Block(group.label, header, body)


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


def _footnotes(table: Table, preset: Preset, lines: Sequence[_Line], records: Sequence[RunRecord]) -> list[str]:
    unit = ", in per cent" if table.metric in PERCENT else ""
    seeds = f"one seed ({preset.seeds[0]}), hence no standard deviation"
    if len(preset.seeds) > 1:
        seeds = f"mean ± standard deviation over seeds {', '.join(map(str, preset.seeds))}"
    metric = table.metric.replace("_", " ").capitalize()
    notes = [f"{metric} on the {table.split} split{unit}, of {SUMMARY_NOTES[table.summary]}; {seeds}."]
    for point in dict.fromkeys(line.point for line in lines):
        named = dict.fromkeys(
            f"{line.method}, {line.reading}" if line.reading else line.method for line in lines if line.point == point
        )
        notes.append(f"Read at the point '{point}' ({POINT_NOTES[point]}): {'; '.join(named)}.")
    notes.append(
        "Floats up: numbers one participating client sends in a round. MB: 10^6 bytes, both ways, client and round."
    )
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


@dataclass(frozen=True)
class Rendered:
    """A table as Markdown, CSV (long: one line per number) and LaTeX."""

    markdown: str
    csv: str
    latex: str


def render(
    name: str,
    table: Table,
    preset_name: str,
    preset: Preset,
    cells: dict[tuple[str, str, int], Cell],
    outcomes: dict[str, Outcome],
) -> Rendered:
    """The table from its cells (:func:`make_cells`) and their outcomes (:func:`run_cells`).

    Raises:
        ConfigurationError: the paper's CSV cannot be read, or a column names a number that is not unique.
    """
    import pandas as pd
    from tabulate import tabulate

    paper = _read_paper(table.paper)
    demo = preset_name == "demo"
    digits = 2 if table.metric in PERCENT else 4
    blocks: list[_Block] = []
    all_lines: list[_Line] = []
    records: dict[Path, RunRecord] = {}
    failed: dict[str, Outcome] = {}
    long: list[dict[str, Any]] = []
    for group in preset.data:
        by_row = []
        for row in table.rows:
            names = [cells[group.name, row.label, seed].name for seed in preset.seeds]
            by_row.append([outcomes[cell] for cell in names])
            failed |= {cell: outcomes[cell] for cell in names if outcomes[cell].run_dir is None}
        here = {
            outcome.run_dir: read_record(outcome.run_dir) for entry in by_row for outcome in entry if outcome.run_dir
        }
        records |= here
        columns = _expanded(group, list(here.values()))
        lines = [
            _line(row, reading, point, columns, entry, table)
            for row, entry in zip(table.rows, by_row, strict=True)
            for reading, point in {"": row.point, **row.also}.items()
        ]
        all_lines += lines
        blocks.append(_our_block(group, columns, lines, paper, digits))
        for line in lines:
            for column in columns:
                mean, std = _mean_std(line.values[str(column.label)])
                published = None
                if column.paper and not line.reading:
                    published = paper_value(paper, line.method, column.paper)
                long.append(
                    {
                        "table": name,
                        "preset": preset_name,
                        "dataset": group.label,
                        "method": line.method,
                        "reading": line.reading,
                        "point": line.point,
                        "split": table.split,
                        "metric": table.metric,
                        "summary": table.summary,
                        "column": column.label,
                        "ours": mean,
                        "std": std,
                        "seeds": len(line.rounds),
                        "paper": published,
                        "difference": mean - published if published is not None else None,
                        "floats_up": _mean_std(line.floats)[0],
                        "megabytes_up_down": _mean_std(line.megabytes)[0],
                        "rounds": _span(line.rounds),
                        "seconds": _mean_std(line.seconds)[0],
                        "error": " / ".join(dict.fromkeys(line.errors)),
                    }
                )
    notes = _footnotes(table, preset, all_lines, list(records.values()))
    problems = [f"{cell}: {outcome.error}" for cell, outcome in failed.items()]
    problems += [
        error for line in all_lines for error in line.errors if error not in {o.error for o in failed.values()}
    ]
    title = f"Demo: {table.title}" if demo else table.title
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
    return Rendered("\n".join(parts), pd.DataFrame(long).to_csv(index=False), "\n".join(latex))


# --- the whole ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableResult:
    """The files of a table (Markdown, CSV, LaTeX), and the cells that failed, by name."""

    markdown: Path
    csv: Path
    latex: Path
    failed: dict[str, Outcome]


def run_table(
    name: str,
    preset: str = "demo",
    data_dir: str | Path | None = None,
    jobs: int = 1,
    results_dir: str | Path = "results",
    runs_dir: str | Path = "runs",
    seeds: Sequence[int] | None = None,
    kept: bool = False,
    program: Sequence[str] = CELL_PROGRAM,
) -> TableResult:
    """Run a table's missing cells, ``jobs`` at a time, then write ``results_dir/tables/<name>_<preset>.{md,csv,tex}``.

    A cell counts as finished with a record in ``runs_dir``, and with ``kept`` also with a committed one in
    ``results_dir/runs``. ``seeds`` replaces the preset's.

    Raises:
        ConfigurationError: a bad table, a missing config or paper CSV, an unknown preset, no ``data_dir`` where the
            preset needs one, ``jobs`` below 1. All before anything runs.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP, after the children were ended.
    """
    table = load_table(name)
    if preset not in table.presets:
        raise ConfigurationError(f"table {name} has no preset {preset!r}; it has {', '.join(table.presets)}")
    if jobs < 1:
        raise ConfigurationError(f"jobs is {jobs}, expected at least 1")
    chosen = table.presets[preset]
    if seeds is not None:
        if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
            raise ConfigurationError(f"seeds are different integers from 0, got {list(seeds)}")
        chosen = Preset(chosen.data, list(seeds), chosen.base, chosen.overrides, chosen.note)
    _read_paper(table.paper)
    cells = make_cells(table, preset, chosen)
    folder = None if data_dir is None else Path(data_dir).expanduser().absolute()
    if folder is None and any("{data_dir}" in entry for cell in cells.values() for entry in cell.overrides):
        raise ConfigurationError(
            f"the preset {preset} of table {name} reads data sets: give their folder with --data_dir or DATA_DIR"
        )
    if folder is not None and not folder.is_dir():
        raise ConfigurationError(f"data_dir {folder} is not a folder")
    results = Path(results_dir)
    kept_dir = results / "runs" if kept else None
    outcomes = run_cells(list(cells.values()), Path(runs_dir), kept_dir, folder, jobs, program)
    rendered = render(Path(name).stem, table, preset, chosen, cells, outcomes)
    stem = f"{Path(name).stem}_{preset}"
    target = results / "tables"
    target.mkdir(parents=True, exist_ok=True)
    paths = {suffix: target / f"{stem}.{suffix}" for suffix in ("md", "csv", "tex")}
    write_text(paths["md"], rendered.markdown)
    write_text(paths["csv"], rendered.csv)
    write_text(paths["tex"], rendered.latex)
    failed = {cell: outcome for cell, outcome in outcomes.items() if outcome.run_dir is None}
    return TableResult(paths["md"], paths["csv"], paths["tex"], failed)
