"""The figures of the pFedPT paper (Li et al., arXiv:2303.08678), from finished runs: picture, numbers and caption.

``configs/figures/pfedpt.yaml`` says for each preset which runs they are drawn from. Runs are cells as those of tables:
done once, found again by the hash of their configs (:mod:`benchmark.cells.queue`).
"""

import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from benchmark.cells.queue import Cell, Work, content_hash, run_cells
from benchmark.contract import LocalTraining, Stage
from benchmark.drawing import draw_counts, new_figure, save_figure
from benchmark.engine.roles import names_under
from benchmark.errors import ConfigurationError
from benchmark.figures.grad_cam import INSTALL, grad_cam
from benchmark.records.grouped_runs import read_run
from benchmark.records.results import read_metrics, write_text
from benchmark.run.command import PROGRAM
from benchmark.run.reload import become_client, configured_data, restore
from benchmark.seeds import derived_seed, numpy_generator, torch_generator
from benchmark.tables.run_table import run_table
from benchmark.yaml_files import read_yaml
from datamodules.federated import FederatedDataModule
from methods import FedAvg

if TYPE_CHECKING:  # slow to import
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CONFIG = "configs/figures/pfedpt.yaml"
TABLE_OF_FIG6 = "pfedpt_fig6"

#: Okabe and Ito's colours, told apart by colour-blind readers, and two greys for a ninth and tenth.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#000000", "#8c8c8c", "#c9c9c9")
MARKERS = "osD^vP*Xh<"

PLAIN_IMAGES = 100
GREY = 128
ATTENTION_CLIENTS = 4
BAR_CLIENTS = 6


# --- what the figures are drawn from ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSpec:
    """One run: the beginning of its directory's name, its configs and its overrides."""

    name: str
    configs: list[str]
    overrides: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PartitionSpec:
    """One partition: its heading, a data configuration, and overrides without the leading dashes."""

    label: str
    config: str
    overrides: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Preset:
    """One preset of ``configs/figures/pfedpt.yaml``.

    Attributes:
        note: first sentence of every caption; empty for none.
        seed: of all runs.
        runs: by the name that a figure asks for.
        partitions: of Fig. 8.
        new_client_images: at most so many training images of a new client are used (Fig. 11).
        adaptation_epochs: passes over them (Fig. 11).
    """

    note: str
    seed: int
    runs: dict[str, RunSpec]
    partitions: list[PartitionSpec]
    new_client_images: int = 400
    adaptation_epochs: int = 10


def load_preset(name: str) -> Preset:
    """Read one preset of ``configs/figures/pfedpt.yaml``.

    Raises:
        ConfigurationError: no such file or preset, or a key or value that does not fit.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    content = read_yaml(Path(CONFIG))
    if not isinstance(content, dict) or name not in content:
        raise ConfigurationError(f"{CONFIG} has no preset {name!r}; it has {', '.join(content or ())}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--preset", type=Preset)
    try:
        preset: Preset = parser.instantiate_classes(parser.parse_object({"preset": content[name]})).preset
    except (ArgumentError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(f"{CONFIG}, preset {name}: {' '.join(str(error).split())}") from error
    return preset


@dataclass(frozen=True)
class Sources:
    """What a figure may draw from.

    Attributes:
        runs: directories of finished runs, in the order in which the figure names them.
        data_dir: folder of the data sets, or None.
        preset: sizes and partitions.
        table: the CSV of Fig. 6's table; None for other figures.
    """

    runs: list[Path]
    data_dir: Path | None
    preset: Preset
    table: Path | None = None


@dataclass(frozen=True)
class Drawing:
    """A picture, the numbers in it, and what it shows in words."""

    figure: "Figure"
    numbers: "pd.DataFrame"
    caption: str


# --- a restored run, client by client ---------------------------------------------------------------------------------


def _prompted_run(run_dir: Path, data_dir: Path | None, prompt: bool = True) -> tuple[FedAvg, FederatedDataModule]:
    method, data = restore(run_dir, data_dir)
    if not isinstance(method, FedAvg) or (prompt and method.visual_prompt is None):
        wanted = "FedAvg or a method derived from it" + (" with a prompt on the pixels" if prompt else "")
        raise ConfigurationError(f"{run_dir} is a run of {type(method).__name__}; this figure needs {wanted}")
    return method, data


def _prompted(method: FedAvg, x: Tensor, seed: int) -> Tensor:
    """Images with the present client's prompt on them; a prompt that wanders stands where the key puts it."""
    noise = method.draw_noise(torch_generator(seed, "figure", "prompt"), len(x), Stage.EVALUATE)
    return method.prompted(x, noise)


