"""Rank the rows of a board, and write them down."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmark.boards.board import FOLDER, Board, BoardRow, runs_of
from benchmark.errors import ConfigurationError, listed
from benchmark.files import make_folder, write_text
from benchmark.metrics import lower_is_better
from benchmark.records.grouped_runs import Run
from benchmark.records.stored_run import stored_run
from benchmark.records.summary import client_values
from benchmark.records.words import POINT_WORDS, digits_of
from benchmark.tables.numbers import mean_std, number, scaled, signed
from benchmark.tables.paired import paired_comparison

if TYPE_CHECKING:  # slow to import
    import pandas as pd


@dataclass(frozen=True)
class Scored:
    """A row with its numbers.

    Attributes:
        row: of the board.
        runs: by seed.
        values: the board's metric by seed, one for each client, accuracies in per cent; NaN where a client has none.
    """

    row: BoardRow
    runs: dict[str, Run]
    values: dict[str, list[float]]

    @property
    def averages(self) -> list[float]:
        """Return the mean over clients, by seed."""
        return [fmean(value for value in values if value == value) for values in self.values.values()]


def check_values(metric: str, runs: Mapping[str, Run], point: str, floor: Mapping[str, Run], floor_point: str) -> None:
    """Require that a row has numbers for exactly the clients for whom the floor has some, seed by seed.

    A row without the number of a client that diverged would be ranked by the other clients.

    Args:
        metric: what rows are ranked by.
        runs: of the row, by seed.
        point: where in a round they are read.
        floor: the floor's runs, by seed.
        floor_point: where in a round these are read.

    Raises:
        ConfigurationError: it has not, or a run was not evaluated where it is read.
    """
    for seed, run in runs.items():
        ours, theirs = (
            [math.isfinite(value) for value in client_values(of.metrics, of.record, at, "test", metric, "last")]
            for of, at in ((run, point), (floor[seed], floor_point))
        )
        if wrong := [name for name, a, b in zip(run.record.client_names, ours, theirs, strict=True) if a != b]:
            raise ConfigurationError(
                f"{run.folder} has other clients with a finite {metric} on test images after the last round than the "
                f"floor {floor[seed].folder}: {listed(wrong)}; a row is ranked by the same clients as the floor, so "
                "run it again with options under which no client diverges"
            )


def scored(board: Board, results_dir: Path) -> list[Scored]:
    """Read the rows of a board, the best first.

    Raises:
        ConfigurationError: a kept run is missing or damaged, or was not evaluated where its row is read.
    """
    found = []
    for row in board.rows:
        runs = runs_of(row, results_dir)
        values = {
            seed: [
                scaled(value, board.metric)
                for value in client_values(run.metrics, run.record, row.point, "test", board.metric, "last")
            ]
            for seed, run in runs.items()
        }
        found.append(Scored(row, runs, values))
    return sorted(found, key=lambda each: fmean(each.averages), reverse=not lower_is_better(board.metric))


def ranking(board: Board, results_dir: Path) -> str:
    """Return the board as Markdown: rank, score, difference from the floor with its interval, bytes and minutes.

    Raises:
        ConfigurationError: as :func:`scored`.
    """
    rows = scored(board, results_dir)
    floor = next(each for each in rows if each.row.label == board.floor)
    digits, lower = digits_of(board.metric), lower_is_better(board.metric)
    heads = ["#", "Row", board.metric.replace("_", " "), f"minus {_plain(board.floor)}"]
    heads += ["95 % interval", "worst client", "kB a client and round", "rounds", "minutes", ""]
    lines = [heads, ["--:", ":--", *["--:"] * (len(heads) - 3), ":--"]]
    for rank, each in enumerate(rows, 1):
        ours, theirs = [*each.values.values()], [*floor.values.values()]
        difference = paired_comparison(ours, theirs, same_clients=len({len(side) for side in ours}) == 1)
        low, high = signed(difference.low, digits), signed(difference.high, digits)
        worst = [(max if lower else min)(v for v in values if v == v) for values in each.values.values()]
        records = [run.record for run in each.runs.values()]
        sent = fmean(of.communication["up_bytes"] + of.communication["down_bytes"] for of in records)
        read = f" ({POINT_WORDS[each.row.point]})" if each.row.point != "server" else ""
        below = difference.mean > 0 if lower else difference.mean < 0
        said = ["the floor"] * (each is floor) + ["below the floor"] * below + ["submitted"] * each.row.submitted
        cells = [
            str(rank),
            f"{_plain(each.row.label)}{read}",
            mean_std(each.averages, digits),
            "" if each is floor else signed(difference.mean, digits),
            f"{low} to {high}" if low and each is not floor else "",
            mean_std(worst, digits),
            number(sent / 1e3, 1),
            str(max(record.rounds for record in records)),
            number(fmean(record.seconds["total"] for record in records) / 60, 1),
            ", ".join(said),
        ]
        lines.append(cells)
    setting, seeds = board.setting, ", ".join(board.setting.splits)
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    facts = "; ".join(map(_plain, (setting.dataset, setting.clients, setting.backbone, f"seeds {seeds}"))) + "."
    budget = f"A row trains at most {setting.client_rounds:,} rounds of a client."
    reading = (
        "Scores are means over clients after the last round, ± their standard deviation over seeds. Differences from "
        "the floor are paired by seed and client (docs/tables.md says how their interval is made). Minutes are of the "
        "machine that a record names, evaluations and cached features included, which the first run makes for all."
    )
    return (
        f"# {_plain(board.title)} ({board.name})\n\n{_plain(board.note)}\n\n{facts} {budget}\n\n{table}\n\n{reading}\n"
    )


def long_form(board: Board, results_dir: Path) -> "pd.DataFrame":
    """Return one line for each row, seed and client: row, seed, client, n_train, n_test, metric, value.

    ``n_train`` is empty where only hashes are kept of a large partition. ``value`` is a share, as in the records.
    """
    import pandas as pd

    lines = []
    for row in board.rows:
        for seed, run in runs_of(row, results_dir).items():
            record = run.record
            values = client_values(run.metrics, record, row.point, "test", board.metric, "last")
            trained: Sequence[int | None] = stored_run(run.folder).train_sizes or [None] * len(values)
            for name, *sizes, value in zip(record.client_names, trained, record.test_sizes, values, strict=True):
                lines.append((row.label, int(seed), name, *sizes, board.metric, value))
    heads = ["row", "seed", "client", "n_train", "n_test", "metric", "value"]
    return pd.DataFrame(lines, columns=heads).astype({"n_train": "Int64"})


def write_ranking(board: Board, results_dir: Path) -> tuple[Path, Path]:
    """Write a board as Markdown and its values by client as CSV, beside its file; return both paths.

    Raises:
        ConfigurationError: as :func:`scored`.
    """
    folder = make_folder(results_dir / FOLDER)
    page, values = folder / f"{board.name}.md", folder / f"{board.name}.csv"
    write_text(page, ranking(board, results_dir))
    write_text(values, long_form(board, results_dir).to_csv(index=False))
    return page, values


def _plain(text: str) -> str:
    """Return a stranger's text without what Markdown or HTML would read in it."""
    kept = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return " ".join(re.sub(r"([\\`*_\[\]!|#~])", r"\\\1", kept).split())
