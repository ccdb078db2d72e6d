"""A run's directory: made where it can be, held by one process at a time, and free of what killed ones left behind."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmark.errors import ConfigurationError
from benchmark.locks import FileLock
from benchmark.records.record_file import is_finished

LOCK = ".lock"


def last_checkpoint(run_dir: Path) -> Path:
    """Where a run keeps the end of its last round."""
    return run_dir / "checkpoints" / "last.ckpt"


@contextlib.contextmanager
def claimed(run_dir: Path, ckpt_path: str | None) -> Iterator[None]:
    """Hold the directory of a run that starts or goes on; one in which no file was written is removed at the end.

    Args:
        run_dir: made if it is not there.
        ckpt_path: the checkpoint that the run goes on from.

    Raises:
        ConfigurationError: the directory can't be made, another process holds it, or it holds what this run would
            write over: a finished run, or an unfinished one that ``ckpt_path`` is not the last checkpoint of.
    """
    made = [folder for folder in (run_dir, *run_dir.parents) if not _is_there(folder)]
    try:
        with _held(run_dir):
            _refuse_to_overwrite(run_dir, ckpt_path)
            for leftover in (*run_dir.glob(".*.tmp"), *run_dir.glob("checkpoints/.*.tmp")):
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


@contextlib.contextmanager
def _held(run_dir: Path) -> Iterator[None]:
    try:
        lock = FileLock(run_dir / LOCK)
    except (ConfigurationError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
        raise ConfigurationError(
            f"--run_dir={str(run_dir)!r} can't be used: {reason}; give a folder that can be written to"
        ) from error
    holder = lock.read().partition(":")[2].strip()
    if not lock.acquire():
        raise ConfigurationError(
            f"{run_dir} belongs to a run that goes on ({holder}); wait for it to end, or give another --run_dir"
        )
    try:
        lock.write("held")
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
            f"{run_dir} holds an unfinished run; continue it with --ckpt_path={last}, or give another --run_dir"
        )
