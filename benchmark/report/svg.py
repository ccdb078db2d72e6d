"""The report's charts as SVG text: coloured by the page's style sheet, so that they follow its light and dark colours.

Every function returns one ``<svg>`` that scales with its container. Text is escaped here. A series is told apart by
colour and by marker or dash, and named by the page's legend (:func:`key`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
from numpy.typing import NDArray

WIDTH = 420.0
COLOURS = 8
LEAST_SPAN = 5.0
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2")
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",  # circle
    "M-3.6 -3.6h7.2v7.2h-7.2z",  # square
    "M0 -4.6L4.4 3.4H-4.4z",  # triangle
    "M0 -5L4.4 0L0 5L-4.4 0z",  # diamond
    "M-1.5 -4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",  # plus
    "M0 4.6L4.4 -3.4H-4.4z",  # triangle down
    "M-4.6 -1.6H4.6V1.6H-4.6z",  # bar
)


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: for tooltips.
        style: number of its colour, marker and dash.
        x: positions.
        y: values, as many; NaN breaks the line.
        low: lower ends of a band around the line; empty for none.
        high: upper ends.
    """

    name: str
    style: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = field(default_factory=tuple)
    high: Sequence[float] = field(default_factory=tuple)


def _class(style: int) -> str:
    return f"c{style % COLOURS}"


