"""Tables of the page: what a cell shows, sorts by and is saved as."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

MINUS = "\N{MINUS SIGN}"


class GridCell(NamedTuple):
    """One cell, of text that is escaped where it is shown.

    Attributes:
        text: as tables write it; a number may have its spread behind it, as in "75.00 ± 7.07".
        note: a smaller line below.
        link: an anchor of the page; empty for none.
        code: whether it is a command or a name of the file system.
    """

    text: str
    note: str = ""
    link: str = ""
    code: bool = False

    @property
    def value(self) -> str:
        """The number without its spread; empty where the text is none."""
        number = self.text.partition(" ± ")[0]
        return number if not self.code and re.fullmatch(r"[+-]?[\d.]+(e\d+)?", number) else ""

    @property
    def shown(self) -> str:
        """The text before the spread, thousands set apart, with a minus that is one."""
        words = self.text.partition(" ± ")[0]
        if self.code:
            return words
        words = re.sub(r"^\d{4,}(?=\.|$)", lambda digits: f"{int(digits[0]):,}", words)
        return re.sub(r"(?<![\w-])-(?=\d)", MINUS, words)

    @property
    def spread(self) -> str:
        """The number behind ±; empty without one."""
        return self.text.partition(" ± ")[2]


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        label: what it is, for those who do not see it and for the name of a file.
        heads: of the columns; the first names the rows unless it is "#", then the second does.
        rows: of as many cells each.
        kinds: a word for each row; empty where all are alike.
        sorts: whether a click on a heading sorts.
    """

    label: str
    heads: Sequence[str]
    rows: Sequence[Sequence[GridCell]]
    kinds: Sequence[str] = ()
    sorts: bool = True

    @cached_property
    def numeric(self) -> list[bool]:
        """Of each column, whether it holds numbers."""
        return [any(row[column].value for row in self.rows) for column in range(len(self.heads))]


def grid(label: str, heads: Iterable[object], rows: Iterable[Iterable[GridCell | str]]) -> Grid:
    """A table whose cells may be plain texts."""
    cells = [[cell if isinstance(cell, GridCell) else GridCell(cell) for cell in row] for row in rows]
    return Grid(label, [str(head) for head in heads], cells)


def anchor_of(*words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
