"""What a tuning came to: a block of the table, and all trials as CSV."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from benchmark.tables.blocks import Block
from benchmark.tables.layout import Table
from benchmark.tables.lines import Line
from benchmark.tables.numbers import digits_of, mean_std, number, scaled, signed
from benchmark.tuning.study import Task, Trial


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


def tuning_block(tuned: Mapping[tuple[str, str], Tuned], lines: Sequence[Line], table: Table, mark: str) -> Block:
    """Of each row its trials, their seconds, the chosen values, and what these came to beside the row's own.

    Args:
        tuned: by name of the data group and label of the row.
        lines: of the table with rows tuned and untuned.
        table: the same.
        mark: what stands behind the label of a tuned row.
    """
    import pandas as pd

    digits, split = digits_of(table.metric), table.split.capitalize()
    several = len({group for group, _ in tuned}) > 1
    rows = []
    for (group, label), entry in tuned.items():
        found = {line.method: _averages(line, table) for line in lines if line.group.name == group and not line.reading}
        of_row, of_tuned = found[label], found.get(label + mark, [])
        states = [trial.state for trial in entry.trials]
        count = ", ".join(f"{states.count(state)} {state}" for state in ("pruned", "diverged") if state in states)
        score = scaled(entry.best.score if entry.best else None, table.metric)
        rows.append(
            {
                "Method": label,
                **({"Data": entry.task.group} if several else {}),
                "Trials": (f"{len(states)}" + (f" ({count})" if count else ""))
                if entry.task.choices
                else "nothing to tune",
                "Seconds": number(sum(trial.seconds for trial in entry.trials), 0),
                "Chosen values": ", ".join(
                    f"{option.removeprefix('model.init_args.')} {value}"
                    for option, value in (entry.best.values if entry.best else {}).items()
                ),
                "Val": number(score, digits),
                f"{split}, tuned": mean_std(of_tuned, digits),
                f"{split}, untuned": mean_std(of_row, digits),
                "Difference": signed(mean(of_tuned) - mean(of_row), digits) if of_tuned and of_row else "",
            }
        )
    return Block("Tuning", pd.DataFrame(rows))


def trials_csv(tuned: Mapping[tuple[str, str], Tuned]) -> str:
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
            "val": scaled(trial.score, entry.task.metric),
            "values": json.dumps(trial.values),
            "run": trial.run,
        }
        for entry in tuned.values()
        for trial in entry.trials
    ]
    return pd.DataFrame(rows).to_csv(index=False)


def _averages(line: Line, table: Table) -> list[float]:
    """The table's metric, averaged over clients, of each finished seed."""
    return [
        entry.value
        for entry in line.numbers
        if (entry.kind, entry.summary, entry.column) == ("statistic", table.summary, "average")
    ]
