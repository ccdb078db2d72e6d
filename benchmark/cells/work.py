"""What the cells of a call share, and what it is to do one of them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmark.cells.identity import Cell
from benchmark.cells.lock import CellLock
from benchmark.cells.outcome import Outcome
from benchmark.records.record_file import is_finished
from benchmark.run.command import PROGRAM


@dataclass(frozen=True)
class Work:
    """What all cells of a call share.

    Attributes:
        runs_dir: where run directories are made.
        kept_dir: a second place where records count as finished; None for none.
        data_dir: put where overrides say ``{data_dir}``.
        program: command in front of ``fit``.
        rerun_changed: do again what other code made; the old run is put into ``runs_dir/.replaced``.
        environment: of the runs; what libraries set here while they are imported later is not theirs.
    """

    runs_dir: Path
    kept_dir: Path | None = None
    data_dir: Path | None = None
    program: tuple[str, ...] = PROGRAM
    rerun_changed: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where a record counts."""
        return (self.runs_dir,) if self.kept_dir is None else (self.runs_dir, self.kept_dir)

    def has(self, cell: Cell) -> bool:
        """Whether a record of the cell counts."""
        return any(is_finished(folder / cell.name) for folder in self.folders)


class Attempt(Protocol):
    """A cell that this runner has started."""

    cell: Cell
    log: Path
    started: float

    def done(self) -> bool: ...

    def busy(self) -> bool:
        """Whether it ended without doing anything, as another runner has the cell."""

    def failure(self) -> str: ...

    def close(self, error: str) -> None:
        """Note how it ended and let go of the cell."""


class Attempts(Protocol):
    """Starts cells at a place, and ends what it started."""

    at_a_time: int

    def start(self, cell: Cell, lock: CellLock) -> Attempt:
        """Start a cell whose lock this runner has; the lock is handed on, or left to the job."""

    def end(self, running: Sequence[Attempt]) -> None:
        """End those that still run."""

    def close(self) -> None:
        """Let go of the place."""


class Place(Protocol):
    """Where cells run: processes of this machine, jobs of Slurm or tasks of Ray."""

    def get_ready(self, work: Work, jobs: int | None) -> None:
        """Begin what will take time before the first cell of ``work`` starts, and do not wait for its end."""

    def open(self, work: Work, jobs: int | None) -> Attempts:
        """Make ready for cells, ``jobs`` at a time or as many as the place takes.

        Raises:
            ConfigurationError: the place is not to be had.
        """


class Course(Protocol):
    """What follows from how cells turn out."""

    @property
    def total(self) -> int:
        """How many cells there will be."""

    def reason_to_end(self, cell: Cell) -> str:
        """Why a running cell is to end now; empty while it is to go on."""

    def after(self, cell: Cell, outcome: Outcome, seconds: float) -> Sequence[Cell]:
        """The cells that come next, now that this one has ended after so many seconds."""
