"""Fig. 11: how fast a client that never trained adapts."""

from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.drawing import new_figure
from benchmark.errors import ConfigurationError
from benchmark.figures.pfedpt.sources import Drawing, Sources
from benchmark.figures.pfedpt.style import COLOURS, MARKERS, label_axes
from benchmark.records.grouped_runs import read_run
from benchmark.records.stored_run import stored_run

if TYPE_CHECKING:  # slow to import
    import pandas as pd

ADAPTED = {"prompt": "pFedPT, prompt", "head": "FedAvg, last layer", "all": "FedAvg, all layers"}


def adaptation(run_dir: Path) -> "pd.DataFrame":
    """From a run of ``FedAvgFT`` a row for each new client: ``adapted``, ``client``, ``epoch``, ``accuracy``, and
    ``training_images``.

    Raises:
        ConfigurationError: the run fine-tunes no copies, or has no new clients.
    """
    run = read_run(run_dir)
    epochs, part = run.get("model.init_args.finetuning.epochs"), run.get("model.init_args.finetuned")
    if epochs is None or part not in ADAPTED:
        raise ConfigurationError(f"{run_dir} is a run of {run.record.method}; this figure needs runs of FedAvgFT")
    metrics = run.metrics
    new = metrics[(metrics["split"] == "new") & (metrics["metric"] == "accuracy")]
    if new.empty:
        raise ConfigurationError(f"{run_dir} has no new clients; this figure needs a run with data.new_clients above 0")
    last = new[new["round"] == new["round"].max()]
    sizes = [client["train_size"] for client in (stored_run(run_dir).partition or {"clients": []})["clients"]]
    return (
        last[["client", "value"]]
        .rename(columns={"value": "accuracy"})
        .assign(adapted=ADAPTED[part], epoch=epochs, training_images=[sizes[client] for client in last["client"]])
    )[["adapted", "client", "epoch", "accuracy", "training_images"]]


def newcomers_figure(sources: Sources) -> Drawing:
    """Fig. 11: how fast a new client's prompt adapts, against FedAvg's last layer.

    Every point is a run of its own, whose new clients fitted copies for so many epochs before they were scored; the
    federation is the same in all of them. So there are points at a few numbers of epochs instead of every one, and a
    client fits all of its training images, where the paper takes at most 400.
    """
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    numbers = pd.concat([adaptation(run) for run in sources.runs], ignore_index=True)
    figure = new_figure(6.6, 4.4)
    axes = figure.add_subplot()
    said = []
    for order, (name, part) in enumerate(numbers.groupby("adapted", sort=False)):
        for _, own in part.groupby("client"):
            own = own.sort_values("epoch")
            axes.plot(own["epoch"], 100 * own["accuracy"], color=COLOURS[order], linewidth=0.8, alpha=0.4)
        mean = 100 * part.groupby("epoch")["accuracy"].mean()
        axes.plot(
            mean.index, mean, color=COLOURS[order], marker=MARKERS[order], linewidth=2.4, markersize=6, label=name,
            linestyle=("-", "--", ":")[order],
        )  # fmt: skip
        after = ", ".join(f"{value:.1f} after {epoch}" for epoch, value in mean.items())
        said.append(f"{name} {after}")
    label_axes(
        axes, "epochs of adaptation", "accuracy (%) on own test images", "New clients adapt to the federated model"
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=10)
    sizes = numbers["training_images"]
    span = f"{sizes.min()} to {sizes.max()}" if sizes.min() < sizes.max() else str(sizes.min())
    return Drawing(
        figure,
        numbers,
        f"Fig. 11 of pFedPT: {numbers['client'].nunique()} clients that never trained fit a part of the federated "
        f"model to their own {span} training images, everything else at rest; thick: mean, thin: each client. Each "
        f"point is a run of its own. Mean accuracy in per cent after so many epochs: {'; '.join(said)}.",
    )
