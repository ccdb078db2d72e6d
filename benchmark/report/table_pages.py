"""Tables on the page, from their CSVs."""

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.report.html import cell, heading, row, scroll, table
from benchmark.report.readings import ROUNDS
from benchmark.tables.blocks import our_block, paired_blocks, statistics_block
from benchmark.tables.frame import read_long_frame

if TYPE_CHECKING:  # slow to import
    import pandas as pd


def table_page(path: Path) -> tuple[str, str]:
    """Title and content of a table's CSV, as :mod:`benchmark.tables.frame` makes it.

    Raises:
        ConfigurationError: it is no such CSV.
    """
    numbers = read_long_frame(path)
    notes = [f"Preset {numbers['preset'].iloc[0]}.", *numbers.loc[numbers["kind"] == "note", "column"]]
    parts = [_group(str(name), part, " ".join(notes)) for name, part in numbers.groupby("dataset", sort=False)]
    errors = [f"<li>{escape(text)}</li>" for text in numbers["error"].unique() if text]
    failed = f'<h3>Failed</h3><ul class="failed">{"".join(errors)}</ul>' if errors else ""
    files = ", ".join(f"<code>{escape(path.with_suffix(suffix).name)}</code>" for suffix in (".md", ".csv", ".tex"))
    return str(numbers["title"].iloc[0]), "".join(parts) + failed + f'<p class="note">In results/tables: {files}.</p>'


def _group(name: str, numbers: "pd.DataFrame", note: str) -> str:
    """One data group of a table; what stands beside the paper's numbers says at which size it was run."""
    which = ROUNDS.get(numbers["summary"].iloc[0], "unknown rounds")
    ours, statistics = our_block(name, numbers), statistics_block(name, numbers)
    compared = "" if "Source" in ours.frame else " Nothing here can be compared with the paper's numbers."
    parts = [f'<h3>{escape(name)}</h3><p class="note">{escape(note)} Of the {which}.{compared}</p>']
    parts.append(scroll(_beside_the_paper(ours.frame), name))
    if len(statistics.frame):
        note = f"Averages over clients; worst client, worst decile and spread are of the {which}."
        parts.append(f'<h4>Rounds, clients and costs</h4><p class="note">{note}</p>')
        parts.append(scroll(_sortable(statistics.frame), statistics.heading))
    for paired in paired_blocks(name, numbers):
        note = (
            "Same seed, same client: method minus baseline. A t-interval over clients and, with several seeds, seeds."
        )
        parts.append(f'<h4>{escape(paired.heading)}</h4><p class="note">{note}</p>')
        parts.append(scroll(_sortable(paired.frame.drop(columns="Interval over")), paired.heading))
    return "".join(parts)


def _sortable(texts: "pd.DataFrame") -> str:
    heads = [heading(label, label not in ("Method", "95 % interval")) for label in texts.columns.astype("str")]
    return table(heads, [row(escape(name), map(cell, others)) for name, *others in texts.to_numpy()])


def _beside_the_paper(texts: "pd.DataFrame") -> str:
    """Ours, and below a method's line those of the paper and of the difference."""
    sources = texts.pop("Source") if "Source" in texts else texts["Method"].mask(texts["Method"] != "", "ours")
    followed = sources.shift(-1) == "paper"
    rows = [
        row(escape(name or source), map(cell, others), f' class="{"with-paper" if paper else f"of-{source}"}"')
        for (name, *others), source, paper in zip(texts.to_numpy(), sources, followed, strict=True)
    ]
    heads = [f'<th scope="col">{escape(label)}</th>' for label in texts.columns.astype("str")]
    return table(heads, rows, "")
