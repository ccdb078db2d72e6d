"""A cell that runs somewhere else, as a job of Slurm or a task of Ray: what the job does, and what its runner sees."""

import contextlib
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmark.cells.identity import Cell
from benchmark.cells.lock import CellLock
from benchmark.cells.outcome import finished_outcome
from benchmark.cells.this_machine import end_all, start
from benchmark.cells.work import Work
from benchmark.records.record_file import is_finished

BUSY = "busy"
#: Seconds between two looks at the run. A job that waited for its end would not hear that it is cancelled.
PAUSE = 0.1
#: Seconds until what another machine has written in a shared folder is seen here: NFS's by default.
SEEN_SECONDS = 60.0


def for_another_machine(work: Work) -> Work:
    """Return what a job is sent, without the environment here, which would lie in a file with all its secrets."""
    return replace(work, environment={})


def run_as_job(cell: Cell, work: Work) -> str:
    """Do one cell in this process's child; how it ended: ``""`` well, ``"busy"`` in other hands, else its error.

    Whoever takes the lock first does the cell; a second job for it ends at once. The run ends with this process.
    """
    lock = CellLock(work.runs_dir / cell.name)
    if not lock.acquire():
        return BUSY
    with lock.released_on_error():  # a worker of Ray lives on, and the lock would with it
        if finished_outcome(cell, work.folders, work.rerun_changed):
            lock.release()
            return ""
        # The environment is the job's: its GPUs and CPUs are the run's.
        entry = start(cell, lock, replace(work, environment=dict(os.environ)), None, None, ends_with_us=True)
    try:
        while not entry.done():
            time.sleep(PAUSE)
    except BaseException:
        end_all([entry])
        raise
    error = "" if is_finished(work.runs_dir / cell.name) else entry.failure()
    entry.close(error)
    return error


@dataclass
class Job(ABC):
    """A cell as a job; the job takes the lock where and when it runs."""

    cell: Cell
    log: Path
    started: float = field(default_factory=time.monotonic, kw_only=True)
    over_since: float | None = field(default=None, kw_only=True)

    @abstractmethod
    def over(self) -> bool:
        """Return whether the job has ended."""

    def done(self) -> bool:
        """Return whether the job has ended and its record is visible here.

        A job that failed has no record to wait for. Waiting for a record stops after :data:`SEEN_SECONDS`.
        """
        if not self.over():
            return False
        self.over_since = self.over_since or time.monotonic()
        with contextlib.suppress(OSError):
            os.listdir(self.log.parent)  # has NFS look again
        late = time.monotonic() - self.over_since > SEEN_SECONDS
        return late or self.said() != "" or is_finished(self.log.parent)

    @abstractmethod
    def said(self) -> str:
        """Return the result of :func:`run_as_job`, or the job's own error if it ended without one."""

    def busy(self) -> bool:
        return self.said() == BUSY

    def failure(self) -> str:
        return self.said() or f"ended without a record in {self.log.parent}; all machines have to share this folder"

    def close(self, error: str) -> None:  # noqa: B027
        """The job has noted it."""
