"""Check submitted runs, and add them to a board as a row."""

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmark.boards.board import (
    FOLDER,
    RUNS,
    Board,
    BoardRow,
    differing,
    read_board,
    runs_of,
    setting_of,
    write_board,
)
from benchmark.boards.ranking import check_values, ranking, write_ranking
from benchmark.errors import ConfigurationError
from benchmark.locks import FileLock
from benchmark.metrics import MEANS_OVER_CLASSES, Metric
from benchmark.records.drawn_images import values_in
from benchmark.records.grouped_runs import Run, group, read_run
from benchmark.records.keeping import keep_record
from benchmark.records.predictions import PREDICTIONS, images_of
from benchmark.records.source_code import changed_files
from benchmark.records.stored_run import stored_run
from benchmark.records.summary import client_values

if TYPE_CHECKING:  # slow to import
    import pandas as pd

#: Files of a run that it is checked with, and how they come to be there.
NEEDED = {PREDICTIONS: "run it with --data.keep_predictions=last", "manifest.json": "submit the run's own folder"}


@dataclass(frozen=True)
class Submitted:
    """A board with a new row.

    Attributes:
        board: with it.
        remarks: what a reader of the row should know, a sentence each.
        files: its page and its values, which are written.
    """

    board: Board
    remarks: tuple[str, ...]
    files: tuple[Path, Path]


def submit(
    name: str, label: str, run_dirs: Sequence[Path], point: Literal["server", "local"], results_dir: Path
) -> Submitted:
    """Check runs against a board, keep their small files below ``results_dir`` and add them as one row.

    A run must verify, and its ``predictions.parquet`` must have every test image and give its scores. All runs together
    must be one experiment, one for each seed of the board, on the board's images, partition and backbone, trained no
    more than its rows.
    Nothing here can tell whether the predictions are those of a model, nor what a file of weights holds that has the
    right name: only running again can (``benchmark verify --rerun``). Local epochs are not bounded.

    One process at a time adds to a board. What a killed one has kept is taken over, if it is of the same runs.

    Args:
        name: of the board.
        label: of the new row.
        run_dirs: finished runs.
        point: where in a round they are read.
        results_dir: folder of results.

    Raises:
        ConfigurationError: as above, the first thing that is wrong; or another process adds a row. The board and the
            kept runs stay as they were then.
    """
    read_board(name, results_dir)  # there is one
    with _locked(name, results_dir):
        return _submit(read_board(name, results_dir), label, run_dirs, point, results_dir)


@contextmanager
def _locked(name: str, results_dir: Path) -> Iterator[None]:
    """Hold the lock of a board, whose file is gone afterwards."""
    lock = FileLock(results_dir / FOLDER / f".{name}.lock")
    lock.take(lambda who: f"a row is being added to the board {name} by {who}; wait for it to end, then submit again")
    try:
        yield
    finally:
        lock.path.unlink(missing_ok=True)
        lock.release()


def _submit(
    board: Board, label: str, run_dirs: Sequence[Path], point: Literal["server", "local"], results_dir: Path
) -> Submitted:
    if not label.strip() or len(label) > 80 or not label.isprintable():
        raise ConfigurationError(f"a label has 1 to 80 characters that can be printed, got {label!r:.100}")
    slug = re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_") or "row"
    told_apart = hashlib.sha256(label.encode()).hexdigest()[:8]
    kept = {seed: f"{slug}-{board.name}-s{seed}-{told_apart}" for seed in board.setting.splits}
    runs = [_checked(folder, board, point) for folder in run_dirs]
    if why := differing(board.setting, setting_of(runs)):
        raise ConfigurationError(f"not on this board: {why}")
    check_support(board, runs[0], results_dir)
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
    floor = next(row for row in board.rows if row.label == board.floor)
    check_values(board.metric, by_seed, point, runs_of(floor, results_dir), floor.point)
    for run in runs:  # whose manifests are known to be the board's by now
        _compare_with_manifest(run, point)
    row = BoardRow(label, point, kept, submitted=True)
    # A submission that was killed before it wrote the page leaves its row.
    again = row in board.rows and all(_alike(run, by_seed[seed]) for seed, run in runs_of(row, results_dir).items())
    added = board if again else board.with_row(row)
    _write({results_dir / RUNS / folder: by_seed[seed] for seed, folder in kept.items()}, added, results_dir)
    return Submitted(added, _remarks(runs), write_ranking(added, results_dir))


def _alike(kept: Run, given: Run) -> bool:
    """Return whether a kept run is a copy of this one."""
    ours, theirs = ((each.record.config_hash, each.record.files["metrics.parquet"]) for each in (kept, given))
    return ours == theirs


