"""Time and memory by the number of clients, at a fixed number of participants, and by a prompt's number of classes.

Every number of clients is measured in its own process, ``python -m benchmark.speed.growth N [PARTICIPANTS]``, so that
the peak memory is its own. The images are tiny and the network is small, so that mostly the engine's bookkeeping is
measured.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import LocalTraining
from benchmark.run.checkpoint import AtomicCheckpointIO
from benchmark.speed.measure import RandomImages, Timing, fit, last_line_of
from datamodules.federated import FederatedDataModule
from datamodules.partition import IID
from datamodules.transform import ImageTransform
from methods.fedper import FedPer
from methods.promptfl import PromptFL

CLIENTS = (10, 100, 1_000, 10_000, 100_000)
#: numbers of clients of which WIDE take part in a round, in one cohort
MANY, WIDE = (10_000, 1_000_000), 1_000
PARTICIPANTS, IMAGES, SIZE = 10, 2, 8
#: of DermaMNIST and CIFAR-10, EMNIST's balanced letters and digits, CIFAR-100, DomainNet
CLASSES = (10, 47, 100, 345)
TRAINING = LocalTraining(lr=1e-3, epochs=1)


class SmallBackbone(nn.Module):
    """One linear layer with ReLU.

    Attributes:
        num_features: 32.
    """

    num_features = 32

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * SIZE * SIZE, self.num_features)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, 32] of images [B, 3, 8, 8]."""
        return self.linear(x.flatten(1)).relu()


@dataclass(frozen=True)
class Grown:
    """The time and memory that a number of clients takes.

    Attributes:
        round: seconds of the fastest round after the first.
        set_up: seconds from the images to the first round.
        checkpoint: seconds to write a checkpoint.
        evaluation: seconds of the faster of two evaluations of all clients, a test image each; None if there was none.
        state_bytes: of all clients' personal state.
        checkpoint_bytes: of the checkpoint.
        memory: peak bytes of the process.
        record: seconds to hash the split and to write it, client by client, as a recorded run does in its set-up.
    """

    round: float
    set_up: float
    checkpoint: float
    evaluation: float | None
    state_bytes: int
    checkpoint_bytes: int
    memory: int
    record: float


class _SaveAtEnd(Callback):
    """Writes the split's record and a checkpoint when training ends, and times both."""

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            split = trainer.datamodule.split_record  # type: ignore[attr-defined]
            split.write(Path(folder) / "manifest.json")
            assert split.hash, "a checkpoint holds it"
            self.record = time.perf_counter() - began
            began = time.perf_counter()
            trainer.save_checkpoint(Path(folder) / "last.ckpt")
            self.seconds = time.perf_counter() - began
            self.bytes = (Path(folder) / "last.ckpt").stat().st_size
        self.state_bytes = sum(rows.numel() * rows.element_size() for rows in pl_module.store.buffers())


