"""A heat map of a partition: images by client and class."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmark.drawing import new_figure, save_figure

if TYPE_CHECKING:  # slow to import
    from matplotlib.axes import Axes


#: Of a title, on an inch.
LETTERS = 11
#: Of few images and of the most, as in the report: the more, the darker.
SHADES = ("#d9e8f5", "#083d77")
#: Clients that are named below their columns; of more the numbers are.
NAMED = 25


def partition_heatmap(
    counts: NDArray[np.int64],
    class_names: Sequence[str],
    path: str | Path,
    title: str,
    client_names: Sequence[str] | None = None,
) -> None:
    """Draw how many images of each class each client holds, as a PNG, written atomically.

    Classes are rows and clients are columns. A client without a class is left white, so that what it holds
    is seen at once. The colour scale is the square root of the count where the counts are skewed.

    Args:
        counts: [N, C], images.
        class_names: [C].
        path: of the PNG; missing folders are made.
        title: above the map, in as many lines as it needs.
        client_names: [N]; None: clients are numbered.

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
    draw_counts(axes, counts, class_names, client_names)
    figure.suptitle(textwrap.fill(title, int(LETTERS * width)), fontsize=11)
    save_figure(figure, path)


def manifest_heatmap(
    manifest: Mapping[str, Any], path: str | Path, split: str = "train", dataset: str | None = None
) -> None:
    """Draw a partition as its manifest holds it, as a PNG.

    Args:
        manifest: see :mod:`datamodules.manifest`.
        path: of the PNG.
        split: ``train`` or ``test``.
        dataset: its name, which no manifest has.
    """
    clients = manifest["clients"]
    counts = np.array([client[f"{split}_classes"] for client in clients])
    given = ", ".join(f"{name}={value}" for name, value in manifest["arguments"].items())
    title = f"{manifest['algorithm']}({given}), seed {manifest['seed']}, {split} images"
    if dataset is not None:
        title = f"{dataset}: {title}"
    partition_heatmap(counts, manifest["class_names"], path, title, [client["name"] for client in clients])


def draw_counts(
    axes: "Axes", counts: NDArray[np.int64], class_names: Sequence[str], client_names: Sequence[str] | None = None
) -> None:
    """Draw images of each class (rows) at each client (columns) into axes, with a colour bar of their own.

    Args:
        axes: empty ones.
        counts: [N, C].
        class_names: [C].
        client_names: [N]; None, and where there are many: clients are numbered.
    """
    from matplotlib.colors import LinearSegmentedColormap, Normalize, PowerNorm
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = counts.shape
    held = np.ma.masked_equal(counts.T, 0)
    largest = max(int(counts.max()), 1)
    skewed = bool(held.count()) and largest > 4 * float(np.ma.median(held))
    norm = PowerNorm(0.5, 0, largest) if skewed else Normalize(0, largest)
    blues = LinearSegmentedColormap.from_list("images", SHADES)
    image = axes.imshow(held, aspect="auto", interpolation="nearest", cmap=blues, norm=norm)
    if client_names is None or num_clients > NAMED or all(re.fullmatch(r"client \d+", name) for name in client_names):
        axes.set_xlabel("client")
        axes.set_xticks(_ticks(num_clients, NAMED))
    else:
        shown = [textwrap.shorten(name.replace("_", " "), 24, placeholder="...") for name in client_names]
        axes.set_xticks(range(num_clients), shown, rotation=45, ha="right", rotation_mode="anchor")
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


def _ticks(number: int, at_most: int) -> list[int]:
    """Positions 0, s, 2s, ... with the smallest step s of 1, 2, 5, 10, ... that gives few enough."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if -(-number // s) <= at_most or s == 1000)
    return list(range(0, number, step))
