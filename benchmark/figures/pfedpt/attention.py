"""Fig. 4: where a network looks without and with the prompt."""

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.contract import Stage
from benchmark.drawing import new_figure
from benchmark.errors import ConfigurationError
from benchmark.figures.grad_cam import grad_cam
from benchmark.figures.pfedpt.prompts import prompted, prompted_run
from benchmark.figures.pfedpt.sources import Drawing, Sources
from benchmark.figures.pfedpt.style import class_name
from benchmark.run.reload import become_client
from benchmark.seeds import torch_generator
from methods import FedAvg

if TYPE_CHECKING:  # slow to import
    from matplotlib.axes import Axes


ATTENTION_CLIENTS = 4


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
    for name, seen in (("without", x), ("with", prompted(method, x, seed).detach())):
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

    restored = [prompted_run(run, sources.data_dir) for run in sources.runs]
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
        line[0].set_xlabel(class_name(data, int(y)), fontsize=9)
        for number, (method, own) in enumerate(restored):
            found = attention_maps(method, client, own.transform(x, None), y, own.seed)
            for place, (kind, (seen, maps, chances)) in zip(line[1 + 2 * number :], found.items(), strict=False):
                guess, chance = int(chances.argmax()), float(chances[0, int(y)])
                _picture(place, seen[0], maps[0])
                place.set_xlabel(f"{class_name(data, guess)}, p(true) {chance:.2f}", fontsize=9)
                rows.append(
                    {
                        "backbone": names[number],
                        "prompt": kind,
                        "client": client,
                        "image": image,
                        "class": class_name(data, int(y)),
                        "predicted": class_name(data, guess),
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
