"""The results of a tuning, as a block of the table."""

from collections.abc import Mapping, Sequence
from statistics import mean

from benchmark.records.words import digits_of
from benchmark.tables.blocks import Block
from benchmark.tables.layout import Table
from benchmark.tables.lines import Line
from benchmark.tables.numbers import mean_std, number, scaled, signed
from benchmark.tuning.trials_file import Tuned


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
        of_row, of_tuned = found[label], found.get(label + mark, {})
        both = [seed for seed in of_tuned if seed in of_row]
        states = [trial.state for trial in entry.trials]
        seconds: dict[str, float] = {}  # of a run, which several trials may be, once
        for trial in entry.trials:
            seconds[trial.run] = max(trial.seconds, seconds.get(trial.run, 0.0))
        kinds = {state: states.count(state) for state in ("pruned", "diverged")}
        kinds["repeated"] = len(states) - len(seconds)
        count = ", ".join(f"{number} {kind}" for kind, number in kinds.items() if number)
        score = scaled(entry.best.score if entry.best else None, table.metric)
        rows.append(
            {
                "Method": label,
                **({"Data": entry.task.group} if several else {}),
                "Trials": (f"{len(states)}" + (f" ({count})" if count else ""))
                if entry.task.choices
                else "nothing to tune",
                "Seconds": number(sum(seconds.values()), 0),
                "Chosen values": ", ".join(
                    f"{option.removeprefix('model.init_args.')} {value}"
                    for option, value in (entry.best.values if entry.best else {}).items()
                ),
                "Val": number(score, digits),
                f"{split}, tuned": mean_std(list(of_tuned.values()), digits),
                f"{split}, untuned": mean_std(list(of_row.values()), digits),
                "Difference": signed(mean(of_tuned[seed] - of_row[seed] for seed in both), digits) if both else "",
            }
        )
    return Block("Tuning", pd.DataFrame(rows))


def _averages(line: Line, table: Table) -> dict[int, float]:
    """The table's metric, averaged over clients, by finished seed."""
    return {
        entry.seed: entry.value
        for entry in line.numbers
        if (entry.kind, entry.summary, entry.column) == ("statistic", table.summary, "average")
    }
