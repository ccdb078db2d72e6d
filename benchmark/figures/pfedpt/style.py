"""The style of the figures: colours, markers and axis labels."""

from typing import TYPE_CHECKING

from datamodules.federated import FederatedDataModule

if TYPE_CHECKING:  # slow to import
    from matplotlib.axes import Axes


#: Okabe and Ito's colours, told apart by colour-blind readers, and two greys for a ninth and tenth.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#000000", "#8c8c8c", "#c9c9c9")
MARKERS = "osD^vP*Xh<"


def label_axes(axes: "Axes", x: str, y: str, title: str) -> None:
    axes.set_xlabel(x, fontsize=10)
    axes.set_ylabel(y, fontsize=10)
    axes.set_title(title, fontsize=11)
    axes.tick_params(labelsize=9)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def class_name(data: FederatedDataModule, label: int) -> str:
    return data.class_names[label].replace("_", " ")
