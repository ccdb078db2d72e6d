"""Small pieces of HTML."""

import base64
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from benchmark.tables.numbers import mean_std

NOTHING = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def anchor_of(*words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def tag(demo: bool) -> str:
    return '<span class="tag">demo</span>' if demo else ""


def scroll(table: str, label: str) -> str:
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">{table}</div>'


def number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def signed(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:+.2f}".replace("-", MINUS)


def known_mean_std(values: Sequence[float | None]) -> tuple[float, float]:
    """Mean and standard deviation of the values that are known and finite."""
    return mean_std([value for value in values if value is not None and math.isfinite(value)])


def with_spread(mean: float, std: float, digits: int = 2) -> str:
    spread = "" if math.isnan(std) else f' <span class="spread">± {std:.{digits}f}</span>'
    return number(mean, digits) + spread


def number_cell(values: Sequence[float | None], digits: int = 2) -> str:
    mean, std = known_mean_std(values)
    exact = "" if math.isnan(mean) else f"{mean:.10g}"
    return f'<td data-value="{exact}">{with_spread(mean, std, digits)}</td>'


def heading(label: str, numeric: bool) -> str:
    kind, classes = ("number", "") if numeric else ("text", ' class="text"')
    return f'<th scope="col" data-kind="{kind}"{classes}><button type="button">{escape(label)}</button></th>'


def figure(heading: str, drawing: str, caption: str) -> str:
    caption = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h4>{escape(heading)}</h4>{drawing}{caption}</figure>"


def picture(path: Path, text: str) -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img class="picture" alt="{escape(text)}" src="data:image/png;base64,{content}">'
