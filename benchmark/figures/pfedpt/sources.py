"""The input of a figure, and the drawing made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Sources:
    """The input that a figure may be drawn from.

    Attributes:
        runs: directories of finished runs, in the order in which the figure names them.
        data_dir: folder of the data sets, or None.
        partitions: arguments of a run on each partition, by the heading under which the figure shows it.
        table: the CSV of Fig. 6's table; None for other figures.
    """

    runs: Sequence[Path]
    data_dir: Path | None
    partitions: Mapping[str, Sequence[str]]
    table: Path | None = None


@dataclass(frozen=True)
class Drawing:
    """A picture, the numbers in it, and its caption."""

    figure: "Figure"
    numbers: "pd.DataFrame"
    caption: str
