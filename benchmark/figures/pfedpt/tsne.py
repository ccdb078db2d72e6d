"""Fig. 5: t-SNE of the outputs on plain images under every client's prompt."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchmark.drawing import new_figure
from benchmark.figures.pfedpt.prompts import label_shares, outputs_under_prompts, plain_images, prompted_run
from benchmark.figures.pfedpt.sources import Drawing, Sources
from benchmark.figures.pfedpt.style import COLOURS, MARKERS, class_name
from benchmark.seeds import derived_seed, numpy_generator

PLAIN_IMAGES = 100


def plain_colours(number: int, seed: int) -> NDArray[np.uint8]:
    """``number`` colours [number, 3], uniform over all, drawn for this seed."""
    return numpy_generator(seed, "figure", "plain colours").integers(0, 256, (number, 3), dtype=np.uint8)


def embedded(outputs: Tensor, seed: int) -> tuple[NDArray[np.float64], float]:
    """t-SNE of outputs [K, n, C] in two dimensions, [K, n, 2], and how well the K groups part (mean silhouette)."""
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    clients, images, _ = outputs.shape
    flat = outputs.flatten(0, 1).double().numpy()
    state = derived_seed(seed, "figure", "t-SNE") % 2**32
    places = TSNE(2, perplexity=min(30.0, (len(flat) - 1) / 3), init="pca", random_state=state).fit_transform(flat)
    groups = np.repeat(np.arange(clients), images)
    score = float(silhouette_score(flat, groups)) if clients > 1 else float("nan")
    return places.reshape(clients, images, 2).astype(np.float64), score


def tsne_figure(sources: Sources) -> Drawing:
    """Fig. 5: t-SNE of the outputs on 100 plain-colour images under every client's prompt."""
    import pandas as pd

    method, data = prompted_run(sources.runs[0], sources.data_dir)
    clients = data.training_clients
    colours = plain_colours(PLAIN_IMAGES, data.seed)
    places, score = embedded(outputs_under_prompts(method, clients, plain_images(colours, data), data.seed), data.seed)
    main = label_shares(data, clients).argmax(axis=1)
    figure = new_figure(7.4, 5.6)
    axes = figure.add_subplot()
    for order, c in enumerate(np.unique(main)):
        own = places[main == c].reshape(-1, 2)
        colour, marker = COLOURS[order % len(COLOURS)], MARKERS[order % len(MARKERS)]
        axes.scatter(
            own[:, 0], own[:, 1], s=11, c=colour, marker=marker, alpha=0.7, linewidths=0, label=class_name(data, int(c))
        )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(f"Outputs on {PLAIN_IMAGES} plain-colour images under each client's prompt (t-SNE)", fontsize=11)
    if len(np.unique(main)) <= len(COLOURS):
        axes.legend(
            title="most frequent class\nof the client", fontsize=9, title_fontsize=9, markerscale=2, loc="center left",
            bbox_to_anchor=(1.0, 0.5),
        )  # fmt: skip
    index = pd.MultiIndex.from_product([clients, range(PLAIN_IMAGES)], names=["client", "image"])
    numbers = pd.DataFrame(places.reshape(-1, 2), index=index, columns=["x", "y"]).reset_index()
    numbers[["red", "green", "blue"]] = np.tile(colours, (len(clients), 1))
    numbers["most_frequent_class"] = np.repeat([class_name(data, int(c)) for c in main], PLAIN_IMAGES)
    return Drawing(
        figure,
        numbers,
        f"Fig. 5 of pFedPT: t-SNE of the logits of the last global model on the same {PLAIN_IMAGES} plain-colour "
        "images under the prompt of every client. The images carry no content: where two clients' points part, it is "
        f"their prompts that do it. Colour and marker: the client's most frequent class. "
        f"Mean silhouette of the clients' groups (in logits; 1: apart, 0 and below: mixed): {score:.2f}.",
    )
