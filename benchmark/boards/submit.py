"""Check submitted runs, and add them to a board as a row."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmark.boards.board import RUNS, Board, BoardRow, differing, read_board, setting_of, write_board
from benchmark.errors import ConfigurationError
from benchmark.records.grouped_runs import Run, group, read_run
from benchmark.records.keeping import keep_record
from benchmark.records.predictions import PREDICTIONS
from benchmark.records.source_code import changed_files
from benchmark.records.stored_run import stored_run
from benchmark.records.summary import client_values


@dataclass(frozen=True)
class Submitted:
    """A board with a new row.

    Attributes:
        board: with it.
        remarks: what a reader of the row should know, a sentence each.
    """

    board: Board
    remarks: tuple[str, ...]


def submit(
    name: str, label: str, run_dirs: Sequence[Path], point: Literal["server", "local"], results_dir: Path
) -> Submitted:
    """Check runs against a board, keep their small files below ``results_dir`` and add them as one row.

    A run must verify, and its ``predictions.parquet`` must give its accuracies. All runs together must be one
    experiment, one for each seed of the board, on the board's images, partition and backbone, trained no more than its
    rows.
    Nothing here can tell whether the predictions are those of a model: only running again can
    (``benchmark verify --rerun``).

    Args:
        name: of the board.
        label: of the new row.
        run_dirs: finished runs.
        point: where in a round they are read.
        results_dir: folder of results.

    Raises:
        ConfigurationError: as above, the first thing that is wrong; nothing is written then.
    """
    board = read_board(name, results_dir)
    if not label.strip() or len(label) > 80 or not label.isprintable():
        raise ConfigurationError(f"a label has 1 to 80 characters that can be printed, got {label!r:.100}")
    board.with_row(BoardRow(label, point, {}))
    runs = [_checked(folder, board, point) for folder in run_dirs]
    if why := differing(board.setting, setting_of(runs)):
        raise ConfigurationError(f"not on this board: {why}")
    by_seed = {str(run.record.seed): run for run in runs}
    if len(by_seed) < len(runs) or by_seed.keys() != board.setting.splits.keys():
        raise ConfigurationError(
            f"a row has one run for each of the seeds {', '.join(board.setting.splits)}; got "
            f"{', '.join(str(run.record.seed) for run in runs)}"
        )
    experiments = group(runs)
    if len(experiments) > 1:
        raise ConfigurationError(
            f"the runs are of {len(experiments)} configurations, and a row is of one: {experiments[0].first.folder} "
            f"and {experiments[1].first.folder} differ in more than their seed"
        )
    slug = re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_") or "row"
    kept = {
        seed: keep_record(by_seed[seed].folder, results_dir / RUNS, f"{slug}-{board.name}-s{seed}").name
        for seed in board.setting.splits
    }
    added = board.with_row(BoardRow(label, point, kept, submitted=True))
    write_board(added, results_dir)
    return Submitted(added, _remarks(runs))


def _checked(folder: Path, board: Board, point: str) -> Run:
    """Read a run that verifies, has its predictions, and was evaluated where the board reads it."""
    run = read_run(folder)
    stored = stored_run(folder)
    if PREDICTIONS not in run.record.files or not (folder / PREDICTIONS).is_file():
        raise ConfigurationError(
            f"{folder} has no {PREDICTIONS}, of which its accuracies are made again here: run it with "
            "--data.metrics=clinical"
        )
    if stored.problems:
        raise ConfigurationError(f"{folder} does not verify: {stored.problems[0]}")
    client_values(run.metrics, run.record, point, "test", board.metric, "last")
    there = set(stored.predictions.loc[stored.predictions["split"] == "test", "point"])
    if point not in there:
        raise ConfigurationError(f"{folder} has no predictions at the point {point!r}; it has {', '.join(there)}")
    return run


def _remarks(runs: Sequence[Run]) -> tuple[str, ...]:
    """Say which code made the runs, where it is not the present one."""
    codes = {str(run.folder): run.record.code for run in runs}
    if unknown := [folder for folder, code in codes.items() if code is None]:
        return (f"{unknown[0]} does not know which code made it",)
    changed = sorted({file for code in codes.values() if code is not None for file in changed_files(code)})
    return (f"made by other code than this: {', '.join(changed)}",) if changed else ()
