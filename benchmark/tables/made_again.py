"""Compare a table made again with its files, apart from what every run measures anew."""

import re
from io import StringIO
from pathlib import Path

from benchmark.tables.render import Rendered

#: Columns of the CSV, headings of Markdown and LaTeX, and beginnings of notes that depend on the machine and its load.
#: A run's code stands among the notes: where another revision gives the same numbers, they are still the first one's.
COLUMNS, HEADINGS, NOTES = ("seconds", "peak_memory_bytes"), ("Seconds", "Peak MB"), ("Hardware: ", "Code: ")
_NOTE = re.compile(rf"[-%] (?:{'|'.join(NOTES)})")
_SEPARATOR = re.compile(r"(?<!\\)[|&]|\\\\")


def says_the_same(rendered: Rendered, paths: dict[str, Path]) -> bool:
    """Return whether a table's files hold what was rendered, seconds, memory, hardware and revision aside.

    Args:
        rendered: the table.
        paths: of its files, by suffix: md, csv and tex.
    """
    try:
        before = {suffix: path.read_text(encoding="utf-8") for suffix, path in paths.items()}
    except (OSError, UnicodeError):
        return False
    texts = ((before["md"], rendered.markdown), (before["tex"], rendered.latex))
    return all(_unmeasured(old) == _unmeasured(new) for old, new in texts) and _equal(before["csv"], rendered.csv)


def _unmeasured(text: str) -> list[list[str]]:
    """Split a table in Markdown or LaTeX into lines of cells, and leave out what was measured."""
    lines: list[list[str]] = []
    measured: set[int] = set()
    for line in text.splitlines():
        cells = [cell.strip() for cell in _SEPARATOR.split(line)]
        if set(cells) & set(HEADINGS):
            measured = {place for place, cell in enumerate(cells) if cell in HEADINGS}
        elif len(cells) == 1 and not line.startswith("\\"):  # between two blocks, and no rule of LaTeX's
            measured = set()
        if not _NOTE.match(line):
            lines.append([cell for place, cell in enumerate(cells) if place not in measured])
    return lines


def _equal(before: str, now: str) -> bool:
    """Return whether two CSVs hold the same numbers, up to a processor's rounding."""
    import pandas as pd

    try:
        old, new = (pd.read_csv(StringIO(text)).drop(columns=list(COLUMNS)) for text in (before, now))
        pd.testing.assert_frame_equal(old, new, rtol=1e-9, atol=1e-9)
    except (AssertionError, ValueError, KeyError):  # ValueError: it is no CSV
        return False
    return True