def plain_images(colours: NDArray[np.uint8], data: FederatedDataModule) -> Tensor:
    """Images of one colour each, as the backbone sees them: float32 [n, 3, H, W].

    Args:
        colours: [n, 3], 0 to 255.
        data: gives the stored size and the transform.
    """
    height, width = data.pool.images.shape[-2:]
    images = torch.from_numpy(colours)[:, :, None, None].expand(-1, -1, height, width)
    return data.transform(images, None)


@torch.no_grad()
def outputs_under_prompts(method: FedAvg, clients: Sequence[int], x: Tensor, seed: int) -> Tensor:
    """Logits [K, n, C] of the same images [n, 3, H, W] under the prompt (and with the model) of each of K clients."""
    outputs = []
    for client in clients:
        become_client(method, client)
        outputs.append(method(_prompted(method, x, seed)))
    return torch.stack(outputs)


def label_shares(data: FederatedDataModule, clients: Sequence[int]) -> NDArray[np.float64]:
    """[K, C]: which part of a client's training images is of each class."""
    counts = data.class_counts[list(clients)].numpy().astype(np.float64)
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


def _origin(runs: Sequence[Path]) -> str:
    """The last sentences of a caption: data and clients in a reader's words, and the runs' names."""
    first = read_run(runs[0])
    return f" {first.dataset}, {first.setting}. Run{'s' * (len(runs) > 1)}: {', '.join(run.name for run in runs)}."


# --- Fig. 4: attention ------------------------------------------------------------------------------------------------


