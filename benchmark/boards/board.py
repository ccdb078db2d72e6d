"""A board's file: the setting that all rows share, and which kept runs each row is made of."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, with_config

from benchmark.config.yaml_files import as_declared
from benchmark.errors import ConfigurationError, no_such
from benchmark.files import make_folder, parse_json, read_regular, write_json
from benchmark.metrics import METRICS
from benchmark.records.grouped_runs import Run, read_run
from benchmark.records.hashes import config_hash

#: Where boards lie below the folder of results, and the runs of their rows.
FOLDER, RUNS = "boards", "runs"
#: What a board's file has at most, in bytes.
LARGEST = 2**20
#: Name of a kept run's folder, which leads nowhere else.
Folder = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=200)]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class BoardRow:
    """A row of a board.

    Attributes:
        label: its name.
        point: where in a round it is read.
        runs: names of kept runs by seed.
        submitted: whether it came after the board was frozen.
    """

    label: str
    point: Literal["server", "local"]
    runs: dict[str, Folder]
    submitted: bool = False


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Setting:
    """Everything that is equal in all runs of a board.

    Attributes:
        dataset: title of the data set.
        images_sha256: hash of its images.
        clients: the partition, in words; its hash decides.
        backbone: its name and the side of its images.
        weights: hash of what the backbone's configuration says of it: class, name, size, and which weights, a file of
            them by its name alone.
        held_out: shares of the training images and of the clients that are held out.
        client_rounds: the most that any row trains: rounds times the clients that take part in each.
        splits: hash of the partition by seed.
    """

    dataset: str
    images_sha256: str
    clients: str
    backbone: str
    weights: str
    held_out: list[float]
    client_rounds: int
    splits: dict[str, str]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Board:
    """A frozen board.

    Attributes:
        name: of its file; it ends in its version, such as ``_v1``.
        title: its heading.
        note: how its own rows were made.
        metric: what rows are ranked by, averaged over clients after the last round.
        floor: label of the row that needs no training; rows below it are marked.
        setting: what every run must have.
        rows: in the order in which they came.
    """

    name: str
    title: str
    note: str
    metric: str
    floor: str
    setting: Setting
    rows: list[BoardRow]

    def with_row(self, row: BoardRow) -> "Board":
        """Return the board with one row more.

        Raises:
            ConfigurationError: there is a row of this label.
        """
        if row.label in [each.label for each in self.rows]:
            raise ConfigurationError(f"{self.name} has a row {row.label!r} already; give another --label")
        return replace(self, rows=[*self.rows, row])


def check_name(name: str) -> None:
    """Refuse a name that is no file's or has no version.

    Raises:
        ConfigurationError: as it says.
    """
    if not re.fullmatch(r"[a-z0-9_]+_v[0-9]+", name):
        raise ConfigurationError(
            f"a board is called by a-z, 0-9 and _, its version last, such as office_floors_v1; got {name!r:.80}"
        )


def path_of(name: str, results_dir: Path) -> Path:
    """Return where a board's file lies."""
    check_name(name)
    return results_dir / FOLDER / f"{name}.json"


def names_of_boards(results_dir: Path) -> list[str]:
    """List the boards in a folder of results."""
    return sorted(path.stem for path in (results_dir / FOLDER).glob("*_v*.json"))


def read_board(name: str, results_dir: Path) -> Board:
    """Read a board's file.

    Raises:
        ConfigurationError: there is no such board, or its file is none of this version.
    """
    path = path_of(name, results_dir)
    if not path.is_file():
        raise ConfigurationError(no_such("board", name, names_of_boards(results_dir)))
    try:
        content = parse_json(read_regular(path, LARGEST))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    board = as_declared(Board, content, f"{path} is not a board of this version")
    if why := _broken(board, name):
        raise ConfigurationError(f"{path} is not a board: {why}")
    return board