def _write(kept: Mapping[Path, Run], added: Board, results_dir: Path) -> None:
    """Keep a row's runs and write the board with it; of what fails no new folder stays.

    Args:
        kept: the runs by their new folder.
        added: the board with the row.
        results_dir: folder of results.

    Raises:
        ConfigurationError: a file cannot be written, another record is kept in one of the folders, or the board cannot
            be ranked with these runs.
    """
    new = [folder for folder in kept if not folder.exists()]
    try:
        for folder, run in kept.items():
            keep_record(run.folder, folder.parent, folder.name)
        ranking(added, results_dir)
        write_board(added, results_dir)
    except BaseException:
        if added.rows[-1] not in read_board(added.name, results_dir).rows:
            for folder in new:
                shutil.rmtree(folder, ignore_errors=True)
        raise


def _checked(folder: Path, board: Board, point: str) -> Run:
    """Read a run that verifies, and whose predictions of all test images give its scores where the board reads them."""
    run = read_run(folder)
    stored = stored_run(folder)
    for name, how in NEEDED.items():
        if name not in run.record.files or not (folder / name).is_file():
            raise ConfigurationError(f"{folder} has no {name}, with which it is checked here: {how}")
    if stored.problems:
        raise ConfigurationError(f"{folder} does not verify: {stored.problems[0]}")
    values = client_values(run.metrics, run.record, point, "test", board.metric, "last")
    rows = stored.scored(point, "test")
    if len(rows) and rows["round"].iloc[0] != run.metrics["round"].max():
        raise ConfigurationError(
            f"{folder}: its images are of round {rows['round'].iloc[0]}, and a board reads the last one; run it with "
            "--data.keep_predictions=last"
        )
    once = rows.groupby("client")["image"].nunique().to_dict()
    if len(rows) != sum(once.values()) or once != {c: n for c, n in enumerate(run.record.test_sizes) if n}:
        raise ConfigurationError(
            f"{folder}: {PREDICTIONS} does not have every test image of every client once at the point {point!r}"
        )
    _compare(folder, rows, stored.metric(board.metric), values)
    return run


def _compare_with_manifest(run: Run, point: str) -> None:
    """Require the predictions to be of the partition's images, with as many of each class as it has.

    Which number a class has may differ from client to client and from split to split: counts alone are compared.

    Raises:
        ConfigurationError: they are of others.
    """
    stored, folder = stored_run(run.folder), run.folder
    clients = (stored.partition or {})["clients"]
    for client, own in stored.scored(point, "test").groupby("client"):
        told = clients[client]
        counts = sorted(own["label"].value_counts().tolist())
        if counts != sorted(count for count in told.get("test_classes", counts) if count):
            raise ConfigurationError(
                f"{folder}: {PREDICTIONS} has other numbers of images of the classes for client {client} than "
                "manifest.json"
            )
        if sorted(own["image"].tolist()) != sorted(told.get("test", own["image"].tolist())):
            raise ConfigurationError(
                f"{folder}: {PREDICTIONS} has other test images for client {client} than manifest.json"
            )


def check_support(board: Board, run: Run, results_dir: Path) -> None:
    """Require that a mean over classes is of classes with as many images as in the board's rows.

    Raises:
        ConfigurationError: it is not.
    """
    if board.metric not in MEANS_OVER_CLASSES:
        return
    first = next(iter(runs_of(board.rows[0], results_dir).values()))
    asked, given = (each.get("data.min_support", 1) for each in (first, run))
    if asked != given:
        raise ConfigurationError(
            f"not on this board: {board.metric} with data.min_support={given}, expected data.min_support={asked}"
        )


def _compare(folder: Path, rows: "pd.DataFrame", metric: Metric, values: Sequence[float]) -> None:
    """Require that predictions give the recorded values, one for each client."""
    import numpy as np

    if metric.of is None and metric.of_images is None:
        raise ConfigurationError(f"{metric.name} is not made of predictions, so that no run can be checked with it")
    for client, value in enumerate(values):
        own = rows[rows["client"] == client]
        if len(own) == 0:
            continue
        made = values_in(metric, images_of(own), np.ones((1, len(own)), "int32"))[0]
        if not np.isclose(made, value, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise ConfigurationError(
                f"{folder}: the predictions of client {client} give a {metric.name} of {made:.6g}, recorded is "
                f"{value:.6g}"
            )


def _remarks(runs: Sequence[Run]) -> tuple[str, ...]:
    """Say which code made the runs, where it is not the present one."""
    codes = {str(run.folder): run.record.code for run in runs}
    if unknown := [folder for folder, code in codes.items() if code is None]:
        return (f"{unknown[0]} does not know which code made it",)
    changed = sorted({file for code in codes.values() if code is not None for file in changed_files(code)})
    return (f"made by other code than this: {', '.join(changed)}",) if changed else ()
