"""What the engine costs, against a plain PyTorch loop of the same mathematics: ``make bench``.

The work is one FedAvg round with the CNN of pFedPT, batches of 16, on random images in memory. Everything is timed in
one process, in turns, and each figure is the best of its repetitions; only the ratios mean something elsewhere.
"""

import argparse
import copy
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn

from benchmark.backbones.cnn import PaperCNN
from benchmark.cli import TRAINER_DEFAULTS
from benchmark.method import LocalTraining
from benchmark.results import environment, write_json
from datamodules.base import FederatedDataModule
from datamodules.partition import IID
from datamodules.source import ImagePool, ImageSource
from datamodules.transform import ImageTransform
from methods.fedavg import FedAvg

CLIENTS, IMAGES, BATCH, LR = 10, 160, 16, 0.005


class RandomImages(ImageSource):
    """Noise of CIFAR's shape: 160 training images a client, and few test images."""

    class_names: ClassVar[tuple[str, ...]] = tuple(str(c) for c in range(10))

    def load(self) -> ImagePool:
        """The pool; labels cycle, so that every client can hold every class."""
        n = CLIENTS * IMAGES + 10 * CLIENTS
        rng = np.random.default_rng(0)
        return ImagePool(
            images=torch.from_numpy(rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)),
            labels=torch.arange(n) % 10,
            test=torch.arange(n) >= CLIENTS * IMAGES,
            domains=torch.zeros(n, dtype=torch.int64),
            group=torch.arange(n),
        )


class _RoundClock(Callback):
    """Seconds from a round's first hook to its last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)


def engine(width: int, rounds: int, device: str) -> float:
    """Seconds of the best round, local training and aggregation, of the engine with this cohort width."""
    torch.manual_seed(0)
    data = FederatedDataModule(
        RandomImages(), IID(CLIENTS), ImageTransform(), batch_size=BATCH, cohort_width=width, eval_batch_size=BATCH
    )
    method = FedAvg(10, CLIENTS, PaperCNN(), LocalTraining(lr=LR, epochs=1))
    clock = _RoundClock()
    trainer = Trainer(
        **{**TRAINER_DEFAULTS, "max_epochs": rounds, "num_sanity_val_steps": 0},
        accelerator=device,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=[clock],
    )
    trainer.fit(method, datamodule=data)
    return min(clock.seconds[1:])


def plain(rounds: int, device: str) -> float:
    """Seconds of the best round of a loop over clients with one copy of the model each, and nothing else."""
    torch.manual_seed(0)
    pool = RandomImages().load()
    images, labels = pool.images.to(device), pool.labels.to(device)
    transform = ImageTransform()
    model = nn.Sequential(*_plain_cnn(), nn.Linear(192, 10)).to(device)
    indices = {k: np.arange(k * IMAGES, (k + 1) * IMAGES) for k in range(CLIENTS)}
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        total = [torch.zeros_like(p) for p in model.parameters()]
        for client in range(CLIENTS):
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), LR)
            order = torch.from_numpy(np.random.default_rng(client).permutation(indices[client])).to(device)
            for rows in order.split(BATCH):
                loss = F.cross_entropy(local(transform(images[rows], None)), labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for mean, value in zip(total, local.parameters(), strict=True):
                mean.add_(value.detach(), alpha=1 / CLIENTS)
        for parameter, mean in zip(model.parameters(), total, strict=True):
            parameter.data.copy_(mean)
        if device == "cuda":
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


def main() -> None:
    """Time the loop and the engine in turns, print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="how often each is timed, in turns")
    parser.add_argument("--out", type=Path, default=Path("results/speed/engine.json"))
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    best: dict[str, float] = {}
    for _ in range(arguments.turns):
        for name, seconds in (
            ("plain loop", lambda: plain(4, device)),
            ("engine, width 1", lambda: engine(1, 4, device)),
            ("engine, width 10", lambda: engine(10, 4, device)),
        ):
            best[name] = min(best.get(name, float("inf")), seconds())
    reference = best["plain loop"]
    rows = [{"what": name, "seconds": value, "ratio": value / reference} for name, value in best.items()]
    print(f"One FedAvg round: {CLIENTS} clients x {IMAGES // BATCH} steps of {BATCH} images, pFedPT's CNN, {device}")
    for row in rows:
        print(f"{row['what']:18} {row['seconds']:8.3f} s   {row['ratio']:.3f} x the plain loop")
    print(f"width 10 against width 1: {best['engine, width 10'] / best['engine, width 1']:.3f}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out, {"rows": rows, "device": device, "threads": torch.get_num_threads(), **environment()})


if __name__ == "__main__":
    main()