def _dash(style: int) -> str:
    dash = DASHES[(style // 2) % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _marker(style: int, x: float, y: float, tip: str) -> str:
    path = MARKERS[style % len(MARKERS)]
    tip = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<path class="mark {_class(style)}" transform="translate({x:.1f} {y:.1f})" d="{path}">{tip}</path>'


def key(style: int) -> str:
    """A small sample of a series' line and marker, for the legend."""
    line = f'<line class="line {_class(style)}" x1="1" x2="31" y1="7" y2="7"{_dash(style)}/>'
    return f'<svg class="key" viewBox="0 0 32 14" aria-hidden="true">{line}{_marker(style, 16, 7, "")}</svg>'


def _svg(height: float, body: Sequence[str], label: str) -> str:
    return (
        f'<svg class="chart" role="img" aria-label="{escape(label)}" viewBox="0 0 {WIDTH:g} {height:g}">'
        f"{''.join(body)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _ticks(low: float, high: float, number: int = 5, integer: bool = False) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    locator = MaxNLocator(nbins=number, steps=[1, 2, 2.5, 5, 10], integer=integer)
    return [float(tick) for tick in locator.tick_values(low, high)]


def _widened(values: Sequence[float], span: float) -> tuple[float, float]:
    """The range of values, at least ``span`` wide: hundredths of a point are not to look like much."""
    low, high = min(values), max(values)
    spare = max(0.0, span - (high - low)) / 2
    return low - spare, high + spare


def _shown(value: float) -> str:
    return f"{value:,.4g}"


@dataclass(frozen=True)
class _Frame:
    """The plotting area and how values become positions in it."""

    left: float
    right: float
    top: float
    bottom: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        span = (self.x_high - self.x_low) or 1.0
        return self.left + (value - self.x_low) / span * (self.right - self.left)

    def y(self, value: float) -> float:
        span = (self.y_high - self.y_low) or 1.0
        return self.bottom - (value - self.y_low) / span * (self.bottom - self.top)

    def y_axis(self, ticks: Sequence[float], label: str) -> list[str]:
        parts = [_text(self.left - 34, self.top - 10, label, "start", "axis")]
        for tick in ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{self.left:g}" x2="{self.right:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text(self.left - 6, y + 4, _shown(tick), "end"))
        return parts

    def x_axis(self, ticks: Sequence[tuple[float, str]], label: str) -> list[str]:
        parts = [_text((self.left + self.right) / 2, self.bottom + 34, label, kind="axis")]
        for tick, shown in ticks:
            x = self.x(tick)
            parts.append(
                f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{self.bottom:g}" y2="{self.bottom + 4:g}"/>'
            )
            parts.append(_text(x, self.bottom + 17, shown))
        parts.append(
            f'<line class="rule" x1="{self.left:g}" x2="{self.right:g}" y1="{self.bottom:g}" y2="{self.bottom:g}"/>'
        )
        return parts


def line_chart(series: Sequence[Series], x_label: str, y_label: str, label: str) -> str:
    """Lines over rounds.

    Args:
        series: at least one, with at least one finite value.
        x_label: below.
        y_label: above the axis.
        label: what is shown, for those who do not see it.
    """
    values = [v for s in series for v in (*s.y, *s.low, *s.high) if math.isfinite(v)]
    positions = [x for s in series for x in s.x]
    y_ticks = _ticks(min(values), max(values))
    x_ticks = [t for t in _ticks(min(positions), max(positions), 7, integer=True) if min(positions) <= t]
    x_ticks = [t for t in x_ticks if t <= max(positions)]
    frame = _Frame(40, WIDTH - 12, 26, 244, min(positions), max(positions), y_ticks[0], y_ticks[-1])
    body = frame.y_axis(y_ticks, y_label) + frame.x_axis([(t, _shown(t)) for t in x_ticks], x_label)
    for s in series:
        if len(s.low):
            upper = [f"{frame.x(x):.1f},{frame.y(v):.1f}" for x, v in zip(s.x, s.high, strict=True)]
            lower = [f"{frame.x(x):.1f},{frame.y(v):.1f}" for x, v in zip(s.x, s.low, strict=True)]
            body.append(f'<polygon class="band {_class(s.style)}" points="{" ".join([*upper, *reversed(lower)])}"/>')
    for s in series:
        path, pen = "", "M"
        for x, y in zip(s.x, s.y, strict=True):
            path += f"{pen}{frame.x(x):.1f} {frame.y(y):.1f}" if math.isfinite(y) else ""
            pen = "L" if math.isfinite(y) else "M"
        body.append(f'<path class="line {_class(s.style)}" d="{path}"{_dash(s.style)}/>')
        every = max(1, len(s.x) // 12)
        for position, (x, y) in enumerate(zip(s.x, s.y, strict=True)):
            if math.isfinite(y) and (position % every == 0 or position == len(s.x) - 1):
                body.append(_marker(s.style, frame.x(x), frame.y(y), f"{s.name}, {x_label} {x:g}: {y:.2f}"))
    return _svg(282, body, label)


def strip_chart(rows: Sequence[tuple[str, int, Sequence[tuple[str, float]]]], x_label: str, label: str) -> str:
    """One row of dots per method, one dot per client, the mean as an upright line.

    Args:
        rows: name of the method, its style, and (client, value) pairs.
        x_label: below.
        label: what is shown, for those who do not see it.
    """
    values = [value for _, _, clients in rows for _, value in clients]
    ticks = _ticks(*_widened(values, LEAST_SPAN), 6)
    row_height = 34
    bottom = 8 + row_height * len(rows)
    frame = _Frame(20, WIDTH - 20, 4, bottom, ticks[0], ticks[-1], 0, 1)
    body = []
    for tick in ticks:
        x = frame.x(tick)
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom}"/>')
    body += frame.x_axis([(t, _shown(t)) for t in ticks], x_label)
    for row, (name, style, clients) in enumerate(rows):
        middle = 8 + row_height * row + 22
        body.append(_text(20, middle - 11, name, "start", "row"))
        crowd = len(clients) > 12
        for position, (client, value) in enumerate(sorted(clients, key=lambda entry: entry[1])):
            shift = (position * 5 % 9 - 4) * 0.9 if crowd else 0.0  # so that equal values do not hide each other
            body.append(_marker(style, frame.x(value), middle + shift, f"{name}, {client}: {value:.2f}"))
        x = frame.x(float(np.mean([value for _, value in clients])))
        body.append(f'<line class="mean" x1="{x:.1f}" x2="{x:.1f}" y1="{middle - 9}" y2="{middle + 9}"/>')
    return _svg(bottom + 40, body, label)


def scatter_chart(points: Sequence[tuple[str, int, float, float]], x_label: str, y_label: str, label: str) -> str:
    """Points over a logarithmic x-axis that has a place for zero on its left.

    Args:
        points: name, style, x from 0, y.
        x_label: below.
        y_label: above the axis.
        label: what is shown, for those who do not see it.
    """
    positive = [x for _, _, x, _ in points if x > 0]
    low = math.floor(math.log10(min(positive))) if positive else 0
    high = max(low + 1, math.ceil(math.log10(max(positive)))) if positive else 1
    zero = low - 0.8
    ticks = _ticks(*_widened([y for *_, y in points], LEAST_SPAN))
    frame = _Frame(
        40, WIDTH - 26, 26, 214, zero - 0.3 if len(positive) < len(points) else low, high, *ticks[:: len(ticks) - 1]
    )
    marks: list[tuple[float, str]] = [(power, _power(power)) for power in range(low, high + 1)]
    if len(positive) < len(points):
        marks.insert(0, (zero, "0"))
    body = frame.y_axis(ticks, y_label) + frame.x_axis(marks, x_label)
    taken: list[tuple[float, float]] = []
    for name, style, x, y in sorted(points, key=lambda point: -point[3]):
        place, height = frame.x(math.log10(x) if x > 0 else zero), frame.y(y)
        body.append(_marker(style, place, height, f"{name}: {_shown(x)} {x_label}, {y:.2f}"))
        line = height + 4
        for other, below in sorted(taken, key=lambda spot: spot[1]):  # names step down out of each other's way
            if abs(other - place) < 130 and abs(line - below) < 12:
                line = below + 12
        taken.append((place, line))
        right = place > WIDTH * 0.7
        body.append(_text(place + (-8 if right else 8), line, name, "end" if right else "start"))
    return _svg(252, body, label)


def _power(exponent: int) -> str:
    return f"{10**exponent:,}" if 0 <= exponent <= 5 else f"1e{exponent}"


def heat_map(counts: NDArray[np.int64], class_names: Sequence[str], client_names: Sequence[str], label: str) -> str:
    """Images of each class at each client, classes downwards; the stronger the colour, the more (square root).

    Args:
        counts: [clients, classes].
        class_names: [classes].
        client_names: [clients].
        label: what is shown, for those who do not see it.
    """
    clients, classes = counts.shape
    left = 8 + 6.3 * min(18, max(len(name) for name in class_names))
    cell = (WIDTH - left - 4) / clients
    height = min(22.0, max(8.0, cell))
    largest = max(1, int(counts.max()))
    numbers = cell >= 26 and height >= 14
    body = []
    for c, name in enumerate(class_names):
        y = 4 + c * height
        body.append(_text(left - 6, y + height / 2 + 3.5, name.replace("_", " ")[:18], "end", "cell-name"))
        for client in range(clients):
            count = int(counts[client, c])
            if not count:
                continue
            x, share = left + client * cell, math.sqrt(count / largest)
            tip = f"<title>{escape(f'{client_names[client]}, {name}: {count}')}</title>"
            body.append(
                f'<rect class="cell" x="{x:.2f}" y="{y:.2f}" width="{cell - 0.6:.2f}" height="{height - 0.6:.2f}" '
                f'fill-opacity="{0.08 + 0.92 * share:.3f}">{tip}</rect>'
            )
            if numbers:
                kind = "count strong" if share > 0.6 else "count"
                body.append(_text(x + cell / 2, y + height / 2 + 3.5, str(count), kind=kind))
    bottom = 4 + classes * height
    every = max(1, math.ceil(clients / 12))
    room = int(cell * every / 5.6)
    for client in range(0, clients, every):
        name = client_names[client].replace("_", " ")
        shown = name if len(name) <= room else f"{name[: room - 1]}." if room > 4 else str(client)
        body.append(_text(left + (client + 0.5) * cell, bottom + 14, shown))
    body.append(_text(left + clients * cell / 2, bottom + 30, "client", kind="axis"))
    return _svg(bottom + 36, body, label)
