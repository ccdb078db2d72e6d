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
from benchmark.tables.frame import LONG_COLUMNS, long_frame
from benchmark.tables.layout import Preset, Table, rows_of
from benchmark.tables.lines import Line, expanded, read_seeds
from benchmark.tables.notes import footnotes
from benchmark.tables.paper import read_paper


@dataclass(frozen=True)
class Rendered:
    """A table as Markdown, CSV (long: one line per number, :data:`LONG_COLUMNS`) and LaTeX.

    ``problems``: finished cells without the numbers that the table shows, one sentence each. ``lines``: what it was
    made of.
    """

    markdown: str
    csv: str
    latex: str
    problems: list[str]
    lines: list[Line]


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

    paper = read_paper(table.paper)
    lines, records, failed = _read(table, preset, cells, outcomes)
    numbers = long_frame(lines, table, paper)
    groups = list(numbers.groupby("dataset", sort=False))
    blocks = [our_block(str(panel), part) for panel, part in numbers.groupby("panel", sort=False)]
    blocks += [statistics_block(str(dataset), part) for dataset, part in groups]
    paired = [block for dataset, part in groups if (block := paired_block(str(dataset), part)) is not None]
    notes = footnotes(table, preset, lines, records, bool(paired))
    known = {outcome.error for outcome in failed.values()}
    unread = list(dict.fromkeys(error for line in lines for error in line.errors if error not in known))
    problems = [*(f"{cell}: {outcome.error}" for cell, outcome in failed.items()), *unread]
    aside = "The paper's numbers, on other data with another backbone: not comparable with the numbers above."
    published = paper_blocks(table, paper) if not any(c.paper for g in preset.data for c in g.columns) else []
    title = title_of(table, preset_name)

    parts = [f"# {_markdown(title)}\n", *([f"{_markdown(preset.note)}\n"] if preset.note else [])]
    parts += map(_markdown_block, [*blocks, *paired])
    if problems:
        parts.append("Failed:\n\n" + "".join(f"- {_markdown(problem)}\n" for problem in problems))
    parts.append("Notes:\n\n" + "".join(f"- {_markdown(note)}\n" for note in notes))
    if published:
        parts += [f"# {_markdown(aside)}\n", *map(_markdown_block, published)]
    latex = [f"% {title}\n", *map(_latex_block, [*blocks, *paired]), *(f"% {note}\n" for note in notes)]
    latex += [f"% failed: {problem}\n" for problem in problems]
    if published:
        latex += [f"% {aside}\n", *map(_latex_block, published)]
    numbers = pd.concat([numbers, pd.DataFrame([{"kind": "note", "column": preset.note}] if preset.note else [])])
    numbers = numbers.assign(table=name, preset=preset_name, title=title).reindex(columns=list(LONG_COLUMNS))
    return Rendered("\n".join(parts), numbers.to_csv(index=False), "\n".join(latex), unread, lines)


def _read(
    table: Table, preset: Preset, cells: dict[tuple[str, str, int], Cell], outcomes: dict[str, Outcome]
) -> tuple[list[Line], list[RunRecord], dict[str, Outcome]]:
    """All lines of the table, the records of its runs, and the cells that have none."""
    labels = {group.label for group in preset.data}
    rows = rows_of(table, preset)
    lines: list[Line] = []
    records: dict[Path, RunRecord] = {}
    failed: dict[str, Outcome] = {}
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
        # Groups of two panels can have one label.
        dataset = group.label if len(labels) == len(preset.data) else f"{group.panel}, {group.label}"
        for row, entry in zip(rows, by_row, strict=True):
            for reading, point in {"": row.point, **row.also}.items():
                line = Line(len(lines), group, dataset, columns, row.label, reading, point, len(entry))
                lines.append(read_seeds(line, entry, table))
    return lines, list(records.values()), failed


def _markdown_block(block: Block) -> str:
    shown = block.frame.map(_markdown).rename(columns=_markdown).to_markdown(index=False, disable_numparse=True)
    return f"## {_markdown(block.heading)}\n\n{shown}\n"


def _latex_block(block: Block) -> str:
    shown = block.frame.to_markdown(index=False, disable_numparse=True, tablefmt="latex_booktabs")
    return f"% {block.heading}\n" + re.sub(r"(?<= )-(?=\d)", "$-$", shown.replace("±", r"$\pm$")) + "\n"


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
