"""Empty figures, and pictures that are written whole or not at all."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.files import replacing

if TYPE_CHECKING:  # slow to import
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches, 150 dots to the inch, that leaves pyplot's backend alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def line_style(number: int) -> dict[str, Any]:
    """Return colour and dash of a line, by its number from 0: ten colours, then the same with other dashes."""
    return {"color": f"C{number % 10}", "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}


def save_figure(figure: "Figure", path: str | Path) -> None:
    """Write a figure as PNG, atomically; missing folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as stream:
        figure.savefig(stream, format="png")
