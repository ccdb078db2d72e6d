"""Runs the cells of tables: several at a time, each exactly once, on this machine or as jobs of a cluster.

A *cell* is one run. Its directory's name ends with a hash of the configs' contents and the overrides, so a finished
cell is never run again. An advisory lock on the directory is held by whoever runs it; so runners that share a folder do
every cell once, also when any of them is killed at any moment.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from benchmark.config_files import read_content, read_layers
from benchmark.errors import ConfigurationError
from benchmark.locks import FileLock
from benchmark.records.results import RunRecord, is_finished, stored_run
from benchmark.records.source_code import changed_files
from benchmark.run.command import PROGRAM
from benchmark.run.run_directory import last_checkpoint
from benchmark.run.signals import termination_as_interrupt

if TYPE_CHECKING:
    from rich.console import Console

#: Cells at a time by default where there is no GPU: each takes one or two gigabytes.
CPU_JOBS = 4
GRACE_SECONDS = 10.0
SHOWN_RUNS = 12
ROUND_LINE = re.compile(r"round (\d+)/(\d+)\s*(.*)")


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


def content_hash(configs: Sequence[str], overrides: Sequence[str]) -> str:
    """Eight digits that stand for what a cell computes: its configs' contents, its overrides and the files they name.

    Raises:
        ConfigurationError: a config file is missing or is no YAML.
    """
    named = [value for _, _, value in (entry.partition("=") for entry in overrides)]
    files = [value for value in named if value.endswith((".yaml", ".yml")) and Path(value).is_file()]
    layers = read_layers([Path(entry) for entry in configs])
    content: list[Any] = [[layer.options for layer in layers], list(overrides)]
    content += [[read_content(Path(entry)) for entry in files]] if files else []
    spelled = json.dumps(content, sort_keys=True, default=str)  # default: YAML knows dates
    return hashlib.sha256(spelled.encode()).hexdigest()[:8]


def cell_command(cell: Cell, run_dir: Path, data_dir: Path | None, program: Sequence[str] = PROGRAM) -> list[str]:
    """The command of a cell; it continues from ``checkpoints/last.ckpt`` where that file is there."""
    command = [*program, "fit"]
    for entry in cell.configs:
        command += ["--config", entry]
    command += ["--run_dir", str(run_dir), "--seed_everything", str(cell.seed)]
    command += [entry.replace("{data_dir}", str(data_dir)) for entry in cell.overrides]
    checkpoint = last_checkpoint(run_dir)
    return [*command, "--ckpt_path", str(checkpoint)] if checkpoint.is_file() else command


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: the directory of its record, or else its error in one line and its log."""

    run_dir: Path | None
    error: str = ""
    log: Path | None = None


def finished_outcome(cell: Cell, folders: Sequence[Path], current: bool = False) -> Outcome | None:
    """The cell's outcome from a record in one of the folders; None where there is no record yet.

    Args:
        cell: whose record.
        folders: searched in this order.
        current: pass over records that other code than the present one made, as far as they name their code.
    """
    for folder in folders:
        run_dir = folder / cell.name
        if not is_finished(run_dir):
            continue
        try:
            run = stored_run(run_dir)
            problems = run.problems
        except ConfigurationError as error:
            return Outcome(None, f"{error}; remove {run_dir} to run it again")
        if not problems and run.record.seed != cell.seed:
            problems = [f"{run_dir} was run with seed {run.record.seed}, expected {cell.seed}"]
        if problems:
            return Outcome(None, f"{problems[0]}; remove {run_dir} to run it again")
        if not (current and run.record.code and changed_files(run.record.code)):
            return Outcome(run_dir)
    return None


def said_of_code(records: Sequence[RunRecord]) -> list[str]:
    """How many of the records were made by other code than the present one, and how many don't know, a line each."""
    changed: dict[str, dict[str, None]] = {}  # files -> methods
    others = 0
    for record in records:
        files = ", ".join(changed_files(record.code or {}))
        others += bool(files)
        if files:
            changed.setdefault(files, {})[record.method] = None
    unknown = sum(record.code is None for record in records)
    lines = []
    if others:
        which = "; ".join(f"{', '.join(methods)}: {files} changed" for files, methods in changed.items())
        lines.append(
            f"{others} of {len(records)} cells were made by other code ({which}); make them again with --rerun-changed"
        )
    if unknown:
        lines.append(f"{unknown} of {len(records)} cells do not know the code that made them: their records are older")
    return lines


def _set_aside(run_dir: Path) -> None:
    """Put a run that is to be made again into a folder of its own; the lock stays, others may wait for it."""
    aside = run_dir.parent / ".replaced" / f"{run_dir.name}-{time.time_ns()}"
    aside.mkdir(parents=True)
    for entry in sorted(run_dir.iterdir(), key=lambda path: path.name != "record.json"):  # no record without its files
        if entry.name != "lock":
            entry.rename(aside / entry.name)