def _broken(board: Board, name: str) -> str | None:
    """Say what of a board's file does not fit together; None if all does."""
    labels = [row.label for row in board.rows]
    seeds = board.setting.splits.keys()
    if board.name != name:
        return f"it calls itself {board.name!r:.80}, and a board has its file's name"
    if len(set(labels)) < len(labels) or board.floor not in labels:
        return f"its rows need labels of their own, and one that is called {board.floor!r:.80}"
    if board.metric not in METRICS:
        return no_such("metric", board.metric, METRICS)
    if not seeds or not all(seed.isascii() and seed.isdigit() and len(seed) < 11 for seed in seeds):
        return f"its seeds are numbers, got {', '.join(seeds)!r:.80}"
    if uneven := [row.label for row in board.rows if row.runs.keys() != seeds]:
        return f"the row {uneven[0]!r:.80} has other seeds than the board"
    return None


def write_board(board: Board, results_dir: Path) -> Path:
    """Write a board's file; return its path."""
    path = path_of(board.name, results_dir)
    make_folder(path.parent)
    write_json(path, asdict(board))
    return path


def runs_of(row: BoardRow, results_dir: Path) -> dict[str, Run]:
    """Read the kept runs of a row, by seed.

    Raises:
        ConfigurationError: one is missing or damaged.
    """
    return {seed: read_run(results_dir / RUNS / name) for seed, name in row.runs.items()}


def setting_of(runs: Sequence[Run]) -> Setting:
    """Return what runs of several seeds have in common, with the partition of each.

    Raises:
        ConfigurationError: they differ in more than seed and partition, or with one seed in the partition; or one does
            not know its images.
    """
    first, *others = [_setting_of_one(run) for run in runs]
    for run, other in zip(runs[1:], others, strict=True):
        if why := differing(first, replace(other, client_rounds=first.client_rounds, splits=first.splits)):
            raise ConfigurationError(
                f"{run.folder} differs from {runs[0].folder} in more than seed and partition: {why}"
            )
    splits: dict[str, str] = {}
    for run, each in zip(runs, (first, *others), strict=True):
        for seed, split in each.splits.items():
            if splits.setdefault(seed, split) != split:
                raise ConfigurationError(
                    f"{run.folder} has another partition than other runs with seed {seed} ({split[:12]} and "
                    f"{splits[seed][:12]}); all rows of a board have one for each seed"
                )
    return replace(first, client_rounds=max(each.client_rounds for each in (first, *others)), splits=splits)


def differing(board: Setting, given: Setting) -> str:
    """Say in what a setting differs from a board's; empty where it does not, though it may train less."""
    expected, found = asdict(board), asdict(given)
    said = [
        f"{name.replace('_', ' ')} {found[name]!r}, expected {expected[name]!r}"
        for name in ("dataset", "backbone", "held_out", "images_sha256")
        if found[name] != expected[name]
    ]
    if given.weights != board.weights and given.backbone == board.backbone:
        said.append("the backbone is of another class, or has other weights")
    if given.client_rounds > board.client_rounds:
        said.append(f"{given.client_rounds} rounds of a client, expected at most {board.client_rounds}")
    said += [
        f"the partition of seed {seed} is another one ({split[:12]}), expected {board.splits.get(seed, 'none')[:12]}"
        for seed, split in given.splits.items()
        if board.splits.get(seed) != split
    ]
    return "; ".join(said)


def _setting_of_one(run: Run) -> Setting:
    if run.images_sha256 is None:
        raise ConfigurationError(f"{run.folder} does not know its images, as records of older versions; run it again")
    return Setting(
        dataset=run.record.dataset,
        images_sha256=run.images_sha256,
        clients=run.clients,
        backbone=run.backbone,
        weights=config_hash(_identity(run.backbone_config)),
        held_out=[*run.held_out],
        client_rounds=run.record.rounds * run.participants,
        splits={str(run.record.seed): run.record.manifest_hash},
    )


def _identity(weights: object) -> dict[str, object]:
    """Return what tells a backbone and its weights from others, of its configuration."""
    if not isinstance(weights, dict):
        return {"class": str(weights).rpartition(".")[2]}
    given = weights.get("init_args") or {}
    file = given.get("checkpoint_path")
    told = {name: given.get(name) for name in ("name", "weights", "pretrained_tag", "image_size")}
    return told | {
        "class": str(weights.get("class_path")).rpartition(".")[2],
        "file": Path(file).name if file else None,
    }
