"""The long form of a table: one row per number, which everything else is made of."""

from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.errors import ConfigurationError
from benchmark.files import read_regular, reason
from benchmark.tables.layout import PaperNumber, Table
from benchmark.tables.lines import Line, Number
from benchmark.tables.numbers import each_once, span
from benchmark.tables.paired import paired_comparison
from benchmark.tables.paper import paper_value

if TYPE_CHECKING:  # slow to import
    import pandas as pd


LONG_COLUMNS = (
    *("table", "preset", "title", "kind", "dataset", "method", "reading", "point", "split", "metric", "summary"),
    *("column", "ours", "std", "seeds", "paper", "difference", "low", "high", "pairs", "over"),
    *("floats_up", "bytes_up", "bytes_down", "rounds", "seconds", "peak_memory_bytes", "error"),
    *("asked", "finished", "codes", "rows"),
)
"""Columns of a table's CSV. ``kind``: "column" is a number of the table itself, "statistic" one over clients for each
summary, "paired" a difference to the baseline with its interval ``low`` to ``high`` ``over`` clients, seeds or both,
"note" the preset's note or one on the seeds' code, "axis" how the data groups differ where they stand in an order (the
text of both stands under ``column``). Of its line, ``asked`` and ``finished`` count the seeds, ``codes`` the codes that
made them. ``rows`` is how many rows the file has. Accuracies in per cent."""

MOST_BYTES = 2**24  # of a table's CSV
NUMBER = ["line", "kind", "summary", "column"]
COSTS = ["floats_up", "bytes_up", "bytes_down", "seconds", "peak_memory_bytes"]
_COUNTS = ["seeds", "asked", "finished", "codes", "rows"]
_FLOATS = ["ours", "std", "paper", "difference", "low", "high", "pairs", *COSTS]
_TYPES = dict.fromkeys(LONG_COLUMNS, "str") | dict.fromkeys(_COUNTS, "Int64") | dict.fromkeys(_FLOATS, "float64")


def long_frame(lines: Sequence[Line], table: Table, paper: "pd.DataFrame") -> "pd.DataFrame":
    """All numbers of a table over their seeds, in the order of the lines: columns, statistics, comparison.

    Beside :data:`LONG_COLUMNS`, but for those of the whole table, stand the data group's ``panel`` and its ``label`` in
    it, the line's ``name`` and ``cost`` (the paper's floats up).

    Raises:
        ConfigurationError: several published numbers fit a column.
    """
    import pandas as pd

    def published(line: Line, number: PaperNumber | None) -> float | None:
        return None if number is None or line.reading else paper_value(paper, line.method, number)

    numbers = pd.DataFrame([number for line in lines for number in line.numbers], columns=Number._fields)
    over = over_seeds(numbers)
    columns = pd.DataFrame(
        [
            {
                "line": line.position,
                "kind": "column",
                "summary": table.summary,
                "column": column.heading,
                "split": column.split or table.split,
                "metric": column.metric or table.metric,
                "paper": published(line, column.paper),
            }
            for line in lines
            for column in line.columns
        ],
        columns=["line", "kind", "summary", "column", "split", "metric", "paper"],
    )
    statistics = numbers.loc[numbers["kind"] == "statistic", NUMBER].drop_duplicates()
    shown = pd.concat([columns, statistics]).join(over, on=NUMBER)
    shown["difference"] = shown["ours"] - shown["paper"].astype("float64")
    of_lines = pd.DataFrame(
        [
            {
                "dataset": line.dataset,
                "label": line.group.label,
                "panel": line.group.panel or line.dataset,
                "name": line.name,
                "method": line.method,
                "reading": line.reading,
                "point": line.point,
                "asked": line.seeds,
                "finished": len(line.runs),
                "codes": len(line.seeds_by_code),
                "cost": published(line, line.group.cost),
                "rounds": span([record.rounds_trained for record in line.records.values()]),
                "error": each_once(line.errors),
            }
            for line in lines
        ]
    )
    costs = over.reset_index().query("kind == 'cost'").pivot(index="line", columns="column", values="ours")
    frame = pd.concat([shown, _paired(lines, table)]).join(of_lines.join(costs.reindex(columns=COSTS)), on="line")
    frame["kind"] = pd.Categorical(frame["kind"], ["column", "statistic", "paired"])
    frame["seeds"] = frame["seeds"].fillna(frame["finished"]).astype("Int64")
    frame = frame.fillna({"split": table.split, "metric": table.metric})
    return frame.sort_values(["line", "kind"], kind="stable", ignore_index=True)


