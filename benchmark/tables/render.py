"""A table as Markdown, CSV and LaTeX, from its cells and their outcomes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.cells.identity import Cell
from benchmark.cells.outcome import Outcome
from benchmark.records.record import RunRecord
from benchmark.records.stored_run import stored_run
from benchmark.tables.blocks import Block, our_block, paired_block, paper_blocks, statistics_block
from benchmark.tables.frame import LONG_COLUMNS, long_rows
from benchmark.tables.layout import Preset, Table, rows_of
from benchmark.tables.lines import Read, expanded, read_line
from benchmark.tables.notes import footnotes
from benchmark.tables.paper import read_paper


@dataclass(frozen=True)
class Rendered:
    """A table as Markdown, CSV (long: one line per number, :data:`LONG_COLUMNS`) and LaTeX.

    ``problems``: finished cells without the numbers that the table shows, one sentence each.
    """

    markdown: str
    csv: str
    latex: str
    problems: list[str]


def render(
    name: str,
    table: Table,
    preset_name: str,
    preset: Preset,
    cells: dict[tuple[str, str, int], Cell],
    outcomes: dict[str, Outcome],
) -> Rendered:
    """The table from its cells and their outcomes.

    Args:
        name: of the table.
        table: what it is.
        preset_name: of the preset.
        preset: the same.
        cells: from :func:`benchmark.tables.cells.make_cells`.
        outcomes: from :func:`benchmark.cells.queue.run_cells`.

    Raises:
        ConfigurationError: the paper's CSV cannot be read, or a column names a number that is not unique.
    """
    import pandas as pd
    from tabulate import tabulate

    paper = read_paper(table.paper)
    reads: list[Read] = []
    records: dict[Path, RunRecord] = {}
    failed: dict[str, Outcome] = {}
    rows = rows_of(table, preset)
    for group in preset.data:
        by_row = []
        for row in rows:
            names = {seed: cells[group.name, row.label, seed].name for seed in preset.seeds}
            by_row.append({seed: outcomes[cell] for seed, cell in names.items()})
            failed |= {cell: outcomes[cell] for cell in names.values() if outcomes[cell].run_dir is None}
        by_row = _of_the_same_images(by_row)
        finished = [outcome.run_dir for entry in by_row for outcome in entry.values() if outcome.run_dir]
        here = {run_dir: stored_run(run_dir).record for run_dir in finished}
        records |= here
        columns = expanded(group, list(here.values()))
        lines = [
            read_line(row, reading, point, columns, entry, table)
            for row, entry in zip(rows, by_row, strict=True)
            for reading, point in {"": row.point, **row.also}.items()
        ]
        reads.append(Read(group, columns, lines))
    panels: dict[str, list[Read]] = {}
    for read in reads:
        panels.setdefault(read.group.panel or read.group.label, []).append(read)
    blocks = [our_block(panel, part, paper, table) for panel, part in panels.items()]
    blocks += [statistics_block(read, table) for read in reads]
    paired = [] if table.baseline is None else [paired_block(read, table.baseline, table) for read in reads]
    blocks += [block for block in paired if block is not None]
    long = [row for read in reads for row in long_rows(read, table, paper, table.baseline)]
    title = title_of(table, preset_name)
    long += [{"kind": "note", "column": preset.note}] if preset.note else []
    frame = pd.DataFrame(long).assign(table=name, preset=preset_name, title=title)
    any_paired = any(block is not None for block in paired)
    notes = footnotes(table, preset, reads, list(records.values()), any_paired)
    problems = [f"{cell}: {outcome.error}" for cell, outcome in failed.items()]
    known = {outcome.error for outcome in failed.values()}
    unread = [error for read in reads for line in read.lines for error in line.errors if error not in known]
    problems += unread
    published_blocks = paper_blocks(table, paper) if not any(c.paper for g in preset.data for c in g.columns) else []
    aside = "The paper's numbers, on other data with another backbone: not comparable with the numbers above."

    def markdown_block(block: Block) -> str:
        body = [[_markdown(cell) for cell in line] for line in block.body]
        shown = tabulate(body, [_markdown(cell) for cell in block.header], tablefmt="pipe", disable_numparse=True)
        return f"## {_markdown(block.heading)}\n\n{shown}\n"

    def latex_block(block: Block) -> str:
        shown = tabulate(block.body, block.header, tablefmt="latex_booktabs", disable_numparse=True)
        return f"% {block.heading}\n" + re.sub(r"(?<= )-(?=\d)", "$-$", shown.replace("±", r"$\pm$")) + "\n"

    parts = [f"# {_markdown(title)}\n", *([f"{_markdown(preset.note)}\n"] if preset.note else [])]
    parts += [markdown_block(block) for block in blocks]
    if problems:
        parts.append("Failed:\n\n" + "".join(f"- {_markdown(problem)}\n" for problem in dict.fromkeys(problems)))
    parts.append("Notes:\n\n" + "".join(f"- {_markdown(note)}\n" for note in notes))
    if published_blocks:
        parts += [f"# {_markdown(aside)}\n", *map(markdown_block, published_blocks)]
    latex = [f"% {title}\n", *map(latex_block, blocks), *(f"% {note}\n" for note in notes)]
    latex += [f"% failed: {problem}\n" for problem in dict.fromkeys(problems)]
    if published_blocks:
        latex += [f"% {aside}\n", *map(latex_block, published_blocks)]
    frame = frame.reindex(columns=list(LONG_COLUMNS)).astype({"seeds": "Int64"})
    unread = list(dict.fromkeys(unread))
    return Rendered("\n".join(parts), frame.to_csv(index=False), "\n".join(latex), unread)


def _markdown(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*|<>\[\]])", r"\\\1", text)


def title_of(table: Table, preset_name: str) -> str:
    """The table's title, and which preset it is; the paper's setting has the plain title."""
    known = {"demo": f"Demo: {table.title}", "paper": table.title}
    return known.get(preset_name, f"{table.title} (preset {preset_name})")


def _of_the_same_images(by_row: Sequence[dict[int, Outcome]]) -> list[dict[int, Outcome]]:
    """The outcomes of a data group per row and seed, without those on other images than its first finished run.

    Images of one name from another folder would count as another seed. Records of before don't name their images.
    """
    runs = [outcome.run_dir for entry in by_row for outcome in entry.values() if outcome.run_dir]
    images = {run: stored_run(run).record.images_sha256 for run in runs}
    first = next((run for run in runs if images[run]), None)

    def checked(outcome: Outcome) -> Outcome:
        run = outcome.run_dir
        if run is None or first is None or images[run] in (None, images[first]):
            return outcome
        return Outcome(
            None, f"{run} was run on other images than {first} ({images[run]:.8} and {images[first]:.8}); remove one"
        )

    return [{seed: checked(outcome) for seed, outcome in entry.items()} for entry in by_row]
