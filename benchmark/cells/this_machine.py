"""Cells as processes of this machine."""

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.cells.forks import Fork, can_fork, start_imports
from benchmark.cells.identity import Cell, cell_command
from benchmark.cells.lock import CellLock
from benchmark.cells.log import last_line
from benchmark.cells.work import Attempt, Work
from benchmark.errors import ConfigurationError
from benchmark.files import refuse_link
from benchmark.records.record_file import is_finished
from benchmark.records.source_code import changed_files
from benchmark.signals import end_with_parent

#: Cells at a time by default where there is no GPU: each takes one or two gigabytes.
CPU_JOBS = 4
GRACE_SECONDS = 10.0


def default_jobs() -> int:
    """Cells at a time: one for each GPU, without GPUs one for each core but at most :data:`CPU_JOBS`."""
    return len(visible_gpus()) or min(cores(), CPU_JOBS)


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


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Process:
    """A cell as a process of this machine; the lock is ours and the process's."""

    cell: Cell
    log: Path
    lock: CellLock
    process: "subprocess.Popen[bytes] | Fork"
    gpu: str | None
    started: float = field(default_factory=time.monotonic)

    def done(self) -> bool:
        return self.process.poll() is not None

    def busy(self) -> bool:
        return False

    def failure(self) -> str:
        code = self.process.returncode
        if code is not None and code < 0:
            names = {int(known): known.name for known in signal.Signals}
            return f"killed by signal {-code} ({names.get(-code, signal.strsignal(-code))})"
        line = last_line(self.log)
        said = "" if line.startswith("$ ") else line
        return said or (f"exit status {code}" if code else "ended without writing a record")

    def close(self, error: str) -> None:
        with contextlib.suppress(ConfigurationError):  # it says so to people alone
            self.lock.write("failed" if error else "finished", error)
        self.lock.release()


def start(
    cell: Cell,
    lock: CellLock,
    work: Work,
    threads: int | None,
    gpu: str | None,
    ends_with_us: bool = False,
    forked: bool = False,
) -> Process:
    """Start a cell as a process that shares our lock.

    Args:
        cell: to be done.
        lock: taken.
        work: what all cells share.
        threads: of the run, unless the environment says; None leaves it alone.
        gpu: the only one that the run sees; None leaves it alone.
        ends_with_us: on Linux the run is asked to end when we are killed. A job's GPU is another's then, while a runner
            of this machine leaves its runs to come to their end.
        forked: as a :class:`Fork` where one can be had.
    """
    run_dir = work.runs_dir / cell.name
    # A finished run is of other code, else nobody would start it.
    if is_finished(run_dir) or (work.rerun_changed and _begun_by_other_code(run_dir)):
        _set_aside(run_dir)
    lock.write("running")
    environment = _environment(work, threads, gpu)
    log = run_dir / "log.txt"
    command = cell_command(cell, run_dir, work.data_dir, work.program)
    process: subprocess.Popen[bytes] | Fork | None = None
    with log.open("ab") as stream:
        stream.write(f"$ {' '.join(command)}\n".encode())
        stream.flush()
        if forked:
            with contextlib.suppress(OSError):  # else as a process of its own, which says what is wrong
                process = Fork(command, stream, lock, environment)
        if process is None:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(lock.descriptor,),
                preexec_fn=end_with_parent if ends_with_us else None,
                start_new_session=True,  # its loader workers end with it, and Ctrl-C reaches it through us only
            )
    return Process(cell, log, lock, process, gpu)


def _environment(work: Work, threads: int | None, gpu: str | None) -> dict[str, str]:
    """Return the environment of a run."""
    environment = {**work.environment, "PYTHONUNBUFFERED": "1"}
    if threads is not None:  # else every child would start as many threads as there are cores
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    return environment


def end_all(running: Sequence[Process]) -> None:
    """End children and theirs: ask, wait a while, then kill.

    Raises:
        KeyboardInterrupt: it came meanwhile, and let them be killed at once.
    """
    interrupt: KeyboardInterrupt | None = None
    deadline = time.monotonic() + GRACE_SECONDS
    for number in (signal.SIGTERM, signal.SIGKILL):
        for entry in running:
            if not entry.done():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(entry.process.pid, number)
        try:
            for entry in running:
                entry.process.wait(max(0.0, deadline - time.monotonic()) if number == signal.SIGTERM else None)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt as error:
            interrupt = error
    for entry in running:
        entry.lock.release()
    if interrupt is not None:
        raise interrupt


def _begun_by_other_code(run_dir: Path) -> bool:
    last = run_dir / "checkpoints" / "last.ckpt"
    if not last.is_file():
        return False
    from benchmark.run.checkpoint import code_so_far  # and torch with it, which a runner can mostly do without

    return bool(changed_files(code_so_far(last)))


def _set_aside(run_dir: Path) -> None:
    """Put a run that is to be made again into a folder of its own; the lock stays, others may wait for it."""
    aside = run_dir.parent / ".replaced" / f"{run_dir.name}-{time.time_ns()}"
    refuse_link(aside.parent)
    aside.mkdir(parents=True)
    # Killed in between, it is a finished run without checkpoints, or nothing: never one that would go on by other code.
    order = {"checkpoints": 0, "record.json": 1}
    for entry in sorted(run_dir.iterdir(), key=lambda path: order.get(path.name, 2)):
        if entry.name != "lock":
            entry.rename(aside / entry.name)


@dataclass(frozen=True)
class ThisMachine:
    """Cells run as processes of this machine."""

    def get_ready(self, work: Work, jobs: int | None) -> None:
        """Start to import what forks have in common; else the first fork would."""
        processes = self.open(work, jobs)
        if processes.forked:
            with contextlib.suppress(OSError):
                start_imports(_environment(work, processes.threads, None))

    def open(self, work: Work, jobs: int | None) -> "Processes":
        """Look for GPUs; by default a cell for each, without GPUs one for each core but at most ``CPU_JOBS``."""
        return Processes(work, jobs or default_jobs())


THIS_MACHINE = ThisMachine()


class Processes:
    """Starts cells as processes; each gets the GPU that has the fewest of them."""

    def __init__(self, work: Work, at_a_time: int) -> None:
        self.work = work
        self.at_a_time = at_a_time
        self.threads = max(1, cores() // at_a_time) if at_a_time > 1 else None
        self.gpus = visible_gpus()
        self.forked = not self.gpus and can_fork(work.program)
        self.running: list[Process] = []

    def start(self, cell: Cell, lock: CellLock) -> Process:
        self.running = [entry for entry in self.running if not entry.done()]
        load = Counter(dict.fromkeys(self.gpus, 0))
        load.update(entry.gpu for entry in self.running if entry.gpu is not None)
        gpu = min(self.gpus, key=lambda name: load[name]) if self.gpus else None
        with lock.released_on_error():
            entry = start(cell, lock, self.work, self.threads, gpu, forked=self.forked)
        self.running.append(entry)
        return entry

    def end(self, running: Sequence[Attempt]) -> None:
        end_all([entry for entry in running if isinstance(entry, Process)])

    def close(self) -> None:
        """Close nothing."""
