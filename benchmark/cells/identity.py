"""The identity of a cell: its configurations and overrides, the hash of the options they give, and its command."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmark.config.given_options import given_options
from benchmark.config.overview import PROGRAM
from benchmark.run.run_directory import last_checkpoint

#: Older names of options of the data, which the names of kept runs are made of.
OLDER = {"clients_at_once": "cohort_width"}


@dataclass(frozen=True)
class Cell:
    """One run of a table: a row on a data group with a seed.

    Attributes:
        name: of the run directory.
        configs: files, later ones win.
        overrides: command line arguments, later ones win; may hold ``{data_dir}``.
        seed: of the run.
    """

    name: str
    configs: tuple[str, ...]
    overrides: tuple[str, ...]
    seed: int


def content_hash(configs: Sequence[str], overrides: Sequence[str]) -> str:
    """Eight digits that stand for what a cell is given: options and values, wherever they are written.

    Not for the configuration with every default: a new argument with a default would give each run another name, and a
    table would have to import every class to find its runs.

    Raises:
        ConfigurationError: as :func:`benchmark.config.given_options.given_options`.
    """
    options = given_options(configs, overrides)
    if isinstance(data := options.get("data"), dict):
        options["data"] = {OLDER.get(name, name): value for name, value in data.items()}
    spelled = json.dumps(options, sort_keys=True, default=str)  # default: YAML knows dates
    return hashlib.sha256(spelled.encode()).hexdigest()[:8]


def with_overrides(cell: Cell, arguments: Sequence[str]) -> Cell:
    """The cell with further arguments, under the name that it has with them.

    Raises:
        ConfigurationError: as :func:`content_hash`.
    """
    overrides = (*cell.overrides, *arguments)
    name = f"{cell.name.rpartition('-')[0]}-{content_hash(cell.configs, overrides)}"
    return replace(cell, name=name, overrides=overrides)


def cell_command(cell: Cell, run_dir: Path, data_dir: Path | None, program: Sequence[str] = PROGRAM) -> list[str]:
    """The command of a cell; it continues from ``checkpoints/last.ckpt`` where that file is there."""
    command = [*program, "fit"]
    for entry in cell.configs:
        command += ["--config", entry]
    command += ["--run_dir", str(run_dir), "--seed_everything", str(cell.seed)]
    command += [entry.replace("{data_dir}", str(data_dir)) for entry in cell.overrides]
    checkpoint = last_checkpoint(run_dir)
    return [*command, "--ckpt_path", str(checkpoint)] if checkpoint.is_file() else command
