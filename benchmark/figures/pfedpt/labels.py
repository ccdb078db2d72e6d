"""Fig. 9: what a prompt knows of its client's labels."""

import numpy as np
from numpy.typing import NDArray

from benchmark.drawing import new_figure
from benchmark.figures.pfedpt.prompts import label_shares, outputs_under_prompts, plain_images, prompted_run
from benchmark.figures.pfedpt.sources import Drawing, Sources
from benchmark.figures.pfedpt.style import COLOURS, class_name, label_axes

GREY = 128
BAR_CLIENTS = 6


def total_variation(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Half the L1 distance of distributions over the last axis: 0 for equal ones, 1 for disjoint ones."""
    return np.asarray(0.5 * np.abs(p - q).sum(axis=-1))


def own_and_others(shares: NDArray[np.float64], outputs: NDArray[np.float64]) -> tuple[float, float]:
    """Mean total variation of each client's output [K, C] to its own label shares [K, C], and to all others'."""
    distances = total_variation(outputs[:, None], shares[None])
    own = np.eye(len(shares), dtype=bool)
    return float(distances[own].mean()), float(distances[~own].mean()) if len(shares) > 1 else float("nan")


def labels_figure(sources: Sources) -> Drawing:
    """Fig. 9: the output on a plain image under a client's prompt, beside the client's labels."""
    import pandas as pd

    method, data = prompted_run(sources.runs[0], sources.data_dir)
    clients = data.training_clients
    grey = plain_images(np.full((1, 3), GREY, dtype=np.uint8), data)
    outputs = outputs_under_prompts(method, clients, grey, data.seed).softmax(2)[:, 0].double().numpy()
    shares = label_shares(data, clients)
    own, others = own_and_others(shares, outputs)
    places = np.linspace(0, len(clients) - 1, min(BAR_CLIENTS, len(clients))).astype(int)
    figure = new_figure(11, 2.6 * -(-len(places) // 3) + 0.5)
    grid = figure.subplots(-(-len(places) // 3), min(3, len(places)), squeeze=False, sharex=True, sharey=True).ravel()
    at = np.arange(data.num_classes)
    for axes, place in zip(grid, places, strict=False):
        axes.bar(at - 0.2, shares[place], 0.4, color="0.65", label="client's training labels")
        axes.bar(at + 0.2, outputs[place], 0.4, color=COLOURS[0], label="output on a grey image under its prompt")
        distance = total_variation(shares[place], outputs[place])
        label_axes(axes, "", "", f"client {clients[place]}, distance {distance:.2f}")
        axes.grid(visible=False, axis="x")
        axes.set_ylim(0, 1)
        if data.num_classes <= 12:
            axes.set_xticks(at, [class_name(data, int(c)) for c in at], rotation=60, fontsize=9)
    for axes in grid[len(places) :]:
        axes.set_visible(False)
    figure.supylabel("share", fontsize=10)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=10)
    index = pd.MultiIndex.from_product([clients, data.class_names], names=["client", "class"])
    numbers = pd.DataFrame({"label_share": shares.ravel(), "output": outputs.ravel()}, index=index).reset_index()
    return Drawing(
        figure,
        numbers,
        "Fig. 9 of pFedPT: softmax output of the last global model on a plain grey image under a client's prompt, "
        f"beside the shares of the classes in the client's training images. Mean total variation "
        f"distance (0 equal, 1 disjoint) over all {len(clients)} clients: {own:.2f} to the client's own labels, "
        f"{others:.2f} to those of the other clients.",
    )
