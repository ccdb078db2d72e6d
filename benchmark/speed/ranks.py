"""The gain of several devices for one federation: seconds of a round, personal state by rank, bytes between ranks.

On GPUs, 1, 2, 4 and 8 devices are measured, as far as there are so many; else processes with one thread each. Every
number of devices is measured by its own program, which starts its other processes as ``lightning-cli`` does.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from benchmark.backbones.cnn import PaperCNN
from benchmark.contract import LocalTraining
from benchmark.ranks.process_numbers import is_first_process
from benchmark.ranks.processes import ProcessRanks
from benchmark.ranks.strategy import RanksStrategy
from benchmark.speed import growth
from benchmark.speed.measure import RandomImages, Timing, device, fit, last_line_of
from datamodules.federated import FederatedDataModule
from datamodules.partition import IID
from datamodules.transform import ImageTransform
from methods.fedavg import FedAvg
from methods.fedper import FedPer

#: The round: clients, training images of each, mini-batch.
CLIENTS, IMAGES, BATCH = 16, 160, 16
#: Clients whose personal heads lie with the ranks.
MANY = 10_000
ROUNDS = 4
TRAINING = LocalTraining(lr=0.005, epochs=1)


@dataclass(frozen=True)
class Shared:
    """The time, traffic and memory that a number of devices takes.

    Attributes:
        round: seconds of the fastest round after the first.
        waiting: seconds of the last one that the first rank waits for others and sends.
        received: bytes that the first rank receives in it.
        state_bytes: personal state by rank.
        memory: peak bytes of the first process, of its device where that is a GPU.
    """

    round: float
    waiting: float
    received: int
    state_bytes: list[int]
    memory: int


class _Talk(Callback):
    """Reads what a rank has received, and how long it has waited, at the end of every round; and who holds what."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, float]] = []
        self.state_bytes: list[int] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        ranks = pl_module.simulation.ranks
        self.rounds.append((ranks.received, ranks.seconds) if isinstance(ranks, ProcessRanks) else (0, 0.0))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        held = sum(rows.numel() * rows.element_size() for rows in pl_module.store.buffers())
        self.state_bytes = pl_module.simulation.ranks.everybody("bytes", held)


def share(devices: int, heads: bool) -> Shared:
    """Train on so many devices, in each of the processes: FedAvg's CNN, or FedPer's heads of ``MANY`` clients."""
    talk = _Talk()
    method: FedAvg | FedPer
    if heads:
        method = FedPer(10, MANY, growth.SmallBackbone(), training=TRAINING)
        images, clients = RandomImages(2 * MANY, MANY, growth.SIZE), MANY
    else:
        method = FedAvg(10, CLIENTS, PaperCNN(), training=TRAINING)
        images, clients = RandomImages(CLIENTS * IMAGES, CLIENTS), CLIENTS
    data = FederatedDataModule(
        images,
        IID(clients),
        ImageTransform(),
        batch_size=BATCH,
        clients_per_round=CLIENTS,
        clients_at_once=max(1, CLIENTS // devices),
    )
    strategy = RanksStrategy()
    strategy.command = _command(devices, heads)
    laps = fit(method, data, ROUNDS, callbacks=[talk], settings={"devices": devices, "strategy": strategy})
    (before, waited), (after, waited_then) = talk.rounds[-2:]
    return Shared(laps.best, waited_then - waited, after - before, talk.state_bytes, laps.memory)


def _command(devices: int, heads: bool) -> list[str]:
    return [sys.executable, "-m", "benchmark.speed.ranks", str(devices), *(["--heads"] if heads else [])]


def share_apart(devices: int, heads: bool) -> Shared:
    """Run ``share`` in its own processes.

    Raises:
        ConfigurationError: they failed.
    """
    command = _command(devices, heads)
    environment = os.environ | ({} if device() == "cuda" else {"OMP_NUM_THREADS": "1"})
    return Shared(**json.loads(last_line_of(command, environment)))


def run(folder: Path) -> tuple[str, list[Timing]]:
    """Measure each number of devices against one."""
    most = torch.cuda.device_count() if device() == "cuda" else 4
    counts = [devices for devices in (1, 2, 4, 8) if devices <= most]
    found = {devices: share_apart(devices, heads=False) for devices in counts}
    state = {devices: share_apart(devices, heads=True).state_bytes for devices in counts}
    work = f"{CLIENTS} clients x {IMAGES // BATCH} steps of {BATCH} images"
    rows = []
    for devices, shared in found.items():
        note = (
            f"{shared.received / 2**20:.1f} MB received and {1000 * shared.waiting:.1f} ms waited a round; personal "
            f"state of {MANY:,} clients (FedPer) at most {max(state[devices]) / 2**20:.2f} MB a rank"
        )
        what = f"{devices} device{'s' if devices > 1 else ''}"
        rows.append(Timing(what, work, shared.round, shared.round / found[1].round, memory=shared.memory, note=note))
    return "One FedAvg round of pFedPT's CNN over ranks, and FedPer's heads", rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmark.speed.ranks", description=__doc__)
    parser.add_argument("devices", type=int, help="how many")
    parser.add_argument("--heads", action="store_true", help=f"personal heads of {MANY:,} clients")
    given = parser.parse_args()
    shared = share(given.devices, given.heads)
    if is_first_process():
        print(json.dumps(asdict(shared)))