def _tail(log: Path) -> list[str]:
    """The last lines of a log that say something, without colours."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - 16_384))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def _last_line(log: Path) -> str:
    """The last line of a log that says something, at most 300 characters."""
    lines = _tail(log)
    return lines[-1][:300] if lines else ""


class _CellLock(FileLock):
    """A lock on a run directory, held by the runner *and* by the cell's process.

    A killed runner blocks nobody, and while its cell still goes on, no other runner starts that cell a second time. The
    file says who has it, and whether the last attempt failed; it is never deleted (deleting would let two runners hold
    two files of one name).
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir / "lock")

    def failure(self) -> str | None:
        """The error of the last attempt; None if it did not fail."""
        state, _, rest = self.read().partition(":")
        return rest.partition("\n")[2].strip() if state == "failed" else None


# --- the display ----------------------------------------------------------------------------------------------------


class _Display:
    """How far everything is: in a terminal one live block, a line for all and one per run; plain lines elsewhere."""

    def __init__(self, total: int, console: "Console | None" = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = console or Console(soft_wrap=True, highlight=False, markup=False)
        self.live = (
            Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[said]}", markup=False),
                console=self.console,
            )
            if self.console.is_terminal
            else None
        )
        self.total = total
        self.task = self.live.add_task("runs", total=total, said="") if self.live else None
        self.bars: dict[str, Any] = {}

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

    def update(self, done: int, failed: int, running: dict[str, Path]) -> None:
        """Show how many are done, and of each running cell the last round that its log names."""
        if self.live is None or self.task is None:
            return
        hidden = len(running) - SHOWN_RUNS
        said = [f"{failed} failed"] if failed else []
        said += [f"{len(running)} at work, {hidden} of them not shown"] if hidden > 0 else []
        self.live.update(self.task, completed=done, said=", ".join(said))
        for name in set(self.bars) - set(running):
            self.live.remove_task(self.bars.pop(name))
        for name, log in running.items():
            if name not in self.bars:
                if len(self.bars) == SHOWN_RUNS:
                    continue
                self.bars[name] = self.live.add_task(f"  {name}", total=None, said="starting")
            rounds = next((found for line in reversed(_tail(log)) if (found := ROUND_LINE.match(line))), None)
            if rounds:
                reached, total, text = rounds.groups()
                self.live.update(self.bars[name], completed=int(reached), total=int(total), said=text)


# --- where cells run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """How cells run as jobs, one a job, through submitit.

    Attributes:
        partition: of Slurm; None is the cluster's default.
        minutes: time limit of a job; a run that reaches it fails, and continues when the table is started again.
        gpus: of a job.
        cpus: of a job.
        kind: ``"slurm"``; ``"local"`` runs the same jobs as processes of this machine, ``"debug"`` in this process.
    """

    partition: str | None = None
    minutes: int = 24 * 60
    gpus: int = 1
    cpus: int = 8
    kind: str = "slurm"


@dataclass(frozen=True)
class Work:
    """What all cells of a call share.

    Attributes:
        runs_dir: where run directories are made.
        kept_dir: a second place where records count as finished; None for none.
        data_dir: put where overrides say ``{data_dir}``.
        program: command in front of ``fit``.
        rerun_changed: do again what other code made; the old run is put into ``runs_dir/.replaced``.
    """

    runs_dir: Path
    kept_dir: Path | None = None
    data_dir: Path | None = None
    program: tuple[str, ...] = PROGRAM
    rerun_changed: bool = False

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where a record counts."""
        return (self.runs_dir,) if self.kept_dir is None else (self.runs_dir, self.kept_dir)


def visible_gpus() -> list[str]:
    """Ids of the GPUs that runs may use: those of ``CUDA_VISIBLE_DEVICES``, else all; none without ``nvidia-smi``."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [entry.strip() for entry in chosen.split(",") if entry.strip() not in ("", "-1")]
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return listing.split()


class _Attempt(Protocol):
    """A cell that somebody of ours is at."""

    cell: Cell
    log: Path
    started: float

    def done(self) -> bool: ...

    def busy(self) -> bool:
        """Whether it ended without doing anything, as another runner has the cell."""

    def failure(self) -> str: ...

    def close(self, error: str) -> None:
        """Note how it ended and let go of the cell."""


@dataclass
class _Process:
    """A cell as a process of this machine; the lock is ours and the process's."""

    cell: Cell
    log: Path
    lock: _CellLock
    process: "subprocess.Popen[bytes]"
    gpu: str | None
    started: float = field(default_factory=time.monotonic)

    def done(self) -> bool:
        return self.process.poll() is not None

    def busy(self) -> bool:
        return False

    def failure(self) -> str:
        code = self.process.returncode
        if code < 0:
            return f"killed by signal {-code} ({signal.Signals(-code).name})"
        line = _last_line(self.log)
        said = "" if line.startswith("$ ") else line
        return said or (f"exit status {code}" if code else "ended without writing a record")

    def close(self, error: str) -> None:
        self.lock.write("failed" if error else "finished", error)
        self.lock.release()


