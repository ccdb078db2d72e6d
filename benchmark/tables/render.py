"""A table as Markdown, CSV and LaTeX, from its cells and their outcomes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmark.cells.identity import Cell
from benchmark.cells.outcome import Outcome
from benchmark.tables.across import Across, across_groups
from benchmark.tables.blocks import Block, gain_blocks, our_block, paired_blocks, paper_blocks, statistics_block
from benchmark.tables.frame import LONG_COLUMNS, long_frame
from benchmark.tables.layout import Preset, Table
from benchmark.tables.lines import Line, read_lines
from benchmark.tables.notes import code_notes, footnotes
from benchmark.tables.paper import read_paper


@dataclass(frozen=True)
class Rendered:
    """A table as Markdown, CSV (long: one line per number, :data:`LONG_COLUMNS`) and LaTeX.

    ``problems``: finished cells without the numbers that the table shows, one sentence each. ``lines``: what it was
    made of. ``across``: its rows over the data groups, where these stand in an order.
    """

    markdown: str
    csv: str
    latex: str
    problems: list[str]
    lines: list[Line]
    across: Across | None


def render(
    name: str,
    table: Table,
    preset_name: str,
    preset: Preset,
    cells: dict[tuple[str, str, int], Cell],
    outcomes: dict[str, Outcome],
    further: Callable[[Sequence[Line]], list[Block]] = lambda lines: [],
) -> Rendered:
    """The table from its cells and their outcomes.

    Args:
        name: of the table.
        table: what it is.
        preset_name: of the preset.
        preset: the same.
        cells: from :func:`benchmark.tables.cells.make_cells`.
        outcomes: from :func:`benchmark.cells.queue.run_cells`.
        further: makes blocks of the lines that stand after the table itself.

    Raises:
        ConfigurationError: the paper's CSV cannot be read, or a column names a number that is not unique.
    """
    import pandas as pd

    paper = read_paper(table.paper)
    lines = read_lines(table, preset, cells, outcomes)
    numbers = long_frame(lines, table, paper)
    groups, panels = (list(numbers.groupby(key, sort=False)) for key in ("dataset", "panel"))
    blocks = [our_block(str(panel), part) for panel, part in panels]
    blocks += further(lines)
    blocks += [statistics_block(str(dataset), part) for dataset, part in groups]
    if table.gains:
        paired = [block for panel, part in panels for block in gain_blocks(str(panel), part)]
    else:
        paired = [block for dataset, part in groups for block in paired_blocks(str(dataset), part)]
    notes = footnotes(table, preset, lines, bool(paired))
    failed = {cell.name: outcomes[cell.name] for cell in cells.values() if outcomes[cell.name].run_dir is None}
    known = {outcome.error for outcome in failed.values()}
    unread = list(dict.fromkeys(error for line in lines for error in line.errors if error not in known))
    problems = [*(f"{cell}: {outcome.error}" for cell, outcome in failed.items()), *unread]
    aside = "The paper's numbers, on other data with another backbone: not comparable with the numbers above."
    published = paper_blocks(table, paper) if not any(c.paper for g in preset.data for c in g.columns) else []
    title = title_of(table, preset_name)

    parts = [f"# {_markdown(title)}\n", *([f"{_markdown(preset.note)}\n"] if preset.note else [])]
    parts += map(markdown_block, [*blocks, *paired])
    if problems:
        parts.append("Failed:\n\n" + "".join(f"- {_markdown(problem)}\n" for problem in problems))
    parts.append("Notes:\n\n" + "".join(f"- {_markdown(note)}\n" for note in notes))
    if published:
        parts += [f"# {_markdown(aside)}\n", *map(markdown_block, published)]
    latex = [f"% {title}\n", *map(latex_block, [*blocks, *paired]), *(f"% {note}\n" for note in notes)]
    latex += [f"% failed: {problem}\n" for problem in problems]
    if published:
        latex += [f"% {aside}\n", *map(latex_block, published)]
    said = [note for note in (preset.note, *code_notes(lines)) if note]
    of_all = [{"kind": "note", "column": note} for note in said]
    of_all += [{"kind": "axis", "column": preset.axis}] if preset.axis else []
    numbers = pd.concat([numbers, pd.DataFrame(of_all)])
    numbers = numbers.assign(table=name, preset=preset_name, title=title, rows=len(numbers))
    numbers = numbers.reindex(columns=list(LONG_COLUMNS))
    csv, across = numbers.to_csv(index=False), across_groups(numbers)
    return Rendered("\n".join(parts), csv, "\n".join(latex), unread, lines, across)


def markdown_block(block: Block) -> str:
    """Return a block as Markdown under its heading."""
    shown = block.frame.map(_markdown).rename(columns=_markdown).to_markdown(index=False, disable_numparse=True)
    return f"## {_markdown(block.heading)}\n\n{shown}\n"


def latex_block(block: Block) -> str:
    """Typeset a block, with minus signs where numbers have them and hyphens in words."""
    shown = block.frame.to_markdown(index=False, disable_numparse=True, tablefmt="latex_booktabs")
    return f"% {block.heading}\n" + re.sub(r"(?<=[ (])-(?=\d)", "$-$", shown.replace("±", r"$\pm$")) + "\n"


def _markdown(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*|<>\[\]])", r"\\\1", text)


def title_of(table: Table, preset_name: str) -> str:
    """The table's title, and which preset it is; the paper's setting has the plain title."""
    known = {"demo": f"Demo: {table.title}", "paper": table.title}
    return known.get(preset_name, f"{table.title} (preset {preset_name})")
