"""Runs the cells of tables: several at a time, each exactly once, on this machine, on Slurm or on Ray.

A *cell* is one run. Its directory's name ends with a hash of the options that it is given, so a finished cell is never
run again. The runner of a cell holds an advisory lock on the directory; so runners that share a folder do
every cell once, also when any of them is killed at any moment.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing

from benchmark.cells.display import RunsDisplay
from benchmark.cells.identity import Cell, content_hash
from benchmark.cells.lock import CellLock
from benchmark.cells.outcome import Outcome, finished_outcome, said_of_code
from benchmark.cells.this_machine import THIS_MACHINE
from benchmark.cells.work import Attempt, Attempts, Course, Place, Work
from benchmark.errors import ConfigurationError
from benchmark.files import check_no_links, refuse_link
from benchmark.records.record_file import is_finished
from benchmark.records.stored_run import stored_run
from benchmark.run.run_directory import last_checkpoint
from benchmark.signals import termination_as_interrupt


def check_jobs(jobs: int | None) -> None:
    """Refuse a number of runs at a time with which none would ever start."""
    if jobs is not None and jobs < 1:
        raise ConfigurationError(f"jobs is {jobs}, expected at least 1")


def run_cells(
    cells: Sequence[Cell],
    work: Work,
    jobs: int | None = None,
    place: Place = THIS_MACHINE,
    course: Course | None = None,
) -> dict[str, Outcome]:
    """Do every cell that has no record yet; outcomes by the cell's name.

    A cell that fails stops no other. A cell that another runner is at is waited for. Ctrl-C ends the runs, at
    whichever place. On this machine each cell gets the GPU with the fewest cells.

    Args:
        cells: what is to be done; equal names are done once.
        work: folders and command.
        jobs: cells at a time; by default as many as the place takes.
        place: where they run; by default this machine.
        course: says which cells there are after these, and which end early; by default none.

    Raises:
        ConfigurationError: the place is not to be had, or ``jobs`` is below 1.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP.
    """
    check_jobs(jobs)
    queue = _Queue({cell.name: cell for cell in cells}, work, course)
    with closing(place.open(work, jobs)) as attempts, RunsDisplay(queue.total) as display, termination_as_interrupt():
        queue.say_what_is_there(display)
        try:
            while queue.pending or queue.running:
                queue.end_early(attempts, display)
                queue.collect(display)
                queue.start(attempts, display)
                queue.show(display)
                if queue.pending or queue.running:
                    time.sleep(0.1)
        finally:
            attempts.end(queue.running)
    return queue.outcomes


class _Queue:
    """The cells of a call, each in one place: ``pending``, ``running``, or among the ``outcomes``.

    Args:
        cells: by name.
        work: folders and command.
        course: says which cells there are after these.
    """

    def __init__(self, cells: Mapping[str, Cell], work: Work, course: Course | None) -> None:
        self.work, self.course = work, course
        self.total = len(cells) if course is None else course.total
        self.outcomes: dict[str, Outcome] = {}
        self.pending: deque[Cell] = deque()
        self.running: list[Attempt] = []
        self._waited: set[str] = set()  # seen in another runner's hands
        #: where a run that was started here leaves its record; a kept one is of no attempt
        self._made = (work.runs_dir,) if work.rerun_changed else work.folders
        self._take(cells.values())

    # ------------------------------------------------------------------ one turn

    def end_early(self, attempts: Attempts, display: RunsDisplay) -> None:
        """End the running cells that the course has given up."""
        for entry in [entry for entry in self.running if not entry.done()]:
            if self.course and (reason := self.course.reason_to_end(entry.cell)):
                try:
                    attempts.end([entry])
                finally:
                    self.running.remove(entry)
                ended = finished_outcome(entry.cell, self._made) or Outcome(None, reason, entry.log, True)
                self._settle(entry.cell, ended, display, entry.started)

    def collect(self, display: RunsDisplay) -> None:
        """Settle the cells whose attempt has ended; wait for those that another runner turned out to have."""
        for entry in [entry for entry in self.running if entry.done()]:
            self.running.remove(entry)
            if entry.busy():
                self._wait_for(entry.cell, display)
                continue
            outcome = finished_outcome(entry.cell, self._made) or Outcome(None, entry.failure(), entry.log)
            entry.close(outcome.error)
            self._settle(entry.cell, outcome, display, entry.started)

    def start(self, attempts: Attempts, display: RunsDisplay) -> None:
        """Start as many pending cells as the place takes, each pending one at most once."""
        for _ in range(len(self.pending)):
            if len(self.running) >= attempts.at_a_time:
                break
            self._start(self.pending.popleft(), attempts, display)

    def show(self, display: RunsDisplay) -> None:
        """Show how many have ended and failed, and which run."""
        failed = sum(outcome.run_dir is None and not outcome.ended_early for outcome in self.outcomes.values())
        display.update(len(self.outcomes), failed, {entry.cell.name: entry.log for entry in self.running})

    def say_what_is_there(self, display: RunsDisplay) -> None:
        """Say how many runs are finished already, and which of them other code made."""
        if self.outcomes:
            display.line(f"{len(self.outcomes)} of {self.total} runs are there already")
        kept = [stored_run(outcome.run_dir).record for outcome in self.outcomes.values() if outcome.run_dir is not None]
        for line in said_of_code(kept):
            display.line(line)

    # ------------------------------------------------------------------ one cell

    def _take(self, cells: Iterable[Cell]) -> None:
        """Queue what has no record, and what comes after that which has one."""
        new = deque(cells)
        while new:
            cell = new.popleft()
            if cell.name in {entry.name for entry in self.pending} | {entry.cell.name for entry in self.running}:
                continue
            outcome = finished_outcome(cell, self.work.folders, self.work.rerun_changed)
            if outcome is None:
                self.outcomes.pop(cell.name, None)  # one that failed or ended early is tried again
                self.pending.append(cell)
            else:
                self.outcomes[cell.name] = outcome
                new.extend(self.course.after(cell, outcome, 0.0) if self.course else ())

    def _start(self, cell: Cell, attempts: Attempts, display: RunsDisplay) -> None:
        """Start a cell, unless it is finished by now, another runner has it, or it cannot be run."""
        run_dir = self.work.runs_dir / cell.name
        try:
            refuse_link(run_dir)
            check_no_links(run_dir)
            lock = CellLock(run_dir)
            free = lock.acquire()
        except ConfigurationError as error:
            self._settle(cell, Outcome(None, str(error)), display)
            return
        if not free:
            self._wait_for(cell, display)
            return
        failed_before = lock.failure()
        if (found := self._found(cell, failed_before)) is not None:
            lock.release()
            self._settle(cell, found, display)
            return
        said = f"{cell.name} started, log in {run_dir / 'log.txt'}"
        if is_finished(run_dir):
            said += "; made by other code before"
        elif last_checkpoint(run_dir).is_file():
            said += "; continues from its last checkpoint"
        if failed_before is not None:
            said += f"; failed the last time: {failed_before}"
        display.line(said)
        try:
            self.running.append(attempts.start(cell, lock))
        except (OSError, ConfigurationError) as error:  # a full disk, for example, of which others are told in turn
            self._settle(cell, Outcome(None, f"it does not start: {error}", run_dir / "log.txt"), display)

    def _found(self, cell: Cell, failed_before: str | None) -> Outcome | None:
        """Return the outcome of a cell that need not, or cannot, be run any more; its lock is held."""
        found = finished_outcome(cell, self.work.folders, self.work.rerun_changed)
        if found is None and cell.name in self._waited and failed_before is not None:
            log = self.work.runs_dir / cell.name / "log.txt"
            found = Outcome(None, failed_before or "failed in another process", log)
        if found is None and not cell.name.endswith(content_hash(cell.configs, cell.overrides)):
            found = Outcome(None, "its configs changed while it waited; start the command again")
        return found

    def _settle(self, cell: Cell, outcome: Outcome, display: RunsDisplay, started: float | None = None) -> None:
        """Keep a cell's outcome, and queue what comes after it."""
        seconds = 0.0 if started is None else time.monotonic() - started
        self.outcomes[cell.name] = outcome
        said = "finished" if outcome.run_dir else f"FAILED: {outcome.error}"
        said = f"ended early: {outcome.error}" if outcome.ended_early else said
        display.line(f"[{len(self.outcomes)}/{self.total}] {cell.name} {said} ({seconds:.0f} s)")
        self._take(self.course.after(cell, outcome, seconds) if self.course else ())

    def _wait_for(self, cell: Cell, display: RunsDisplay) -> None:
        """Queue a cell again that another runner has."""
        if cell.name not in self._waited:
            display.line(f"{cell.name} is run by another process; waiting for it")
        self._waited.add(cell.name)
        self.pending.append(cell)
