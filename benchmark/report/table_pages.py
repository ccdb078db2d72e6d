"""Tables on the page, from their CSVs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.metrics import listed_within
from benchmark.records.words import ROUND_WORDS
from benchmark.report.across_charts import across_charts
from benchmark.report.charts import Chart
from benchmark.report.grid import Grid, anchor_of, grid
from benchmark.tables.across import across_groups
from benchmark.tables.blocks import our_block, paired_blocks, statistics_block
from benchmark.tables.frame import read_long_frame

if TYPE_CHECKING:  # slow to import
    import pandas as pd

PAIRED = "Same seed, same client: method minus baseline. A t-interval over clients and, with several seeds, seeds."


@dataclass(frozen=True)
class Part:
    """A heading, a note and the numbers below it."""

    heading: str
    note: str
    numbers: Grid
    deeper: bool = False


@dataclass(frozen=True)
class TablePage:
    """A table of the repository.

    Attributes:
        anchor: of its section.
        title: with the preset.
        preset: its name.
        note: how the preset differs from the paper's setting; empty where it says nothing.
        parts: its data groups.
        charts: its rows over the data groups, where these stand in an order.
        errors: what failed in it.
        files: names of its forms in ``results/tables``.
    """

    anchor: str
    title: str
    preset: str
    note: str
    parts: Sequence[Part]
    charts: Sequence[Chart]
    errors: Sequence[str]
    files: Sequence[str]

    @property
    def demo(self) -> bool:
        return self.preset == "demo"


def table_page(path: Path) -> TablePage:
    """A table's CSV, as :mod:`benchmark.tables.frame` makes it.

    Raises:
        ConfigurationError: it is no such CSV.
    """
    numbers = read_long_frame(path)
    preset = str(numbers["preset"].iloc[0])
    note = " ".join(map(str, numbers.loc[numbers["kind"] == "note", "column"]))
    said = f"Preset {preset}. {note}".strip()
    parts = [part for name, group in numbers.groupby("dataset", sort=False) for part in _parts(str(name), group, said)]
    title = str(numbers["title"].iloc[0])
    files = [path.with_suffix(suffix).name for suffix in (".md", ".csv", ".tex")]
    errors = [text for text in numbers["error"].unique() if text]
    across = across_groups(numbers)
    drawn = [] if across is None else across_charts(across)
    return TablePage(anchor_of("table", path.stem), title, preset, note, parts, drawn, errors, files)


def _parts(name: str, numbers: "pd.DataFrame", note: str) -> Iterator[Part]:
    """One data group of a table; what stands beside the paper's numbers says at which size it was run."""
    which = ROUND_WORDS.get(numbers["summary"].iloc[0], "unknown rounds")
    ours, statistics = our_block(name, numbers), statistics_block(name, numbers)
    compared = "" if "Source" in ours.frame else " Nothing here can be compared with the paper's numbers."
    yield Part(name, f"{note} Of the {which}.{compared}", _beside_the_paper(name, ours.frame))
    if len(statistics.frame):
        note = f"Averages over clients; {listed_within()} are of the {which}."
        yield Part("Rounds, clients and costs", note, _sortable(statistics.heading, statistics.frame), deeper=True)
    for paired in paired_blocks(name, numbers):
        yield Part(paired.heading, PAIRED, _sortable(paired.heading, paired.frame), deeper=True)


def _sortable(label: str, texts: "pd.DataFrame") -> Grid:
    return grid(label, texts.columns, texts.to_numpy())


def _beside_the_paper(label: str, texts: "pd.DataFrame") -> Grid:
    """Ours, and below a method's line those of the paper and of the difference."""
    sources = texts.pop("Source") if "Source" in texts else texts["Method"].mask(texts["Method"] != "", "ours")
    followed = sources.shift(-1) == "paper"
    kinds = ["with-paper" if paper else f"of-{source}" for source, paper in zip(sources, followed, strict=True)]
    texts["Method"] = texts["Method"].where(texts["Method"] != "", sources)
    return replace(_sortable(label, texts), kinds=kinds, sorts=False)
