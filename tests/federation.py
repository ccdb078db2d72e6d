"""A tiny federation for tests: eleven ragged clients, 8 classes of synthetic images, and how to run a method on it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmark.checks.methods import learned as learned
from benchmark.checks.methods import run_rounds
from benchmark.federation import Federation, Round, Uploads, Values
from benchmark.run.cli import FederatedCLI
from benchmark.server import ServerRule
from datamodules.federated import FederatedDataModule
from datamodules.partition import ClientSplits, Partition
from datamodules.source import ImagePool, ImageSource

CONF = Path(__file__).parent / "conf"
fit = run_rounds
SIZES = (9, 4, 17, 3, 8, 12, 5, 20, 1, 6, 11)


class TinyImages(ImageSource):
    """Noise around one random picture a class, 32 x 32."""

    class_names = tuple(f"class{c}" for c in range(8))

    def __init__(self, size: int = 32) -> None:
        self.size = size

    def load(self) -> ImagePool:
        """176 images, 22 of each class, half of them test images."""
        rng = np.random.default_rng(7)
        labels = np.tile(np.arange(8), 22)
        means = rng.integers(60, 190, (8, 3, self.size, self.size))
        noise = rng.integers(-50, 50, (len(labels), 3, self.size, self.size))
        images = np.clip(means[labels] + noise, 0, 255).astype(np.uint8)
        return ImagePool(
            images=torch.from_numpy(images),
            labels=torch.from_numpy(labels),
            test=torch.arange(len(labels)) >= 110,
            domains=torch.zeros(len(labels), dtype=torch.int64),
            group=torch.arange(len(labels)),
        )


class Ragged(Partition):
    """Clients of very different sizes; each is tested on six images."""

    def __init__(self, num_clients: int = 11) -> None:
        self.num_clients = num_clients

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Consecutive runs of the pool."""
        ends = np.cumsum(SIZES[: self.num_clients])
        train = [np.arange(end - size, end) for end, size in zip(ends, SIZES, strict=False)]
        test = [np.arange(110 + 6 * k, 116 + 6 * k) for k in range(self.num_clients)]
        return ClientSplits([t.astype(np.int64) for t in train], [t.astype(np.int64) for t in test])


def federation(clients: int, participants: int | None = None, seed: int = 0, classes: int = 8) -> Federation:
    """The facts of a federation without any images, for a rule that is tested alone: client k holds k + 1 rows."""
    rows = {client: np.arange(client + 1) for client in range(clients)}
    return Federation(
        seed=seed,
        num_clients=clients,
        training_clients=tuple(range(clients)),
        new_clients=(),
        participants=clients if participants is None else participants,
        train_rows=rows,
        train_sizes={client: len(own) for client, own in rows.items()},
        held_out={},
        class_counts=torch.ones(clients, classes, dtype=torch.int64),
        label_spaces={},
        batch_size=4,
        drop_last=False,
        eval_batch_size=4,
    )


class Witness(ServerRule):
    """FedAvg's server that remembers what it has received, a round after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Uploads] = []

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Remember the uploads."""
        self.seen.append(uploads)
        return super().aggregate(round, shared, uploads)

    @property
    def last(self) -> dict[int, Values]:
        """Per client, what it has uploaded last."""
        return {
            client: {name: value[row] for name, value in uploads.values.items()}
            for uploads in self.seen
            for row, client in enumerate(uploads.clients)
        }


def build(conf: str, *overrides: str) -> tuple[Any, FederatedDataModule]:
    """Method and data of ``tests/conf/<conf>.yaml`` on the tiny federation."""
    args = ["--config", str(CONF / "base.yaml"), "--config", str(CONF / f"{conf}.yaml"), *overrides]
    cli = FederatedCLI(args, run=False)
    return cli.model, cli.datamodule
