"""Cells as jobs of Slurm, through submitit."""

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.cells.identity import Cell
from benchmark.cells.job import PAUSE, Job, for_another_machine, run_as_job
from benchmark.cells.lock import CellLock
from benchmark.cells.this_machine import GRACE_SECONDS
from benchmark.cells.work import Attempt, Work
from benchmark.errors import ConfigurationError


@dataclass(frozen=True)
class Slurm:
    """Cells run as jobs of Slurm, one a job.

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

    def get_ready(self, work: Work, jobs: int | None) -> None:
        """Begin nothing."""

    def open(self, work: Work, jobs: int | None) -> "SlurmJobs":
        """Find Slurm; by default all cells are jobs at a time.

        Raises:
            ConfigurationError: submitit or Slurm is missing.
        """
        try:
            import submitit
        except ImportError as error:
            raise ConfigurationError(
                "running on Slurm needs submitit: pip install 'federated-prompt-benchmark[slurm]'"
            ) from error
        folder = (work.runs_dir / ".jobs").absolute()
        try:
            executor = submitit.AutoExecutor(folder=folder, cluster=self.kind)
        except RuntimeError as error:
            raise ConfigurationError(f"no {self.kind} here ({error}); start this where sbatch works") from error
        parameters: dict[str, Any] = {
            "name": "federated",
            "timeout_min": self.minutes,
            "gpus_per_node": self.gpus,
            "cpus_per_task": self.cpus,
        }
        if self.partition is not None:
            parameters["slurm_partition"] = self.partition
        executor.update_parameters(**parameters)
        return SlurmJobs(work, jobs or sys.maxsize, executor)


@dataclass
class SlurmJob(Job):
    """A cell as a job of Slurm."""

    job: Any

    def over(self) -> bool:
        return bool(self.job.done())

    def said(self) -> str:
        try:
            return str(self.job.result())
        except Exception as error:  # submitit's own, an operating system's, or what the job raised
            return f"job {self.job.job_id}: {_last_line(error)}"


@dataclass
class SlurmJobs:
    """Starts cells as jobs of Slurm, by an executor of submitit."""

    work: Work
    at_a_time: int
    executor: Any

    def start(self, cell: Cell, lock: CellLock) -> SlurmJob:
        lock.release()
        try:
            job = self.executor.submit(run_as_job, cell, for_another_machine(self.work))
        except Exception as error:  # sbatch refuses it, or does not answer; submitit says so in several ways
            raise ConfigurationError(
                f"Slurm does not take the job: {_last_line(error)}; if it limits jobs, give fewer at a time (--jobs)"
            ) from error
        return SlurmJob(cell, self.work.runs_dir / cell.name / "log.txt", job)

    def end(self, running: Sequence[Attempt]) -> None:
        """Cancel jobs, and wait a while for their runs to end; one that Slurm does not cancel keeps no other."""
        jobs = [entry for entry in running if isinstance(entry, SlurmJob) and not entry.over()]
        for entry in jobs:
            with contextlib.suppress(Exception):  # it may end this very moment, or Slurm not answer
                entry.job.cancel(check=False)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and not all(entry.over() for entry in jobs):
            time.sleep(PAUSE)

    def close(self) -> None:
        """Close nothing."""


def _last_line(error: Exception) -> str:
    """Return the last line of an error, as that of a job's output names what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
