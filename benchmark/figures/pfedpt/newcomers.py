"""Fig. 11: how fast a client that never trained adapts."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.contract import LocalTraining, Stage
from benchmark.drawing import new_figure
from benchmark.engine.roles import names_under
from benchmark.errors import ConfigurationError
from benchmark.figures.pfedpt.prompts import prompted_run
from benchmark.figures.pfedpt.sources import Drawing, Sources
from benchmark.figures.pfedpt.style import COLOURS, MARKERS, label_axes
from benchmark.run.reload import become_client
from benchmark.seeds import numpy_generator, torch_generator
from methods import FedAvg


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
    label_axes(
        axes, "epochs of adaptation", "accuracy (%) on own test images", "New clients adapt to the federated model"
    )
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


def _newcomers(run: Path, sources: Sources) -> tuple[list[dict[str, Any]], int, list[int]]:
    """Every new client's curve as rows, how many numbers are trained, and the clients' training images."""
    method, data = prompted_run(run, sources.data_dir, prompt=False)
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


def _batches(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.split(256), y.split(256), strict=True)
