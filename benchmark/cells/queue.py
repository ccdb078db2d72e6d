"""Runs the cells of tables: several at a time, each exactly once, on this machine, on Slurm or on Ray.

A *cell* is one run. Its directory's name ends with a hash of the options that it is given, so a finished cell is never
run again. The runner of a cell holds an advisory lock on the directory; so runners that share a folder do
every cell once, also when any of them is killed at any moment.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing

from benchmark.cells.display import Display
from benchmark.cells.identity import Cell, content_hash
from benchmark.cells.lock import CellLock
from benchmark.cells.outcome import Outcome, finished_outcome, said_of_code
from benchmark.cells.this_machine import THIS_MACHINE
from benchmark.cells.work import Attempt, Course, Place, Work
from benchmark.errors import ConfigurationError
from benchmark.files import check_no_links, refuse_link
from benchmark.records.record_file import is_finished
from benchmark.records.stored_run import stored_run
from benchmark.run.run_directory import last_checkpoint
from benchmark.run.signals import termination_as_interrupt


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
        ConfigurationError: the place is not to be had.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP.
    """
    outcomes: dict[str, Outcome] = {}
    waited: set[str] = set()  # seen in another runner's hands
    running: list[Attempt] = []
    unique = {cell.name: cell for cell in cells}
    total = len(unique) if course is None else course.total
    pending: deque[Cell] = deque()
    made = (work.runs_dir,) if work.rerun_changed else work.folders  # a kept one is of no attempt

    def take(cells: Iterable[Cell]) -> None:
        """Queue what has no record, and what comes after that which has one."""
        new = deque(cells)
        while new:
            cell = new.popleft()
            if cell.name in {entry.name for entry in pending} | {entry.cell.name for entry in running}:
                continue
            outcome = finished_outcome(cell, work.folders, work.rerun_changed)
            if outcome is None:
                outcomes.pop(cell.name, None)  # one that failed or ended early is tried again
                pending.append(cell)
            else:
                outcomes[cell.name] = outcome
                new.extend(course.after(cell, outcome, 0.0) if course else ())

    take(unique.values())
    with closing(place.open(work, jobs)) as attempts, Display(total) as display, termination_as_interrupt():
        if outcomes:
            display.line(f"{len(outcomes)} of {total} runs are there already")
        kept = [stored_run(outcome.run_dir).record for outcome in outcomes.values() if outcome.run_dir is not None]
        for line in said_of_code(kept):
            display.line(line)

        def settle(cell: Cell, outcome: Outcome, seconds: float) -> None:
            outcomes[cell.name] = outcome
            said = "finished" if outcome.run_dir else f"FAILED: {outcome.error}"
            said = f"ended early: {outcome.error}" if outcome.ended_early else said
            display.line(f"[{len(outcomes)}/{total}] {cell.name} {said} ({seconds:.0f} s)")
            take(course.after(cell, outcome, seconds) if course else ())

        def wait_for(cell: Cell) -> None:
            if cell.name not in waited:
                display.line(f"{cell.name} is run by another process; waiting for it")
            waited.add(cell.name)
            pending.append(cell)

        try:
            while pending or running:
                for entry in [entry for entry in running if course and not entry.done()]:
                    if course and (reason := course.reason_to_end(entry.cell)):
                        try:
                            attempts.end([entry])
                        finally:
                            running.remove(entry)
                        ended = finished_outcome(entry.cell, made) or Outcome(None, reason, entry.log, True)
                        settle(entry.cell, ended, time.monotonic() - entry.started)
                for entry in [entry for entry in running if entry.done()]:
                    running.remove(entry)
                    if entry.busy():
                        wait_for(entry.cell)
                        continue
                    outcome = finished_outcome(entry.cell, made)
                    outcome = outcome or Outcome(None, entry.failure(), entry.log)
                    entry.close(outcome.error)
                    settle(entry.cell, outcome, time.monotonic() - entry.started)
                for _ in range(len(pending)):
                    if len(running) >= attempts.at_a_time:
                        break
                    cell = pending.popleft()
                    run_dir = work.runs_dir / cell.name
                    try:
                        refuse_link(run_dir)
                        check_no_links(run_dir)
                        lock = CellLock(run_dir)
                    except ConfigurationError as error:
                        settle(cell, Outcome(None, str(error)), 0.0)
                        continue
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
                    try:
                        running.append(attempts.start(cell, lock))
                    except OSError as error:  # a full disk, for example, of which other cells are told in their turn
                        settle(cell, Outcome(None, f"it does not start: {error}", run_dir / "log.txt"), 0.0)
                failed = sum(outcome.run_dir is None and not outcome.ended_early for outcome in outcomes.values())
                display.update(len(outcomes), failed, {entry.cell.name: entry.log for entry in running})
                if pending or running:
                    time.sleep(0.1)
        finally:
            attempts.end(running)
    return outcomes
