"""The cost of the engine against a plain PyTorch loop of the same mathematics.

The work is one FedAvg round with the CNN of pFedPT, batches of 16, on random images in memory. Both are timed in one
process, in turns.
"""

import copy
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmark.backbones.cnn import PaperCNN
from benchmark.backbones.pixel_prompts import PaddingPrompt
from benchmark.backbones.tiny_vit import TinyViT
from benchmark.contract import LocalTraining
from benchmark.method import FederatedMethod
from benchmark.speed.measure import RandomImages, Timing, device, fit
from datamodules.federated import FederatedDataModule
from datamodules.partition import IID
from datamodules.transform import ImageTransform
from methods.fedavg import FedAvg
from methods.pfedpt import PFedPT

CLIENTS, IMAGES, BATCH = 10, 160, 16
TRAINING = LocalTraining(lr=0.005, epochs=1)
PROMPT = LocalTraining(lr=1.0, momentum=0.5, epochs=1)


def fedavg(backbone: nn.Module) -> FedAvg:
    """FedAvg of all weights."""
    return FedAvg(10, CLIENTS, backbone, training=TRAINING)


def pfedpt(backbone: nn.Module) -> PFedPT:
    """The same after a phase that trains each client's frame of 4 pixels."""
    return PFedPT(10, CLIENTS, backbone, training=TRAINING, visual_prompt=PaddingPrompt(training=PROMPT))


def engine(width: int, rounds: int, method: Callable[[], FederatedMethod] = lambda: fedavg(PaperCNN())) -> float:
    """Seconds of the best round, local training and aggregation, of the engine with so many clients at once."""
    torch.manual_seed(0)
    data = FederatedDataModule(
        _source(), IID(CLIENTS), ImageTransform(), batch_size=BATCH, clients_at_once=width, eval_batch_size=BATCH
    )
    return fit(method(), data, rounds).best


def _source() -> RandomImages:
    return RandomImages(CLIENTS * IMAGES, 10 * CLIENTS)


def plain(
    rounds: int,
    network: Callable[[], nn.Module] | None = None,
    prompted: bool = False,
    each_round: Callable[[], None] = lambda: None,
) -> float:
    """Seconds of the best round of a loop over clients with one copy of the model each, and nothing else.

    Args:
        rounds: at least two.
        network: images [B, 3, 32, 32] to logits [B, 10]; pFedPT's CNN by default.
        prompted: each client first trains a frame of pixels of its own.
        each_round: called at the end of each round.
    """
    torch.manual_seed(0)
    pool = _source().load()
    images, labels = pool.images.to(device()), pool.labels.to(device())
    transform = ImageTransform()
    model = (network or plain_cnn)().to(device())
    prompts = [PaddingPrompt().to(device()) if prompted else None for _ in range(CLIENTS)]
    indices = {k: np.arange(k * IMAGES, (k + 1) * IMAGES) for k in range(CLIENTS)}
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        total = [torch.zeros_like(p) for p in model.parameters()]
        for client, prompt in enumerate(prompts):
            local = copy.deepcopy(model)
            phases: list[tuple[nn.Module, LocalTraining]] = [(local, TRAINING)]
            for part, training in [*([] if prompt is None else [(prompt, PROMPT)]), *phases]:
                model_rests = part is prompt
                local.requires_grad_(not model_rests)
                optimizer = torch.optim.SGD(part.parameters(), training.lr, training.momentum)
                order = torch.from_numpy(np.random.default_rng(client).permutation(indices[client])).to(device())
                for rows in order.split(BATCH):
                    x = transform(images[rows], None)
                    if prompt is not None:
                        x = prompt(x, {}) if model_rests else prompt(x, {}).detach()
                    loss = F.cross_entropy(local(x), labels[rows])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            for mean, value in zip(total, local.parameters(), strict=True):
                mean.add_(value.detach(), alpha=1 / CLIENTS)
        for parameter, mean in zip(model.parameters(), total, strict=True):
            parameter.data.copy_(mean)
        if device() == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        each_round()
    return min(seconds[1:])


def plain_vit() -> nn.Module:
    """PFedPT's tiny ViT with its classifier, with every token of every layer, as its code computes it."""
    backbone = TinyViT()
    for block in backbone.vit.blocks:
        block.attn.fused_attn = device() == "cuda"  # type: ignore[union-attr]  # as the engine has it
    return nn.Sequential(backbone.vit, nn.Linear(backbone.num_features, 10))


def plain_cnn() -> nn.Module:
    """PFedPT's CNN from ordinary layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for inputs, outputs in ((1600, 394), (394, 192)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(192, 10))


def run(folder: Path, turns: int = 3) -> tuple[str, list[Timing]]:
    """Time the loop and the engine in turns."""
    best: dict[str, float] = {}
    for _ in range(turns):
        for name, timed in (
            ("plain loop", lambda: plain(4)),
            ("engine, width 1", lambda: engine(1, 4)),
            ("engine, width 10", lambda: engine(10, 4)),
        ):
            best[name] = min(best.get(name, float("inf")), timed())
    work = f"{CLIENTS} clients x {IMAGES // BATCH} steps of {BATCH} images"
    rows = [Timing(name, work, value, value / best["plain loop"]) for name, value in best.items()]
    return "One FedAvg round with pFedPT's CNN, against a plain loop", rows
