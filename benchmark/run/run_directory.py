"""A run's directory: made where it can be, held by one process at a time, and free of what killed ones left behind."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmark.errors import ConfigurationError
from benchmark.files import check_no_links
from benchmark.locks import FileLock
from benchmark.records.record_file import OPTIONAL_FILES, is_finished

LOCK = ".lock"
LEFTOVER = re.compile(r"\..+\.\d+\.tmp")
"""Names of the half-written files of a process that was killed (:func:`benchmark.files.replacing`)."""

FOLDERS = ("checkpoints", "csv", "metrics", "predictions", "tensorboard", "wandb")
"""Folders that a run makes."""
FILES = (
    *("config.yaml", "federation.json", "manifest.json", "metrics.parquet", "partition.png", "record.json"),
    *OPTIONAL_FILES,
    *("checkpoints/*.ckpt", "csv/metrics.csv", "csv/hparams.yaml", "metrics/*.parquet", "tensorboard/hparams.yaml"),
    "predictions/*.parquet",
)
"""Patterns of files that a run writes."""


def last_checkpoint(run_dir: Path) -> Path:
    """Return the path of a run's checkpoint, which holds its state after the last finished round."""
    return run_dir / "checkpoints" / "last.ckpt"


@contextlib.contextmanager
def claimed(run_dir: Path, ckpt_path: str | None) -> Iterator[None]:
    """Hold the directory of a run that starts or goes on; one in which no file was written is removed at the end.

    Args:
        run_dir: made if it is not there.
        ckpt_path: the checkpoint that the run goes on from.

    Raises:
        ConfigurationError: the directory can't be made, another process holds it, it holds links that lead elsewhere
            (:func:`benchmark.files.check_no_links`), something in the place of a folder or a file of a run, or what
            this run would write over: a finished run, or an unfinished one that ``ckpt_path`` is not the last
            checkpoint of.
    """
    made = [folder for folder in (run_dir, *run_dir.parents) if not _is_there(folder)]
    try:
        if not made:
            check_no_links(run_dir)
        with _held(run_dir):
            _refuse_to_overwrite(run_dir, ckpt_path)
            _check_places(run_dir)
            places = ("", "checkpoints/", "metrics/", "predictions/")
            for leftover in (path for place in places for path in run_dir.glob(f"{place}.*.tmp")):
                if LEFTOVER.fullmatch(leftover.name) and leftover.is_file():
                    leftover.unlink(missing_ok=True)
            try:
                yield
            finally:
                if made and all(entry.is_dir() or entry.name == LOCK for entry in run_dir.rglob("*")):
                    shutil.rmtree(run_dir)
    finally:
        for folder in made:
            with contextlib.suppress(OSError, ValueError):  # not empty, or never made
                folder.rmdir()


def _check_places(run_dir: Path) -> None:
    """Refuse a directory in which what a run writes has no place; libraries would say so late, by a traceback."""
    for folder in (run_dir, *(run_dir / name for name in FOLDERS)):
        if folder.exists() and not folder.is_dir():
            raise ConfigurationError(_taken(run_dir, folder, "no folder", "a folder"))
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"{run_dir} is not used: no file can be written to {folder}; give yourself the right to "
                f"(chmod u+wx {folder}), or give another --run_dir"
            )
    for path in (path for pattern in FILES for path in run_dir.glob(pattern)):
        if not path.is_file():
            raise ConfigurationError(_taken(run_dir, path, "no file", "a file"))


def _taken(run_dir: Path, path: Path, found: str, made: str) -> str:
    return (
        f"{run_dir} is not used: {path} is {found}, and a run makes {made} there; move it elsewhere, or give another "
        "--run_dir"
    )


@contextlib.contextmanager
def _held(run_dir: Path) -> Iterator[None]:
    try:
        str(run_dir).encode()  # what prints and files could not hold
        lock = FileLock(run_dir / LOCK)
    except (ConfigurationError, ValueError) as error:  # ValueError: a NUL in the name, or it is no UTF-8
        reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
        raise ConfigurationError(
            f"--run_dir={str(run_dir)!r} can't be used: {reason}; give a folder that can be written to"
        ) from error
    lock.take(
        lambda who: f"{run_dir} belongs to a run that goes on ({who}); wait for it to end, or give another --run_dir"
    )
    try:
        yield
    finally:
        lock.release()


def _is_there(folder: Path) -> bool:
    try:
        return folder.exists()
    except (OSError, ValueError):  # a name that cannot be
        return False


def _refuse_to_overwrite(run_dir: Path, ckpt_path: str | None) -> None:
    if is_finished(run_dir):
        raise ConfigurationError(f"{run_dir} holds a finished run; give another --run_dir, or remove it first")
    last = last_checkpoint(run_dir)
    if last.exists() and (ckpt_path is None or Path(ckpt_path).resolve() != last.resolve()):
        raise ConfigurationError(
            f"{run_dir} holds an unfinished run; continue it with benchmark resume {run_dir}, or with "
            f"--ckpt_path={last}; or give another --run_dir"
        )
