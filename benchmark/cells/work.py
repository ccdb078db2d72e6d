"""The settings that the cells of a call share, and the interfaces of places that run cells."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmark.cells.identity import Cell
from benchmark.cells.lock import CellLock
from benchmark.cells.outcome import Outcome
from benchmark.config.overview import PROGRAM
from benchmark.records.record_file import is_finished


@dataclass(frozen=True)
class Work:
    """The settings that all cells of a call share.

    Attributes:
        runs_dir: folder in which run directories are made.
        kept_dir: second folder whose records count as finished; None for none.
        data_dir: folder that replaces ``{data_dir}`` in overrides.
        program: command in front of ``fit``.
        rerun_changed: repeat runs that other code made; the old run is moved into ``runs_dir/.replaced``.
        environment: environment variables of the runs; those that libraries set in this process later are left out.
    """

    runs_dir: Path
    kept_dir: Path | None = None
    data_dir: Path | None = None
    program: tuple[str, ...] = PROGRAM
    rerun_changed: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders whose records count as finished."""
        return (self.runs_dir,) if self.kept_dir is None else (self.runs_dir, self.kept_dir)

    def has(self, cell: Cell) -> bool:
        """Return whether one of the folders has a record of the cell."""
        return any(is_finished(folder / cell.name) for folder in self.folders)


class Attempt(Protocol):
    """A cell that this runner has started."""

    cell: Cell
    log: Path
    started: float

    def done(self) -> bool: ...

    def busy(self) -> bool:
        """Return whether the attempt ended without a run, as another runner has the cell."""

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
    """A place to run cells: processes of this machine, jobs of Slurm or tasks of Ray."""

    def get_ready(self, work: Work, jobs: int | None) -> None:
        """Begin what will take time before the first cell of ``work`` starts, and do not wait for its end."""

    def open(self, work: Work, jobs: int | None) -> Attempts:
        """Make ready for cells, ``jobs`` at a time or as many as the place takes.

        Raises:
            ConfigurationError: the place is not to be had.
        """


class Course(Protocol):
    """The plan of a call: decides from the outcomes of cells which ones end early and which ones come next."""

    @property
    def total(self) -> int:
        """The number of cells in all."""

    def reason_to_end(self, cell: Cell) -> str:
        """Return the reason to end a running cell now; empty to let it go on."""

    def after(self, cell: Cell, outcome: Outcome, seconds: float) -> Sequence[Cell]:
        """Return the cells to run next, given a cell's outcome and its duration in seconds."""