def attention_maps(
    method: FedAvg, client: int, x: Tensor, y: Tensor, seed: int
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Grad-CAM of the true class without and with the client's prompt.

    Args:
        method: from :func:`benchmark.run.reload.restore`.
        client: whose prompt.
        x: images without a prompt, [B, 3, H, W].
        y: their classes, [B].
        seed: key of a wandering prompt's place.

    Returns:
        By ``"without"`` and ``"with"``: the images that the model saw, [B, 3, H, W]; the maps at the images' size,
        [B, H, W]; the probabilities of all classes, [B, C].
    """
    become_client(method, client)
    found = {}
    for name, seen in (("without", x), ("with", _prompted(method, x, seed).detach())):
        maps = grad_cam(method.backbone, method.head, seen, y)
        large = F.interpolate(maps[:, None], x.shape[-2:], mode="bilinear")[:, 0]
        with torch.no_grad():
            found[name] = (seen, large, method(seen).softmax(1))
    return found


def share_on_prompt(method: FedAvg, maps: Tensor, seed: int) -> Tensor:
    """Per map [B, H, W] the part of its sum that lies where the prompt is, [B]; NaN for a map of zeros."""
    assert method.visual_prompt is not None
    noise = method.draw_noise(torch_generator(seed, "figure", "prompt"), len(maps), Stage.EVALUATE)
    where = (method.visual_prompt.padded(noise)[0] != 0).any(0)
    return (maps * where).sum((1, 2)) / maps.sum((1, 2))


def attention_figure(sources: Sources) -> Drawing:
    """Fig. 4: where the CNN and the ViT look, without and with the prompt."""
    import pandas as pd

    restored = [_prompted_run(run, sources.data_dir) for run in sources.runs]
    data = restored[0][1]
    names = [type(method.backbone).__name__ for method, _ in restored]
    if len({str(other.manifest) for _, other in restored}) > 1:
        raise ConfigurationError("the runs of this figure are on different partitions; give runs on the same one")
    trained = data.training_clients
    clients = [trained[i] for i in np.linspace(0, len(trained) - 1, min(ATTENTION_CLIENTS, len(trained))).astype(int)]
    figure = new_figure(1.75 * (1 + 2 * len(restored)), 1.93 * len(clients) + 0.5)
    axes = figure.subplots(len(clients), 1 + 2 * len(restored), squeeze=False)
    rows = []
    for line, client in zip(axes, clients, strict=True):
        image = int(data.held_out["test"][client][0])
        x, y = data.pool.images[[image]], data.pool.labels[[image]]
        _picture(line[0], data.transform(x, None)[0], None)
        line[0].set_ylabel(f"client {client}", fontsize=10)
        line[0].set_xlabel(_name(data, int(y)), fontsize=9)
        for number, (method, own) in enumerate(restored):
            found = attention_maps(method, client, own.transform(x, None), y, own.seed)
            for place, (kind, (seen, maps, chances)) in zip(line[1 + 2 * number :], found.items(), strict=False):
                guess, chance = int(chances.argmax()), float(chances[0, int(y)])
                _picture(place, seen[0], maps[0])
                place.set_xlabel(f"{_name(data, guess)}, p(true) {chance:.2f}", fontsize=9)
                rows.append(
                    {
                        "backbone": names[number],
                        "prompt": kind,
                        "client": client,
                        "image": image,
                        "class": _name(data, int(y)),
                        "predicted": _name(data, guess),
                        "probability_of_class": chance,
                        "map_on_prompt_region": float(share_on_prompt(method, maps, own.seed)),
                    }
                )
    axes[0][0].set_title("test image", fontsize=10)
    for number, name in enumerate(names):
        for place, kind in zip(axes[0][1 + 2 * number :], ("without prompt", "with prompt"), strict=False):
            place.set_title(f"{name}\n{kind}", fontsize=10)
    numbers = pd.DataFrame(rows)
    on = numbers.groupby(["backbone", "prompt"])["map_on_prompt_region"].mean()
    shares = "; ".join(f"{name} {on[name, 'without']:.2f} without, {on[name, 'with']:.2f} with" for name in names)
    return Drawing(
        figure,
        numbers,
        "Fig. 4 of pFedPT: Grad-CAM of the true class on each client's first test image, without and with the client's "
        "own prompt, by the last global model; each map scaled to its own largest value and stretched over the image; "
        f"below: the predicted class and the probability of the true one. Mean part of the map on "
        f"the prompt's pixels: {shares}.",
    )


def _name(data: FederatedDataModule, label: int) -> str:
    return data.class_names[label].replace("_", " ")


def _picture(axes: "Axes", x: Tensor, heat: Tensor | None) -> None:
    """An image [3, H, W], stretched to what can be shown, and over it a map [H, W]."""
    low, high = -1.5, 1.5  # of normalised pixels: a prompt reaches beyond black and white
    shown = ((x - low) / (high - low)).clamp(0, 1) if heat is not None else (x - x.min()) / (x.max() - x.min())
    axes.imshow(shown.permute(1, 2, 0).numpy(), interpolation="nearest")
    if heat is not None:
        strength = (heat / heat.max().clamp(min=1e-12)).numpy()
        axes.imshow(strength, cmap="plasma", vmin=0, vmax=1, alpha=0.8 * strength)
    axes.set_xticks([])
    axes.set_yticks([])


# --- Fig. 5: t-SNE of the outputs -------------------------------------------------------------------------------------


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

    method, data = _prompted_run(sources.runs[0], sources.data_dir)
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
            own[:, 0], own[:, 1], s=11, c=colour, marker=marker, alpha=0.7, linewidths=0, label=_name(data, int(c))
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
    numbers["most_frequent_class"] = np.repeat([_name(data, int(c)) for c in main], PLAIN_IMAGES)
    return Drawing(
        figure,
        numbers,
        f"Fig. 5 of pFedPT: t-SNE of the logits of the last global model on the same {PLAIN_IMAGES} plain-colour "
        "images under the prompt of every client. The images carry no content: where two clients' points part, it is "
        f"their prompts that do it. Colour and marker: the client's most frequent class. "
        f"Mean silhouette of the clients' groups (in logits; 1: apart, 0 and below: mixed): {score:.2f}.",
    )


# --- Fig. 6: template and size ----------------------------------------------------------------------------------------


def sizes_by_template(table: "pd.DataFrame", column: str = "Pooled") -> "pd.DataFrame":
    """From a table's long CSV one row per template and size: ``template``, ``size``, ``accuracy``, ``std``.

    Raises:
        ConfigurationError: the table has no such column, or a row's label is not ``Template, p=size``.
    """
    rows = table[(table["kind"] == "column") & (table["column"] == column)]
    parts = rows["method"].str.extract(r"^(?P<template>.+), p=(?P<size>\d+)$")
    if rows.empty or parts.isna().any(axis=None):
        raise ConfigurationError(f"the table of Fig. 6 needs a column {column!r} and rows named 'Template, p=size'")
    found = parts.assign(size=parts["size"].astype(int), accuracy=rows["ours"], std=rows["std"], rounds=rows["rounds"])
    return found.reset_index(drop=True)


def sizes_figure(sources: Sources) -> Drawing:
    """Fig. 6: accuracy over the prompt's template and size, from the table of the same name."""
    import pandas as pd

    assert sources.table is not None
    numbers = sizes_by_template(pd.read_csv(sources.table, dtype={"rounds": "str"}))
    figure = new_figure(6.4, 4.2)
    axes = figure.add_subplot()
    for order, (template, part) in enumerate(numbers.groupby("template", sort=False)):
        part = part.sort_values("size")
        axes.errorbar(
            part["size"], part["accuracy"], yerr=part["std"].fillna(0), label=template, capsize=3, markersize=7,
            color=COLOURS[order], marker=MARKERS[order], linestyle=("-", "--", ":")[order % 3], linewidth=1.8,
        )  # fmt: skip
    axes.set_xticks(sorted(set(numbers["size"])))
    _labels(
        axes, "size p of the prompt (pixels)", "accuracy (%), all clients pooled", "Template and size of the prompt"
    )
    figure.legend(loc="outside lower center", ncols=3, fontsize=10)
    rounds = ", ".join(dict.fromkeys(numbers["rounds"]))
    return Drawing(
        figure,
        numbers,
        "Fig. 6 of pFedPT: accuracy pooled over all clients' test images against template and size of the prompt, best "
        f"of {rounds} rounds, chosen on test data (as the paper does). Numbers and runs: table {sources.table.stem}.",
    )


def _labels(axes: "Axes", x: str, y: str, title: str) -> None:
    axes.set_xlabel(x, fontsize=10)
    axes.set_ylabel(y, fontsize=10)
    axes.set_title(title, fontsize=11)
    axes.tick_params(labelsize=9)
    axes.grid(color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# --- Fig. 8: partitions -----------------------------------------------------------------------------------------------


def partitions_figure(sources: Sources) -> Drawing:
    """Fig. 8: who holds how many images of each class, for every setting of the paper and both readings of it."""
    import pandas as pd

    given = sources.preset.partitions
    figure = new_figure(12.5, 3.3 * -(-len(given) // 2))
    grid = figure.subplots(-(-len(given) // 2), 2, squeeze=False).ravel()
    parts, said = [], []
    for axes, spec in zip(grid, given, strict=False):
        overrides = [entry.replace("{data_dir}", str(sources.data_dir)) for entry in spec.overrides]
        data = configured_data(Path(spec.config), overrides)
        counts = data.class_counts.numpy()
        draw_counts(axes, counts, data.class_names)
        axes.set_title(spec.label, fontsize=11)
        index = pd.MultiIndex.from_product(
            [[spec.label], range(len(counts)), data.class_names], names=["partition", "client", "class"]
        )
        parts.append(pd.Series(counts.ravel(), index=index, name="training_images").reset_index())
        sizes = counts.sum(axis=1)
        said.append(f"{spec.label} {sizes.min():,} to {sizes.max():,}")
    for axes in grid[len(given) :]:
        axes.set_visible(False)
    return Drawing(
        figure,
        pd.concat(parts, ignore_index=True),
        "Fig. 8 of pFedPT: training images of each class (rows) at each client (columns), for each setting in two "
        f"readings; white: none. {type(data.source).__name__}. Training images of a client: {'; '.join(said)}.",
    )


# --- Fig. 9: what a prompt knows of the labels ------------------------------------------------------------------------


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

    method, data = _prompted_run(sources.runs[0], sources.data_dir)
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
        _labels(axes, "", "", f"client {clients[place]}, distance {distance:.2f}")
        axes.grid(visible=False, axis="x")
        axes.set_ylim(0, 1)
        if data.num_classes <= 12:
            axes.set_xticks(at, [_name(data, int(c)) for c in at], rotation=60, fontsize=9)
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


# --- Fig. 10: movement of the prompts ---------------------------------------------------------------------------------


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
    _labels(left, "round", "L2 distance", "Change of the prompt in a round")
    _labels(right, "round", "L2 distance", "Distance of the prompt from its start")
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


# --- Fig. 11: a new client --------------------------------------------------------------------------------------------


def adaptation_curve(
    method: FedAvg,
    parameters: Sequence[str],
    training: LocalTraining,
    x: Tensor,
    y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    batch_size: int,
    epochs: int,
    key: Sequence[int | str],
) -> list[float]:
    """Accuracy of a client after 0, 1, ..., ``epochs`` passes of SGD over its images; a copy is trained.

    Args:
        method: holding the client's state (:func:`benchmark.run.reload.become_client`).
        parameters: prefixes of what is trained; everything else rests.
        training: learning rate, momentum and weight decay.
        x: training images, [n, 3, H, W].
        y: their classes, [n].
        test_x: test images, [m, 3, H, W].
        test_y: their classes, [m].
        batch_size: B.
        epochs: passes.
        key: of the order of the images.

    Returns:
        [epochs + 1], fractions.
    """
    copied = copy.deepcopy(method).requires_grad_(False)
    trained = [copied.get_parameter(name) for name in names_under(copied, parameters)]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.SGD(trained, training.lr, training.momentum, weight_decay=training.weight_decay)

    def logits(images: Tensor, *part: int | str) -> Tensor:
        noise = copied.draw_noise(torch_generator(*key, "noise", *part), len(images), Stage.ADAPT)
        return copied(copied.prompted(images, noise))

    @torch.no_grad()
    def accuracy() -> float:
        right = sum(int((logits(a, "test").argmax(1) == b).sum()) for a, b in _batches(test_x, test_y))
        return right / len(test_y)

    curve = [accuracy()]
    for epoch in range(epochs):
        order = torch.randperm(len(y), generator=torch_generator(*key, "order", epoch))
        for step, rows in enumerate(order.split(batch_size)):
            optimizer.zero_grad()
            F.cross_entropy(logits(x[rows], epoch, step), y[rows]).backward()
            optimizer.step()
        curve.append(accuracy())
    return curve


def _batches(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.split(256), y.split(256), strict=True)


def _newcomers(run: Path, sources: Sources) -> tuple[list[dict[str, Any]], int, list[int]]:
    """Every new client's curve as rows, how many numbers are trained, and the clients' training images."""
    method, data = _prompted_run(run, sources.data_dir, prompt=False)
    if not data.new_clients:
        raise ConfigurationError(f"{run} has no new clients; this figure needs a run with data.new_clients above 0")
    prompt = method.visual_prompt
    parameters = ["head"] if prompt is None else ["visual_prompt"]
    training = method.training_settings if prompt is None else prompt.training_settings
    what = "FedAvg, last layer" if prompt is None else "pFedPT, prompt"
    numbers = sum(method.get_parameter(name).numel() for name in names_under(method, parameters))
    rows: list[dict[str, Any]] = []
    sizes = []
    for client in data.new_clients:
        become_client(method, client)
        key = (data.seed, "figure", "new client", client)
        own = numpy_generator(*key).permutation(data.train_indices[client])[: sources.preset.new_client_images]
        sides = [torch.from_numpy(side) for side in (own, data.held_out["new"][client])]
        (x, y), (test_x, test_y) = ((data.transform(data.pool.images[s], None), data.pool.labels[s]) for s in sides)
        curve = adaptation_curve(
            method, parameters, training, x, y, test_x, test_y, data.batch_size, sources.preset.adaptation_epochs, key
        )
        sizes.append(len(y))
        rows += [
            {"adapted": what, "client": client, "epoch": epoch, "accuracy": accuracy, "training_images": len(y)}
            for epoch, accuracy in enumerate(curve)
        ]
    return rows, numbers, sizes


def newcomers_figure(sources: Sources) -> Drawing:
    """Fig. 11: how fast a new client's prompt adapts, against FedAvg's last layer."""
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(6.6, 4.4)
    axes = figure.add_subplot()
    parts, said = [], []
    for order, run in enumerate(sources.runs):
        rows, trained, sizes = _newcomers(run, sources)
        part = pd.DataFrame(rows)
        parts.append(part)
        name, colour = str(part["adapted"].iloc[0]), COLOURS[order]
        for _, own in part.groupby("client"):
            axes.plot(own["epoch"], 100 * own["accuracy"], color=colour, linewidth=0.8, alpha=0.4)
        mean = 100 * part.groupby("epoch")["accuracy"].mean()
        label = f"{name} ({trained:,} numbers)"
        axes.plot(
            mean.index, mean, color=colour, marker=MARKERS[order], linewidth=2.4, markersize=6, label=label,
            linestyle=("-", "--")[order % 2],
        )  # fmt: skip
        said.append(f"{name} {mean.iloc[0]:.1f} before and {mean.iloc[-1]:.1f} after {mean.index[-1]} epochs")
    _labels(axes, "epochs of adaptation", "accuracy (%) on own test images", "New clients adapt to the federated model")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=10)
    span = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else str(min(sizes))
    return Drawing(
        figure,
        pd.concat(parts, ignore_index=True),
        f"Fig. 11 of pFedPT: {len(sizes)} clients that never trained fit a part of the federated model to at most "
        f"{sources.preset.new_client_images} images of their own (here {span}), everything else at rest; thick: mean, "
        f"thin: each client. Mean accuracy in per cent: {'; '.join(said)}.",
    )


# --- all of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FigureSpec:
    """How a figure is made: from which of a preset's runs, by which function, with which further package."""

    draw: Callable[[Sources], Drawing]
    runs: tuple[str, ...] = ()
    of_table: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)


FIGURES = {
    "pfedpt_fig4": FigureSpec(attention_figure, ("pfedpt_cnn", "pfedpt_vit"), needs={"captum": INSTALL}),
    "pfedpt_fig5": FigureSpec(tsne_figure, ("pfedpt_cnn",)),
    "pfedpt_fig6": FigureSpec(sizes_figure, of_table=True),
    "pfedpt_fig8": FigureSpec(partitions_figure),
    "pfedpt_fig9": FigureSpec(labels_figure, ("pfedpt_cnn",)),
    "pfedpt_fig10": FigureSpec(movement_figure, ("pfedpt_cnn",)),
    "pfedpt_fig11": FigureSpec(newcomers_figure, ("newcomers_pfedpt", "newcomers_fedavg")),
}


@dataclass(frozen=True)
class FigureFiles:
    """What was written: the picture, its numbers, its caption."""

    png: Path
    csv: Path
    txt: Path


def make_figure(
    name: str,
    preset_name: str = "demo",
    data_dir: str | Path | None = None,
    run_dirs: Sequence[str | Path] = (),
    jobs: int | None = None,
    results_dir: str | Path = "results",
    runs_dir: str | Path = "runs",
    program: Sequence[str] = PROGRAM,
) -> FigureFiles:
    """Do the runs that are missing, then write ``results_dir/figures/<name>_<preset>.{png,csv,txt}``.

    Args:
        name: of :data:`FIGURES`.
        preset_name: of ``configs/figures/pfedpt.yaml``.
        data_dir: folder of the data sets.
        run_dirs: finished runs to draw from in place of the preset's, in the order of the figure's; then the files are
            named after the first of them instead of the preset.
        jobs: runs at a time; by default as ``run_cells`` chooses.
        results_dir: where ``figures`` is.
        runs_dir: where runs are made and looked for.
        program: command in front of ``fit``.

    Raises:
        ConfigurationError: an unknown figure or preset, a package or ``data_dir`` that is missing, a run that failed or
            is not what the figure needs.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP, after the children were ended.
    """
    if name not in FIGURES:
        raise ConfigurationError(f"there is no figure {name!r}; figures are {', '.join(FIGURES)}")
    spec = FIGURES[name]
    for package, advice in spec.needs.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(advice)
    preset = load_preset(preset_name)
    folder = None if data_dir is None else Path(data_dir).expanduser().absolute()
    if run_dirs and len(run_dirs) != len(spec.runs):
        wanted = f"{len(spec.runs)} ({', '.join(spec.runs)})" if spec.runs else "none"
        raise ConfigurationError(f"{name} is drawn from {wanted} runs, got {len(run_dirs)} with --run_dir")
    needed = [
        *(e for run in spec.runs for e in preset.runs[run].overrides),
        *(e for p in preset.partitions for e in p.overrides),
    ]
    if folder is None and not run_dirs and any("{data_dir}" in entry for entry in needed):
        raise ConfigurationError(
            f"the preset {preset_name} of {name} reads data sets: give their folder with --data_dir or DATA_DIR"
        )
    table = None
    if spec.of_table:
        made = run_table(TABLE_OF_FIG6, preset_name, data_dir, jobs, results_dir, runs_dir, program=program)
        if made.failed:
            failed, outcome = next(iter(made.failed.items()))
            raise ConfigurationError(f"{len(made.failed)} runs of the table failed, first {failed}: {outcome.error}")
        table = made.csv
    runs = [Path(run) for run in run_dirs] or _finished_runs(spec, preset, folder, jobs, Path(runs_dir), program)
    sources = Sources(runs, folder, preset, table)
    drawing = spec.draw(sources)
    stem = f"{name}_{runs[0].name if run_dirs else preset_name}"
    target = Path(results_dir) / "figures"
    files = FigureFiles(*(target / f"{stem}.{suffix}" for suffix in ("png", "csv", "txt")))
    note = f"{preset.note} " if preset.note and not run_dirs else ""
    save_figure(drawing.figure, files.png)
    write_text(files.csv, drawing.numbers.to_csv(index=False, float_format="%.6g"))
    write_text(files.txt, f"{note}{drawing.caption}{_origin(runs) if runs else ''}\n")
    return files


def _finished_runs(
    spec: FigureSpec, preset: Preset, data_dir: Path | None, jobs: int | None, runs_dir: Path, program: Sequence[str]
) -> list[Path]:
    cells = []
    for run in (preset.runs[name] for name in spec.runs):
        configs, overrides = tuple(run.configs), tuple(run.overrides)
        name = f"{run.name}-s{preset.seed}-{content_hash(configs, overrides)}"
        cells.append(Cell(name, configs, overrides, preset.seed))
    if not cells:
        return []
    outcomes = run_cells(cells, Work(runs_dir, None, data_dir, tuple(program)), jobs)
    finished = []
    for cell in cells:
        outcome = outcomes[cell.name]
        if outcome.run_dir is None:
            log = f" (log: {outcome.log})" if outcome.log else ""
            raise ConfigurationError(f"the run {cell.name} failed: {outcome.error}{log}")
        finished.append(outcome.run_dir)
    return finished
