"""The work that every program of the comparison does: its numbers, its images and its network.

The setting is the one of pfl-research's CIFAR-10 benchmark without privacy (Granqvist et al., "pfl-research", 2024):
1,000 clients of 50 images, 50 of them in a round, one local epoch of SGD with rate 0.1 and batches of 10, and a network
of two convolutions. Two things differ, for all programs alike: the images are synthetic, and there is no dropout.

This file needs NumPy and torch alone, so that it can be imported in any of the environments.
"""

import argparse
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

CLASSES, BATCH, LR = 10, 10, 0.1
EVALUATION_BATCH = 500
#: Parameters of the network: 896 + 18,496 + 1,605,760 + 1,290.
PARAMETERS = 1_626_442


@dataclass(frozen=True)
class Setting:
    """The size of the workload.

    Attributes:
        clients: N.
        images: training images of each client.
        cohort: clients that train in a round.
        test: images of the central test set.
        rounds: rounds in all; the first one is not counted.
        evaluate_every: rounds from one central evaluation to the next.
    """

    clients: int = 1000
    images: int = 50
    cohort: int = 50
    test: int = 10_000
    rounds: int = 11
    evaluate_every: int = 5

    @property
    def steps(self) -> int:
        """Optimizer steps of all clients in a round."""
        return self.cohort * -(-self.images // BATCH)

    def arguments(self) -> list[str]:
        """The setting as command line arguments, which ``read_setting`` reads."""
        return [f"--{name}={value}" for name, value in vars(self).items()]


def read_setting(arguments: Sequence[str] | None = None) -> tuple[Setting, int]:
    """The setting and the number of processor cores to use, from the command line."""
    parser = argparse.ArgumentParser()
    for name, value in vars(Setting()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--cores", type=int, default=1)
    given = vars(parser.parse_args(arguments))
    cores = given.pop("cores")
    return Setting(**given), cores


def make_images(setting: Setting) -> tuple[Tensor, Tensor]:
    """Noise that is the brighter the higher the class, so that a falling loss shows that a program learns.

    Returns:
        uint8 images [n, 3, 32, 32], training images first, and int64 labels [n], which cycle through the classes.
    """
    n = setting.clients * setting.images + setting.test
    labels = np.arange(n) % CLASSES
    images = np.random.default_rng(0).integers(0, 128, (n, 3, 32, 32), dtype=np.uint8)
    images += (12 * labels).astype(np.uint8)[:, None, None, None]
    return torch.from_numpy(images), torch.from_numpy(labels)


def normalise(images: Tensor) -> Tensor:
    """uint8 images to float32 in [-1, 1]."""
    return images.float().div_(127.5).sub_(1)


def layers() -> list[nn.Module]:
    """Images [B, 3, 32, 32] to logits [B, 10]: the layers of pfl-research's ``simple_cnn``, without its dropout."""
    return [
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    ]


@cache
def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now() -> float:
    """Seconds on a clock that only runs forward, when the GPU has done its work."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass
class Measured:
    """The measurements that a program reports, as one line of JSON.

    Attributes:
        rounds: seconds of every round, from the end of the one before (or of the evaluation after it).
        evaluations: seconds of every central evaluation.
        losses: mean training loss of the steps of every round.
        steps: optimizer steps of the last round.
        parameters: of the network.
        accuracy: on the test images at the last evaluation.
        processes: that trained at the same time.
        threads: of torch in each of them.
        versions: of the packages.
    """

    rounds: list[float]
    evaluations: list[float]
    losses: list[float]
    steps: int
    parameters: int
    accuracy: float
    processes: int
    threads: int
    versions: dict[str, str]

    @property
    def best(self) -> float:
        """Seconds of the fastest round after the first."""
        return min(self.rounds[1:])

    @property
    def mean(self) -> float:
        """Mean seconds of the rounds after the first."""
        return sum(self.rounds[1:]) / len(self.rounds[1:])


def versions(peer: str, version: str) -> dict[str, str]:
    """Versions of a peer, torch and Python."""
    return {peer: version, "torch": torch.__version__, "python": platform.python_version()}