def _start(cell: Cell, lock: _CellLock, work: Work, threads: int | None, gpu: str | None) -> _Process:
    run_dir = work.runs_dir / cell.name
    if is_finished(run_dir):  # but by other code, else nobody would start it
        _set_aside(run_dir)
    lock.write("running")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if threads is not None:  # else every child would start as many threads as there are cores
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    log = run_dir / "log.txt"
    command = cell_command(cell, run_dir, work.data_dir, work.program)
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
    return _Process(cell, log, lock, process, gpu)


def _end(running: Sequence[_Process]) -> None:
    """End children and theirs: ask, wait a while, then kill."""
    deadline = time.monotonic() + GRACE_SECONDS
    for number in (signal.SIGTERM, signal.SIGKILL):
        for entry in running:
            if not entry.done():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(entry.process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C: at once
            for entry in running:
                entry.process.wait(max(0.0, deadline - time.monotonic()) if number == signal.SIGTERM else None)
    for entry in running:
        entry.lock.release()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _ThisMachine:
    """Cells as processes; each gets the GPU that has the fewest of them."""

    def __init__(self, work: Work, jobs: int) -> None:
        self.work = work
        self.threads = max(1, _cores() // jobs) if jobs > 1 else None
        self.gpus = visible_gpus()
        self.running: list[_Process] = []

    def start(self, cell: Cell, lock: _CellLock) -> _Process:
        self.running = [entry for entry in self.running if not entry.done()]
        load = Counter(dict.fromkeys(self.gpus, 0))
        load.update(entry.gpu for entry in self.running if entry.gpu is not None)
        gpu = min(self.gpus, key=lambda name: load[name]) if self.gpus else None
        entry = _start(cell, lock, self.work, self.threads, gpu)
        self.running.append(entry)
        return entry

    def end(self, running: "Sequence[_Attempt]") -> None:
        _end([entry for entry in running if isinstance(entry, _Process)])


def run_as_job(cell: Cell, work: Work) -> str:
    """Do one cell in this process's child; how it ended: ``""`` well, ``"busy"`` in other hands, else its error.

    This is what a job of a cluster does. Whoever takes the lock first does the cell; a second job for it ends at once.
    """
    lock = _CellLock(work.runs_dir / cell.name)
    if not lock.acquire():
        return "busy"
    if finished_outcome(cell, work.folders, work.rerun_changed):
        lock.release()
        return ""
    entry = _start(cell, lock, work, None, None)
    try:
        entry.process.wait()
    except BaseException:
        _end([entry])
        raise
    error = "" if is_finished(work.runs_dir / cell.name) else entry.failure()
    entry.close(error)
    return error


@dataclass
class _Job:
    """A cell as a job of a cluster; the job takes the lock where and when it runs."""

    cell: Cell
    log: Path
    job: Any
    started: float = field(default_factory=time.monotonic)

    def done(self) -> bool:
        return bool(self.job.done())

    def _said(self) -> str:
        try:
            return str(self.job.result())
        except Exception as error:  # submitit's own, an operating system's, or what the job raised
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"job {self.job.job_id}: {lines[-1][:300] if lines else type(error).__name__}"

    def busy(self) -> bool:
        return self._said() == "busy"

    def failure(self) -> str:
        return self._said() or "ended without writing a record"

    def close(self, error: str) -> None:
        """The job has noted it."""


class _Jobs:
    """Cells as jobs of a cluster."""

    def __init__(self, work: Work, cluster: Cluster) -> None:
        try:
            import submitit
        except ImportError as error:
            raise ConfigurationError(
                "running on a cluster needs submitit: pip install 'federated-prompt-benchmark[slurm]'"
            ) from error
        folder = (work.runs_dir / ".jobs").absolute()
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster.kind)
        except RuntimeError as error:
            raise ConfigurationError(f"no {cluster.kind} here ({error}); start this where sbatch works") from error
        parameters: dict[str, Any] = {
            "name": "federated",
            "timeout_min": cluster.minutes,
            "gpus_per_node": cluster.gpus,
            "cpus_per_task": cluster.cpus,
        }
        if cluster.partition is not None:
            parameters["slurm_partition"] = cluster.partition
        self.executor.update_parameters(**parameters)
        self.work = work

    def start(self, cell: Cell, lock: _CellLock) -> _Job:
        lock.release()
        job = self.executor.submit(run_as_job, cell, self.work)
        return _Job(cell, self.work.runs_dir / cell.name / "log.txt", job)

    def end(self, running: "Sequence[_Attempt]") -> None:
        for entry in running:
            if isinstance(entry, _Job) and not entry.done():
                entry.job.cancel()


# --- all cells ------------------------------------------------------------------------------------------------------


def run_cells(
    cells: Sequence[Cell], work: Work, jobs: int | None = None, cluster: Cluster | None = None
) -> dict[str, Outcome]:
    """Do every cell that has no record yet; outcomes by the cell's name.

    A cell that fails stops no other. A cell that another runner is at is waited for. Ctrl-C ends the children (on a
    cluster: cancels the jobs). On this machine each cell gets the GPU with the fewest cells.

    Args:
        cells: what is to be done; equal names are done once.
        work: folders and command.
        jobs: cells at a time; by default one for each GPU, without GPUs one for each core but at most ``CPU_JOBS``, and
            on a cluster all.
        cluster: run as its jobs; by default on this machine.

    Raises:
        ConfigurationError: a cluster was asked for and submitit or Slurm is missing.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP.
    """
    outcomes: dict[str, Outcome] = {}
    waited: set[str] = set()  # seen in another runner's hands
    running: list[_Attempt] = []
    unique = {cell.name: cell for cell in cells}
    at_a_time = jobs or (len(visible_gpus()) or min(_cores(), CPU_JOBS) if cluster is None else len(unique))
    place: _ThisMachine | _Jobs = _ThisMachine(work, at_a_time) if cluster is None else _Jobs(work, cluster)
    pending: deque[Cell] = deque()
    for cell in unique.values():
        outcome = finished_outcome(cell, work.folders, work.rerun_changed)
        if outcome is None:
            pending.append(cell)
        else:
            outcomes[cell.name] = outcome
    with _Display(len(unique)) as display, termination_as_interrupt():
        if outcomes:
            display.line(f"{len(outcomes)} of {len(unique)} runs are there already")
        kept = [stored_run(outcome.run_dir).record for outcome in outcomes.values() if outcome.run_dir is not None]
        for line in said_of_code(kept):
            display.line(line)

        def settle(cell: Cell, outcome: Outcome, seconds: float) -> None:
            outcomes[cell.name] = outcome
            said = "finished" if outcome.run_dir else f"FAILED: {outcome.error}"
            display.line(f"[{len(outcomes)}/{len(unique)}] {cell.name} {said} ({seconds:.0f} s)")

        def wait_for(cell: Cell) -> None:
            if cell.name not in waited:
                display.line(f"{cell.name} is run by another process; waiting for it")
            waited.add(cell.name)
            pending.append(cell)

        try:
            while pending or running:
                for entry in [entry for entry in running if entry.done()]:
                    running.remove(entry)
                    if entry.busy():
                        wait_for(entry.cell)
                        continue
                    outcome = finished_outcome(entry.cell, work.folders)
                    outcome = outcome or Outcome(None, entry.failure(), entry.log)
                    entry.close(outcome.error)
                    settle(entry.cell, outcome, time.monotonic() - entry.started)
                for _ in range(len(pending)):
                    if len(running) >= at_a_time:
                        break
                    cell = pending.popleft()
                    run_dir = work.runs_dir / cell.name
                    lock = _CellLock(run_dir)
                    if not lock.acquire():
                        wait_for(cell)
                        continue
                    failed_before = lock.failure()
                    found = finished_outcome(cell, work.folders, work.rerun_changed)
                    if found is None and cell.name in waited and failed_before is not None:
                        found = Outcome(None, failed_before or "failed in another process", run_dir / "log.txt")
                    if found is None and not cell.name.endswith(content_hash(cell.configs, cell.overrides)):
                        found = Outcome(None, "its configs changed while it waited; start the command again")
                    if found is not None:
                        lock.release()
                        settle(cell, found, 0.0)
                        continue
                    said = f"{cell.name} started, log in {run_dir / 'log.txt'}"
                    if is_finished(run_dir):
                        said += "; made by other code before"
                    elif last_checkpoint(run_dir).is_file():
                        said += "; continues from its last checkpoint"
                    if failed_before is not None:
                        said += f"; failed the last time: {failed_before}"
                    display.line(said)
                    running.append(place.start(cell, lock))
                failed = sum(outcome.run_dir is None for outcome in outcomes.values())
                display.update(len(outcomes), failed, {entry.cell.name: entry.log for entry in running})
                if pending or running:
                    time.sleep(0.1)
        finally:
            place.end(running)
    return outcomes
