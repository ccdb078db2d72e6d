"""What the engine costs, against a plain PyTorch loop of the same mathematics.

The work is one FedAvg round with the CNN of pFedPT, batches of 16, on random images in memory. Everything is timed in
one process, in turns.
"""

import copy
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmark.backbones.cnn import PaperCNN
from benchmark.contract import LocalTraining
from benchmark.speed.measure import RandomImages, Row, device, fit
from datamodules.federated import FederatedDataModule
from datamodules.partition import IID
from datamodules.transform import ImageTransform
from methods.fedavg import FedAvg

CLIENTS, IMAGES, BATCH, LR = 10, 160, 16, 0.005


def engine(width: int, rounds: int) -> float:
    """Seconds of the best round, local training and aggregation, of the engine with this cohort width."""
    torch.manual_seed(0)
    data = FederatedDataModule(
        _source(), IID(CLIENTS), ImageTransform(), batch_size=BATCH, cohort_width=width, eval_batch_size=BATCH
    )
    return fit(FedAvg(10, CLIENTS, PaperCNN(), training=LocalTraining(lr=LR, epochs=1)), data, rounds).best


def _source() -> RandomImages:
    return RandomImages(CLIENTS * IMAGES, 10 * CLIENTS)


def plain(rounds: int) -> float:
    """Seconds of the best round of a loop over clients with one copy of the model each, and nothing else."""
    torch.manual_seed(0)
    pool = _source().load()
    images, labels = pool.images.to(device()), pool.labels.to(device())
    transform = ImageTransform()
    model = nn.Sequential(*_plain_cnn(), nn.Linear(192, 10)).to(device())
    indices = {k: np.arange(k * IMAGES, (k + 1) * IMAGES) for k in range(CLIENTS)}
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        total = [torch.zeros_like(p) for p in model.parameters()]
        for client in range(CLIENTS):
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), LR)
            order = torch.from_numpy(np.random.default_rng(client).permutation(indices[client])).to(device())
            for rows in order.split(BATCH):
                loss = F.cross_entropy(local(transform(images[rows], None)), labels[rows])
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
    return min(seconds[1:])


def _plain_cnn() -> list[nn.Module]:
    """The same network from ordinary layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for inputs, outputs in ((1600, 394), (394, 192)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers


def run(folder: Path, turns: int = 3) -> tuple[str, list[Row]]:
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
    rows = [Row(name, work, value, value / best["plain loop"]) for name, value in best.items()]
    return "One FedAvg round with pFedPT's CNN, against a plain loop", rows
