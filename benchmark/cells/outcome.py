"""The outcome of a cell according to its record, and the code that made the record."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.cells.identity import Cell
from benchmark.errors import ConfigurationError
from benchmark.records.record import RunRecord
from benchmark.records.record_file import is_finished
from benchmark.records.source_code import changed_files
from benchmark.records.stored_run import stored_run


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell: the directory of its record, or else its error in one line and its log.

    Attributes:
        run_dir: directory with the record; None after a failure.
        error: reason why there is no record; empty if there is one.
        log: log of the last attempt; None if there is none.
        ended_early: whether the runner was told to end the cell; ``error`` gives the reason.
    """

    run_dir: Path | None
    error: str = ""
    log: Path | None = None
    ended_early: bool = False


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
    """Return a line with the number of records that other code made, and one with the number that name no code."""
    changed: dict[str, set[str]] = {}  # method -> files
    others = 0
    for record in records:
        files = changed_files(record.code or {})
        others += bool(files)
        if files:
            changed.setdefault(record.method, set()).update(files)
    alike: dict[str, list[str]] = {}  # files -> methods
    for method, found in changed.items():
        alike.setdefault(", ".join(sorted(found)), []).append(method)
    unknown = sum(record.code is None for record in records)
    lines = []
    if others:
        which = "; ".join(f"{', '.join(methods)}: {files} changed" for files, methods in alike.items())
        lines.append(
            f"{others} of {len(records)} cells were made by other code ({which}); make them again with --rerun-changed"
        )
    if unknown:
        lines.append(f"{unknown} of {len(records)} cells do not know the code that made them: their records are older")
    return lines
