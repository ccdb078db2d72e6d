"""Studies whose runs are written by hand: scores follow from the values by a formula."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from finished_run import write_finished_run
from recorded_results import record_of

from benchmark.cells.identity import Cell
from benchmark.cells.outcome import Outcome
from benchmark.records.evaluations import write_evaluation
from benchmark.records.metrics_table import COLUMNS
from benchmark.tuning.space import Choice
from benchmark.tuning.study import Studies, Study
from benchmark.tuning.task import Task

ROUNDS = 4
CHOICES = (
    Choice("model.lr", (0.01, 0.03, 0.1, 0.3, 1.0), 1),
    Choice("model.momentum", (0.0, 0.5, 0.9), 0),
    Choice("model.kind", ("a", None, "c"), 2),
)


def task(name: str = "alpha-digits-s0", trials: int = 10, choices: Sequence[Choice] = CHOICES) -> Task:
    return Task(
        "Alpha",
        "Digits",
        name,
        Cell(f"{name}-00000000", (), (), 0),
        tuple(choices),
        "server",
        "accuracy",
        ROUNDS,
        trials,
    )


def curve(cell: Cell) -> list[float]:
    """Score after each round, from 0 on: the best rate is 0.3, and momentum helps."""
    given = dict(entry.removeprefix("--").split("=", 1) for entry in cell.overrides)
    lr, momentum = float(given["model.lr"]), float(given["model.momentum"])
    top = 0.9 - 0.15 * abs(math.log10(lr / 0.3)) + 0.05 * momentum - 0.02 * (given["model.kind"] == "null")
    return [0.1 + (top - 0.1) * n / ROUNDS for n in range(ROUNDS + 1)]


def rows(number: int, score: float) -> pd.DataFrame:
    found = [(number, client, "server", "val", "accuracy", score + 0.01 * client - 0.005) for client in (0, 1)]
    return pd.DataFrame(found, columns=list(COLUMNS))


def write_round(folder: Path, scores: Sequence[float], number: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_evaluation(folder, number, rows(number, scores[number]))


def finish(folder: Path, scores: Sequence[float], seed: int = 0, **fields: Any) -> Outcome:
    usual = {"method": "Alpha", "dataset": "Rooms", "rounds": ROUNDS, "rounds_trained": ROUNDS, "peak_memory_bytes": 1}
    record = record_of("ab", seed, **{**usual, **fields})
    images = {name: value for name, value in fields.items() if name == "images_sha256"}
    write_finished_run(folder, record, pd.concat([rows(n, score) for n, score in enumerate(scores)]), **images)
    return Outcome(folder)


def run(study: Study) -> None:
    """Do all of a study's trials, a slow one that is pruned and quick ones that end before anybody looks."""
    cell = study.cell or study.next()
    while cell is not None:
        cell = after(study, cell)


def after(study: Study, cell: Cell) -> Cell | None:
    """Do one trial; the next one."""
    folder, scores = study.runs_dir / cell.name, curve(cell)
    course = Studies([study])
    if study.trial.number % 2:
        for number in range(1, ROUNDS + 1):
            write_round(folder, scores, number)
            if reason := course.reason_to_end(cell):
                assert reason == f"pruned after round {number}"
                return next(iter(course.after(cell, Outcome(None, reason, ended_early=True), 1.0)), None)
    return next(iter(course.after(cell, finish(folder, scores), 1.0)), None)


def states(study: Study) -> list[tuple[int, str, dict[str, Any], int, float | None]]:
    return [(t.number, t.state, t.values, t.rounds, t.score) for t in study.trials]


def opened(folder: Path, *arguments: Any, **given: Any) -> Study:
    return Study(task(*arguments, **given), folder / "studies", folder / "runs")
