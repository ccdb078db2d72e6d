"""Every trial of a tuning as CSV, which is committed, and from which others go on with the values that were chosen."""

import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark.errors import ConfigurationError
from benchmark.tables.numbers import scaled
from benchmark.tuning.task import Task, Trial

#: of columns; a hash of digits alone is no number
TYPES = {"study": "str", "run": "str", "trial": "int64", "rounds": "int64", "seconds": "float64", "val": "float64"}


@dataclass(frozen=True)
class Tuned:
    """A row on a data group, and what became of its tuning.

    Attributes:
        task: what was tuned; without choices there was nothing to tune.
        trials: that have ended.
        best: whose values were chosen.
        arguments: that give a run these values.
        error: why there are none.
    """

    task: Task
    trials: Sequence[Trial] = ()
    best: Trial | None = None
    arguments: Sequence[str] = field(default=())
    error: str = ""

    @classmethod
    def by(cls, task: Task, trials: Sequence[Trial], error: str = "") -> "Tuned":
        """Choose the best trial; keep ``error`` instead if there is one, or the error that no trial was completed."""
        try:
            return cls(task, trials, task.best(trials), () if error else task.chosen(trials), error)
        except ConfigurationError as none:
            return cls(task, trials, None, (), str(none))


def trials_csv(tuned: Iterable[Tuned]) -> str:
    """Every trial, a line each."""
    import pandas as pd

    rows = [
        {
            "method": entry.task.row,
            "dataset": entry.task.group,
            "study": entry.task.hash,
            "trial": trial.number,
            "state": trial.state,
            "chosen": trial == entry.best,
            "rounds": trial.rounds,
            "seconds": round(trial.seconds, 1),
            "metric": entry.task.metric,
            "point": entry.task.point,
            "val": entry.task.written(trial.score),
            "values": json.dumps(trial.values),
            "run": trial.run,
        }
        for entry in tuned
        for trial in entry.trials
    ]
    return pd.DataFrame(rows).to_csv(index=False)


def kept_trials(path: Path, tasks: Iterable[Task]) -> dict[str, list[Trial]]:
    """The trials in such a CSV by the name of their task, of those tasks that have all of theirs there.

    Args:
        path: of the CSV; there need not be one.
        tasks: with something to tune. One of another study than the CSV's, which is told, or with more trials, has none
            there.

    Raises:
        ConfigurationError: it is no such CSV, or has more trials of a row than are asked for.
    """
    import pandas as pd

    if not path.is_file():
        return {}
    found: dict[str, list[Trial]] = {}
    others: list[str] = []
    try:
        table = pd.read_csv(path, dtype=TYPES)
        for task in tasks:
            of_row = table[(table["method"] == task.row) & (table["dataset"] == task.group)]
            rows = of_row[of_row["study"] == task.hash].sort_values("trial")
            if len(of_row) > len(rows):
                others.append(task.row)
            if len(rows) > task.trials and not task.tries_all:
                raise ConfigurationError(
                    f"{path} has {len(rows)} trials of {task.row}, and {task.trials} are asked for, which would leave "
                    f"the others out of it; give --trials {len(rows)}, or leave out --kept"
                )
            trials = [_trial(row, task) for row in rows.to_dict("records")]
            every = not task.untried(trial.values for trial in trials)
            if every if task.tries_all else len(trials) == task.trials:
                found[task.name] = trials
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no CSV of trials ({type(error).__name__}: {error}); remove it, or leave out --kept"
        ) from error
    if others:
        said = f"{len(others)} rows have trials of other studies in {path} ({', '.join(dict.fromkeys(others))})"
        print(f"{said}: by another seed, space or configuration; they are tuned anew", flush=True)
    return found


def _trial(row: Mapping[Hashable, Any], task: Task) -> Trial:
    values = json.loads(row["values"])
    for choice in task.choices:
        choice.values.index(values[choice.option])  # a value that was not tried is refused
    score = None if math.isnan(row["val"]) else row["val"] / scaled(1.0, task.metric)
    return Trial(row["trial"], row["state"], values, row["rounds"], row["seconds"], score, row["run"])
