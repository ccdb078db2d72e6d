"""Figures about runs and their data."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # slow to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def partition_heatmap(counts: NDArray[np.int64], class_names: Sequence[str], path: str | Path, title: str) -> None:
    """Draw how many images of each class each client holds, as a PNG, written atomically.

    Classes are rows and clients are columns. A client without a class is left white, so that what it holds
    is seen at once. The colour scale is the square root of the count where the counts are skewed.

    Args:
        counts: [N, C], images.
        class_names: [C].
        path: of the PNG; missing folders are made.
        title: line above the map.

    Raises:
        ValueError: the shapes do not agree.
    """
    if counts.ndim != 2 or counts.shape[1] != len(class_names):
        raise ValueError(f"counts must be [clients, {len(class_names)}], got {counts.shape}")
    num_clients, num_classes = counts.shape
    width = float(np.clip(3.2 + 0.28 * num_clients, 5.5, 14))
    height = float(np.clip(1.9 + 0.26 * num_classes, 3.2, 9))
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    draw_counts(axes, counts, class_names)
    axes.set_title(title, fontsize=11)
    save_figure(figure, path)


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches, 150 dots to the inch, that leaves pyplot's backend alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: "Figure", path: str | Path) -> None:
    """Write a figure as PNG, atomically; missing folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            figure.savefig(file, format="png")
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def draw_counts(axes: "Axes", counts: NDArray[np.int64], class_names: Sequence[str]) -> None:
    """Draw images of each class (rows) at each client (columns) into axes, with a colour bar of their own.

    Args:
        axes: empty ones.
        counts: [N, C].
        class_names: [C].
    """
    from matplotlib.colors import Normalize, PowerNorm
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = counts.shape
    held = np.ma.masked_equal(counts.T, 0)
    largest = max(int(counts.max()), 1)
    skewed = bool(held.count()) and largest > 4 * float(np.ma.median(held))
    norm = PowerNorm(0.5, 0, largest) if skewed else Normalize(0, largest)
    image = axes.imshow(held, aspect="auto", interpolation="nearest", cmap="viridis_r", norm=norm)
    axes.set_xlabel("client")
    axes.set_xticks(_ticks(num_clients, 25))
    named = _ticks(num_classes, 30)
    axes.set_yticks(named)
    axes.set_yticklabels([class_names[c].replace("_", " ") for c in named], fontsize=8 if num_classes <= 30 else 7)
    axes.tick_params(axis="x", labelsize=8)
    if num_clients <= 50 and num_classes <= 50:
        axes.set_xticks(np.arange(num_clients + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(num_classes + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
        axes.tick_params(which="minor", length=0)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_label("images" + (" (square-root scale)" if skewed else ""), fontsize=9)
    bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    bar.ax.tick_params(labelsize=8)
    if num_clients <= 12 and num_classes <= 15:
        for client, c in np.argwhere(counts > 0):
            dark = norm(counts[client, c]) > 0.5
            axes.text(
                client, c, str(counts[client, c]), ha="center", va="center", fontsize=7, color="w" if dark else "k"
            )


@dataclass(frozen=True)
class Curve:
    """A row's metric over the rounds, one array [rounds] for each seed.

    Attributes:
        name: of the method.
        rounds: where it was evaluated.
        seeds: the values, as many at each seed.
    """

    name: str
    rounds: NDArray[np.int64]
    seeds: Sequence[NDArray[np.float64]]


def learning_curves(panels: Sequence[tuple[str, Sequence[Curve]]], y_label: str, path: str | Path) -> None:
    """Draw metrics over the rounds as a PNG: a panel for each setting, a line for each method.

    Args:
        panels: heading and curves of each; with several seeds the band is one standard deviation.
        y_label: of the metric.
        path: of the PNG; missing folders are made.
    """
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = new_figure(3.2 + 3.8 * columns, 0.6 + 3.2 * rows)
    names = list(dict.fromkeys(curve.name for _, curves in panels for curve in curves))
    lines = {}
    for place, (heading, curves) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        for curve in curves:
            style = names.index(curve.name)
            dash = ("-", "--", ":", "-.")[style // 10 % 4]
            mean = np.mean(curve.seeds, axis=0)
            (lines[curve.name],) = axes.plot(curve.rounds, mean, color=f"C{style % 10}", linestyle=dash, linewidth=1.4)
            if len(curve.seeds) > 1:
                spread = np.std(curve.seeds, axis=0, ddof=1)
                axes.fill_between(curve.rounds, mean - spread, mean + spread, color=f"C{style % 10}", alpha=0.15, lw=0)
        axes.set_title(heading, fontsize=10)
        axes.set_xlabel("round")
        if place % columns == 0:
            axes.set_ylabel(y_label)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
    figure.legend([lines[name] for name in names], names, loc="outside right upper", fontsize=8, frameon=False)
    save_figure(figure, path)


def _ticks(number: int, at_most: int) -> list[int]:
    """Positions 0, s, 2s, ... with the smallest step s of 1, 2, 5, 10, ... that gives few enough."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if -(-number // s) <= at_most or s == 1000)
    return list(range(0, number, step))
