"""What a figure is drawn from, and what a drawing is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Sources:
    """What a figure may draw from.

    Attributes:
        runs: directories of finished runs, in the order in which the figure names them.
        data_dir: folder of the data sets, or None.
        partitions: per heading, the arguments of a run on it.
        table: the CSV of Fig. 6's table; None for other figures.
    """

    runs: Sequence[Path]
    data_dir: Path | None
    partitions: Mapping[str, Sequence[str]]
    table: Path | None = None


@dataclass(frozen=True)
class Drawing:
    """A picture, the numbers in it, and what it shows in words."""

    figure: "Figure"
    numbers: "pd.DataFrame"
    caption: str
