"""The metrics of a run that goes on: one small table for each evaluated round, in the run directory's ``metrics``.

What an evaluation costs does not depend on how many came before. A run that ends merges them to ``metrics.parquet``,
and from then on that file is what counts.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from benchmark.records.metrics_table import PARTS, read_table, round_file, rounds_in, rows_sha256, write_parquet

if TYPE_CHECKING:  # slow to import
    import pandas as pd


def write_evaluation(run_dir: Path, round: int, metrics: "pd.DataFrame") -> str:
    """Write the table of one evaluation, whole or not at all; returns the sha256 of its rows."""
    path = round_file(run_dir / PARTS, round)
    with contextlib.suppress(OSError):  # the file says it better
        path.parent.mkdir(exist_ok=True)
    write_parquet(path, metrics)
    return rows_sha256(metrics)


def read_evaluations(run_dir: Path) -> "Iterator[tuple[int, pd.DataFrame]]":
    """Round and table of every evaluation of a run, in the order of rounds; nothing where none is stored.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    if (run_dir / "metrics.parquet").exists():
        for round, table in read_table(run_dir / "metrics.parquet").groupby("round", sort=True):
            yield cast(int, round), table
        return
    for round, path in rounds_in(run_dir / PARTS):
        yield round, read_table(path)


def has_evaluations(run_dir: Path) -> bool:
    """Return whether a run directory holds evaluations."""
    return (run_dir / "metrics.parquet").exists() or (run_dir / PARTS).is_dir()


def remove_evaluations(run_dir: Path, keep: Mapping[int, str]) -> None:
    """Leave of the rounds' tables those of the rounds in ``keep`` alone; what is no such table stays."""
    for round, path in rounds_in(run_dir / PARTS):
        if round not in keep:
            path.unlink()
    (run_dir / "metrics.parquet").unlink(missing_ok=True)


def remove_merged(run_dir: Path) -> None:
    """Remove the tables that ``metrics.parquet`` holds."""
    with contextlib.suppress(OSError):  # something else lies there
        for _, path in rounds_in(run_dir / PARTS):
            path.unlink()
        (run_dir / PARTS).rmdir()


def sha256_of(evaluations: Mapping[int, str]) -> str:
    """One hash for all evaluations.

    Args:
        evaluations: per round the sha256 of its rows.
    """
    return hashlib.sha256("".join(evaluations[round] for round in sorted(evaluations)).encode()).hexdigest()
