"""The blocks of a table as text: ours beside the paper's, statistics and costs, paired comparisons.

``numbers`` are rows of :func:`benchmark.tables.frame.long_frame`, of one panel or one data group.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmark.metrics import within_clients
from benchmark.records.words import digits_of
from benchmark.tables.layout import Table
from benchmark.tables.numbers import each_once, floats, number, published_number, signed, with_std

if TYPE_CHECKING:  # slow to import
    import pandas as pd


AVERAGE_COLUMNS = {
    "Last": "last",
    "Last ten": "last10",
    "Best (chosen on test data)": "best_on_test",
}
"""Summary of each column with an average over clients; beside them stand the other statistics, of the table's own."""


@dataclass(frozen=True)
class Block:
    """A heading, and under it a table of texts."""

    heading: str
    frame: "pd.DataFrame"


def our_block(panel: str, numbers: "pd.DataFrame") -> Block:
    """The data groups of a panel side by side: per method a line of ours and, where the paper has numbers, its line and
    the difference.
    """
    import pandas as pd

    numbers = numbers[numbers["kind"] == "column"]
    compared = bool(numbers["paper"].notna().any())
    if numbers["dataset"].nunique() > 1:
        alone = numbers.groupby("dataset")["column"].transform("nunique") == 1
        named = numbers["label"].where(alone, numbers["label"] + ": " + numbers["column"])
        numbers = numbers.assign(column=named)
    rows: list[dict[str, Any]] = []
    for name, line in numbers.groupby("name", sort=False):
        asked = line["asked"].max()
        done = min(line.loc[line["finished"] > 0, "finished"], default=asked)  # a row without any says "failed"
        missing = f" ({done} of {asked} seeds)" if done < asked else ""
        mixed = f" (seeds of {line['codes'].max()} codes)" if line["codes"].max() > 1 else ""
        ours = {each["column"]: _mean_std(each) if each["finished"] else "failed" for each in line.to_dict("records")}
        runs = line[line["finished"] > 0].drop_duplicates("dataset")
        costs = {
            "Floats up": each_once(runs["floats_up"].map(floats)),
            "MB up + down": each_once(number(value / 1e6, 3) for value in runs["bytes_up"] + runs["bytes_down"]),
            "Rounds": each_once(runs["rounds"]),
            "Seconds": each_once(number(value, 0) for value in runs["seconds"]),
        }
        source = {"Source": "ours"} if compared else {}
        rows.append({"Method": f"{name}{missing}{mixed}", **source, **ours, **costs})
        cost = each_once(published_number(value) for value in line["cost"].dropna().unique())
        if compared and (cost or line["paper"].notna().any()):
            theirs, gaps = line["paper"].map(published_number), line["difference"].map(signed)
            rows.append({"Source": "paper", **dict(zip(line["column"], theirs, strict=True)), "Floats up": cost})
            rows.append({"Source": "difference", **dict(zip(line["column"], gaps, strict=True))})
    best = ", best round, chosen on test data" if (numbers["summary"] == "best_on_test").all() else ""
    return Block(panel + best, pd.DataFrame(rows).fillna(""))


def statistics_block(dataset: str, numbers: "pd.DataFrame") -> Block:
    """Rounds, clients and costs of each method on one data group."""
    import pandas as pd

    own = numbers.loc[numbers["kind"] == "column", "summary"].iloc[0]
    columns = {heading: (summary, "average") for heading, summary in AVERAGE_COLUMNS.items()}
    columns |= {each.words.capitalize(): (own, each.name) for each in within_clients()}
    rows = []
    for name, line in numbers[numbers["finished"] > 0].groupby("name", sort=False):
        found = {
            (each["summary"], each["column"]): _mean_std(each)
            for each in line[line["kind"] == "statistic"].to_dict("records")
        }
        run = line.iloc[0]
        rows.append(
            [
                name,
                *(found.get(column, "") for column in columns.values()),
                number(run["bytes_up"] / 1e3, 1),
                number(run["bytes_down"] / 1e3, 1),
                number(run["seconds"], 0),
                number(run["peak_memory_bytes"] / 1e6, 0),
            ]
        )
    header = ["Method", *columns, "kB up", "kB down", "Seconds", "Peak MB"]
    return Block(f"{dataset}: rounds, clients and costs", pd.DataFrame(rows, columns=header))


def paired_blocks(dataset: str, numbers: "pd.DataFrame") -> list[Block]:
    """Every method minus a baseline, paired by seed and client; a block for each baseline there is."""
    import pandas as pd

    blocks = []
    for column, paired in numbers[numbers["kind"] == "paired"].groupby("column", sort=False):
        rows = []
        for each in paired.to_dict("records"):
            digits = digits_of(each["metric"])
            low, high = signed(each["low"], digits), signed(each["high"], digits)
            rows.append(
                {
                    "Method": each["name"],
                    "Difference": signed(each["ours"], digits),
                    "95 % interval": f"{low} to {high}" if low else "",
                    "Pairs": f"{each['pairs']:.0f}",
                    "Seeds": f"{each['seeds']:.0f}",
                    "Interval over": each["over"],
                }
            )
        heading = f"{dataset}: against {str(column).removeprefix('minus ')}, paired"
        blocks.append(Block(heading, pd.DataFrame(rows)))
    return blocks


def gain_blocks(panel: str, numbers: "pd.DataFrame") -> list[Block]:
    """Every method minus a baseline in each data group of a panel, with its 95 % interval; a matrix a baseline."""
    numbers = numbers[numbers["kind"] == "paired"]
    digits = numbers["metric"].map(digits_of)
    shown = [
        f"{signed(ours, n)} ({signed(low, n)} to {signed(high, n)})" if low == low else signed(ours, n)
        for ours, low, high, n in zip(numbers["ours"], numbers["low"], numbers["high"], digits, strict=True)
    ]
    blocks = []
    for column, part in numbers.assign(shown=shown).groupby("column", sort=False):
        wide = part.pivot(index="name", columns="label", values="shown").fillna("")
        wide = wide.loc[part["name"].unique(), part["label"].unique()]
        heading = f"{panel}: gain over {str(column).removeprefix('minus ')}, paired, with its 95 % interval"
        blocks.append(Block(heading, wide.rename_axis("Method").reset_index()))
    return blocks


def paper_blocks(table: Table, paper: "pd.DataFrame") -> list[Block]:
    """The paper's own numbers for the table's methods, one block per data set of its CSV."""
    labels = [row.label for row in table.rows]
    paper = paper[paper["method"].isin(labels)].fillna({"backbone": "", "setting": "", "metric": ""})
    blocks = []
    for dataset, part in paper.groupby("dataset", sort=False):
        names = [name for name in ("setting", "metric", "backbone") if part[name].nunique() > 1 or name == "setting"]
        part = part.assign(column=part[names].agg(", ".join, axis=1)).drop_duplicates(["method", "column"], keep="last")
        wide = part.pivot(index="method", columns="column", values="value")[part["column"].unique()]
        wide = wide.loc[[label for label in labels if label in wide.index]].map(published_number)
        blocks.append(Block(f"{dataset} (paper)", wide.rename_axis("Method").reset_index()))
    return blocks


def _mean_std(number: dict[Hashable, Any]) -> str:
    return with_std(number["ours"], number["std"], digits_of(number["metric"]))
