"""Small pieces of HTML."""

import base64
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, stdev

from benchmark.tables.numbers import with_std

NOTHING = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def anchor_of(*words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def tag(demo: bool) -> str:
    return '<span class="tag">demo</span>' if demo else ""


def scroll(table: str, label: str) -> str:
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">{table}</div>'


def known_mean_std(values: Sequence[float | None]) -> tuple[float, float]:
    """Mean and standard deviation (n - 1; NaN for one) of the values that are known and finite."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else math.nan, stdev(known) if len(known) > 1 else math.nan


def cell(text: str) -> str:
    """A number as tables write it: sorted by its value, thousands set apart, its spread small, a minus that is one."""
    value, _, spread = text.partition(" ± ")
    exact = value if re.fullmatch(r"[+-]?[\d.]+(e\d+)?", value) else ""
    shown = re.sub(r"^\d{4,}", lambda digits: f"{int(digits[0]):,}", escape(value) or NOTHING)
    shown = re.sub(r"(?<!\d)-(?=\d)", MINUS, shown) + (f' <span class="spread">± {spread}</span>' if spread else "")
    return f'<td data-value="{exact}">{shown}</td>'


def number_cell(values: Sequence[float | None], digits: int = 2) -> str:
    return cell(with_std(*known_mean_std(values), digits))


def row(name: str, cells: Iterable[str], attributes: str = "") -> str:
    return f'<tr{attributes}><th scope="row">{name}</th>{"".join(cells)}</tr>'


def table(heads: Iterable[str], rows: Iterable[str], attributes: str = ' class="sortable"') -> str:
    head, body = "".join(heads), "".join(rows)
    return f"<table{attributes}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def heading(label: str, numeric: bool) -> str:
    kind, classes = ("number", "") if numeric else ("text", ' class="text"')
    return f'<th scope="col" data-kind="{kind}"{classes}><button type="button">{escape(label)}</button></th>'


def figure(heading: str, drawing: str, caption: str) -> str:
    caption = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h4>{escape(heading)}</h4>{drawing}{caption}</figure>"


def picture(path: Path, text: str) -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img class="picture" alt="{escape(text)}" src="data:image/png;base64,{content}">'