def grow(clients: int, rounds: int = 20, participants: int = PARTICIPANTS, evaluate: bool = False) -> Grown:
    """Train FedPer, whose heads are personal, with so many clients, in this process.

    Args:
        clients: N.
        rounds: at least two.
        participants: clients of a round, at most N; they are stepped together.
        evaluate: whether all clients are evaluated, half way and in the end.
    """
    began = time.perf_counter()
    data = FederatedDataModule(
        RandomImages(IMAGES * clients, clients, SIZE),
        IID(clients),
        ImageTransform(),
        batch_size=IMAGES,
        clients_per_round=participants,
        clients_at_once=participants,
    )
    save = _SaveAtEnd()
    method = FedPer(10, clients, SmallBackbone(), training=TRAINING)
    laps = fit(method, data, rounds, evaluate_every=rounds // 2 if evaluate else 0, callbacks=[save])
    return Grown(
        round=laps.best,
        set_up=laps.started - began,
        checkpoint=save.seconds,
        evaluation=min(laps.evaluations, default=None),
        state_bytes=save.state_bytes,
        checkpoint_bytes=save.bytes,
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        record=save.record,
    )


def grow_apart(clients: int, participants: int = PARTICIPANTS) -> Grown:
    """Run ``grow`` in its own process.

    Raises:
        ConfigurationError: that process failed.
    """
    numbers = [str(clients), "--evaluate"] if participants == PARTICIPANTS else [str(clients), str(participants)]
    command = [sys.executable, "-m", "benchmark.speed.growth", *numbers]
    return Grown(**json.loads(last_line_of(command)))


def client_rows(numbers: tuple[int, ...]) -> list[Timing]:
    """Round, set-up, record, evaluation and checkpoint by the number of clients, against the first number."""
    grown = {clients: grow_apart(clients) for clients in numbers}
    first = grown[numbers[0]]
    rows = []
    for clients, found in grown.items():
        work = f"{PARTICIPANTS} of {clients:,} clients"
        size = f"personal state {found.state_bytes / 2**20:.2f} MB"
        rows.append(Timing("round", work, found.round, found.round / first.round, memory=found.memory, note=size))
    rows += [
        Timing("set-up", f"{clients:,} clients", found.set_up, found.set_up / first.set_up)
        for clients, found in grown.items()
    ]
    rows += [
        Timing("recording the split", f"{clients:,} clients", found.record, found.record / first.record)
        for clients, found in grown.items()
    ]
    rows += [
        Timing("evaluation", f"{clients:,} clients", found.evaluation, found.evaluation / first.evaluation)
        for clients, found in grown.items()
        if found.evaluation and first.evaluation
    ]
    rows += [
        Timing(
            "writing a checkpoint",
            f"{clients:,} clients",
            found.checkpoint,
            found.checkpoint / first.checkpoint,
            note=f"{found.checkpoint_bytes / 2**20:.2f} MB",
        )
        for clients, found in grown.items()
    ]
    return rows


def wide_rows(numbers: tuple[int, ...], participants: int) -> list[Timing]:
    """Round, set-up and record by the number of clients, of whom many take part, against the first number."""
    grown = {clients: grow_apart(clients, participants) for clients in numbers}
    first = grown[numbers[0]]
    rounds = [
        Timing(
            "round", f"{participants:,} of {n:,} clients", found.round, found.round / first.round, memory=found.memory
        )
        for n, found in grown.items()
    ]
    set_ups = [
        Timing("set-up", f"{n:,} clients, {participants:,} a round", found.set_up, found.set_up / first.set_up)
        for n, found in grown.items()
    ]
    records = [
        Timing(
            "recording the split", f"{n:,} clients, {participants:,} a round", found.record, found.record / first.record
        )
        for n, found in grown.items()
    ]
    return rounds + set_ups + records


def class_rows(numbers: tuple[int, ...], clients: int = 4, images: int = 64, rounds: int = 3) -> list[Timing]:
    """A round of PromptFL with the micro CLIP by the number of classes, against the first number.

    Args:
        numbers: of classes.
        clients: N, each of which takes part.
        images: training images of a client, in batches of 16.
        rounds: at least two.
    """
    clip = PromptedCLIP()
    seconds = {}
    for classes in numbers:
        data = FederatedDataModule(
            RandomImages(clients * images, clients, clip.image_size[0], classes),
            IID(clients),
            ImageTransform(),
            batch_size=16,
            clients_at_once=1,
        )
        names = [f"class {number}" for number in range(classes)]
        seconds[classes] = fit(PromptFL(clients, names, clip, training=TRAINING), data, rounds).best
    first = seconds[numbers[0]]
    work = f"{clients} clients x {images // 16} steps of 16 images"
    return [Timing(f"PromptFL, {classes} classes", work, value, value / first) for classes, value in seconds.items()]


def run(folder: Path) -> tuple[str, list[Timing]]:
    """Numbers of clients, then numbers of classes."""
    rows = [*client_rows(CLIENTS), *wide_rows(MANY, WIDE), *class_rows(CLASSES)]
    return "What grows with the clients (FedPer, 8 x 8 pixels) and with the classes (PromptFL, micro CLIP)", rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmark.speed.growth", description=__doc__)
    parser.add_argument("clients", type=int, help="number of clients")
    parser.add_argument("participants", type=int, nargs="?", default=PARTICIPANTS, help="of a round; default 10")
    parser.add_argument("--evaluate", action="store_true", help="evaluate all clients, too")
    given = parser.parse_args()
    print(json.dumps(asdict(grow(given.clients, participants=given.participants, evaluate=given.evaluate))))