def read_long_frame(path: Path) -> "pd.DataFrame":
    """A table's CSV, as :func:`long_frame` and the note made it.

    What a CSV does not say: each data group is a panel of its own.

    Raises:
        ConfigurationError: it is no such CSV, or not the whole of one.
    """
    import pandas as pd

    try:
        text = read_regular(path, MOST_BYTES).decode()
        numbers = pd.read_csv(StringIO(text), dtype=_TYPES, keep_default_na=False, na_values=[""])[list(LONG_COLUMNS)]
        if not text.endswith("\n") or not (numbers["rows"] == len(numbers)).all():
            raise ValueError("it is not whole")
        said = numbers[~numbers["kind"].isin(["note", "axis"])]
        shown = said.loc[said["kind"] == "column", "dataset"]
        if shown.empty or not said["dataset"].isin(shown).all() or said["method"].isna().any():
            raise ValueError("a data group has no numbers, or a number no method")
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is not a table's CSV of this version ({type(error).__name__}: {reason(error)}); make it again "
            "with `benchmark table`"
        ) from error
    numbers = numbers.fillna(dict.fromkeys(["title", "reading", "rounds", "error", "over"], ""))
    further = numbers["reading"].where(numbers["reading"] == "", ", " + numbers["reading"])
    return numbers.assign(name=numbers["method"] + further, label=numbers["dataset"], cost=None)


def over_seeds(numbers: "pd.DataFrame") -> "pd.DataFrame":
    """Mean ``ours`` and standard deviation ``std`` over seeds, by :data:`NUMBER`.

    The denominator is n - 1, and the deviation of one seed NaN. Where a seed's number is NaN, so are both.
    """
    import pandas as pd

    seeds = numbers.pivot(index=NUMBER, columns="seed", values="value")
    known = seeds.count(axis=1) == numbers.groupby(NUMBER).size()
    return pd.DataFrame({"ours": seeds.mean(axis=1).where(known), "std": seeds.std(axis=1).where(known)})


def _paired(lines: Sequence[Line], table: Table) -> "pd.DataFrame":
    """Every line minus each baseline of its data group, over the seeds that both ran on the same partition."""
    import pandas as pd

    rows = []
    for name in table.baselines:
        baselines = {line.dataset: line for line in lines if line.method == name and not line.reading}
        for line in lines:
            baseline = baselines.get(line.dataset)
            if baseline is None or baseline is line:
                continue
            partitions = {seed: record.manifest_hash for seed, record in line.records.items()}
            known = {seed: record.manifest_hash for seed, record in baseline.records.items()}
            shared = [seed for seed, partition in partitions.items() if known.get(seed) == partition]
            ours, theirs = ([side.clients[seed] for seed in shared] for side in (line, baseline))
            # Seeds of several partitions may have clients in common all the same, as where only the shots differ.
            same = len({len(side) for side in ours}) == 1
            try:
                found = asdict(paired_comparison(ours, theirs, same_clients=same))
            except ValueError:  # no seed, or a seed where no client has a value on both sides
                continue
            at = {"line": line.position, "kind": "paired", "summary": table.summary, "column": f"minus {name}"}
            rows.append({**at, **found, "ours": found["mean"]})
    return pd.DataFrame(rows, columns=[*NUMBER, "ours", "low", "high", "pairs", "seeds", "over"])
