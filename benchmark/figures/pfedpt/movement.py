"""Fig. 10: how far the prompts move."""

from typing import TYPE_CHECKING

from benchmark.drawing import new_figure
from benchmark.errors import ConfigurationError
from benchmark.figures.pfedpt.sources import Drawing, Sources
from benchmark.figures.pfedpt.style import COLOURS, label_axes
from benchmark.records.stored_run import read_metrics

if TYPE_CHECKING:  # slow to import
    import pandas as pd


def movement(metrics: "pd.DataFrame", parameter: str = "visual_prompt") -> "pd.DataFrame":
    """From a run's metrics ``round``, ``client``, ``change`` and ``distance`` of a personal parameter.

    Raises:
        ConfigurationError: the run did not record them.
    """
    names = {f"{parameter}_change": "change", f"{parameter}_distance": "distance"}
    rows = metrics[(metrics["split"] == "train") & metrics["metric"].isin(list(names))]
    if rows.empty:
        raise ConfigurationError(
            "the run did not record how its prompts moved; run it with the callback "
            "benchmark.run.parameter_movement.PersonalMovement in trainer.callbacks"
        )
    wide = rows.assign(metric=rows["metric"].map(names)).pivot(
        index=["round", "client"], columns="metric", values="value"
    )
    return wide.reset_index().rename_axis(columns=None)[["round", "client", "change", "distance"]]


def movement_figure(sources: Sources) -> Drawing:
    """Fig. 10: how far the prompts move in each round, and from where they began."""
    from matplotlib.ticker import MaxNLocator

    numbers = movement(read_metrics(sources.runs[0]))
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    moved = numbers[numbers["change"] > 0]
    left.scatter(moved["round"], moved["change"], s=12, color="0.6", linewidths=0, label="a client that took part")
    mean = moved.groupby("round")["change"].mean()
    left.plot(mean.index, mean, color=COLOURS[0], linewidth=2.2, marker="o", markersize=4, label="their mean")
    for number, (_, own) in enumerate(numbers.groupby("client")):
        label = "a client" if number == 0 else None
        right.plot(own["round"], own["distance"], color="0.75", linewidth=0.9, label=label)
    away = numbers.groupby("round")["distance"].mean()
    right.plot(away.index, away, color=COLOURS[0], linewidth=2.2, marker="o", markersize=4, label="mean of all clients")
    label_axes(left, "round", "L2 distance", "Change of the prompt in a round")
    label_axes(right, "round", "L2 distance", "Distance of the prompt from its start")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=9)
    first, last = mean.iloc[0], mean.iloc[-1]
    return Drawing(
        figure,
        numbers,
        "Fig. 10 of pFedPT: L2 distance of every client's prompt to itself a round before (clients that took part) and "
        f"to the common start (all clients). "
        f"Mean change in round {mean.index[0]}: {first:.2f}, in round {mean.index[-1]}: {last:.2f}.",
    )
