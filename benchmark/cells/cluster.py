"""Cells as jobs of a cluster."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark.cells.identity import Cell
from benchmark.cells.lock import CellLock
from benchmark.cells.outcome import finished_outcome
from benchmark.cells.this_machine import end_all, start
from benchmark.cells.work import Attempt, Work
from benchmark.errors import ConfigurationError
from benchmark.records.record_file import is_finished


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


def run_as_job(cell: Cell, work: Work) -> str:
    """Do one cell in this process's child; how it ended: ``""`` well, ``"busy"`` in other hands, else its error.

    This is what a job of a cluster does. Whoever takes the lock first does the cell; a second job for it ends at once.
    """
    lock = CellLock(work.runs_dir / cell.name)
    if not lock.acquire():
        return "busy"
    if finished_outcome(cell, work.folders, work.rerun_changed):
        lock.release()
        return ""
    entry = start(cell, lock, work, None, None)
    try:
        entry.process.wait()
    except BaseException:
        end_all([entry])
        raise
    error = "" if is_finished(work.runs_dir / cell.name) else entry.failure()
    entry.close(error)
    return error


@dataclass
class Job:
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


class Jobs:
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

    def start(self, cell: Cell, lock: CellLock) -> Job:
        lock.release()
        job = self.executor.submit(run_as_job, cell, self.work)
        return Job(cell, self.work.runs_dir / cell.name / "log.txt", job)

    def end(self, running: "Sequence[Attempt]") -> None:
        for entry in running:
            if isinstance(entry, Job) and not entry.done():
                entry.job.cancel()
