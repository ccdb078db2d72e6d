"""The local training that several cases time: small networks on a CPU, those of the papers on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

import torch
from torch import Tensor, nn

from benchmark.backbones.cnn import PaperCNN
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.backbones.tiny_vit import TinyViT
from benchmark.backbones.vit import TimmViT
from benchmark.contract import LocalTraining
from benchmark.method import FederatedMethod
from benchmark.speed.measure import RandomImages, device
from datamodules.federated import FederatedDataModule
from datamodules.partition import IID, Partition
from datamodules.transform import ImageTransform
from methods.fedavg import FedAvg
from methods.fedpgp import FedPGP
from methods.fedvpt import FedVPT
from methods.headtune import HeadTune
from methods.pfedbayespt import PFedBayesPT
from methods.promptfl import PromptFL
from methods.sgpt import SGPT

CLASSES = 10
#: One epoch a round, at a rate that is harmless for random weights: only the time matters.
TRAINING = LocalTraining(lr=1e-3, epochs=1)


@dataclass(frozen=True)
class Workload:
    """A method with its backbone, and the images it takes.

    Attributes:
        name: of method and backbone.
        build: the method for so many clients.
        size: side of an image in pixels.
        batch: images of a client in one step.
        precision: the Trainer's.
    """

    name: str
    build: Callable[[int], FederatedMethod]
    size: int = 32
    batch: int = 16
    precision: str = "32-true"

    def method(self, clients: int) -> FederatedMethod:
        """The untrained method for so many clients, the same at every call."""
        torch.manual_seed(0)
        return self.build(clients)

    def data(
        self,
        clients: int,
        images: int,
        width: int | Literal["auto"] = 1,
        partition: Partition | None = None,
        tested: int = 1,
        cache_features: bool | str = "auto",
    ) -> FederatedDataModule:
        """Random images for this work.

        Args:
            clients: N.
            images: training images of a client, on average.
            width: clients stepped together.
            partition: over N clients; None gives all of them the same number.
            tested: test images of a client, on average.
            cache_features: as ``FederatedDataModule``.
        """
        return FederatedDataModule(
            RandomImages(clients * images, clients * tested, self.size, CLASSES),
            partition or IID(clients),
            ImageTransform(),
            batch_size=self.batch,
            clients_at_once=width,
            cache_features=cache_features,
        )

    def made(
        self, clients: int, images: int, width: int | Literal["auto"]
    ) -> tuple[FederatedMethod, FederatedDataModule]:
        """The untrained method, and data for it: N clients, images of each, clients stepped together."""
        return self.method(clients), self.data(clients, images, width)


@lru_cache(maxsize=4)
def frozen_vit(name: str, size: int) -> TimmViT:
    """A ViT of timm with random weights, made once; the micro ViT with its own."""
    return TimmViT(name, "embedded" if name == "micro_vit" else "random", image_size=size)


@lru_cache(maxsize=2)
def frozen_clip(name: str) -> PromptedCLIP:
    """A CLIP with random weights, made once; the micro CLIP with its own."""
    return PromptedCLIP(name, "embedded" if name == "micro_clip" else "random")


def class_names() -> list[str]:
    """Names of the classes for the text tower."""
    return [f"class {number}" for number in range(CLASSES)]


class TinyNetwork(nn.Module):
    """Three small linear layers: as many tensors as pfl-research's CNN, next to no arithmetic.

    Attributes:
        num_features: 8.
    """

    num_features = 8

    def __init__(self) -> None:
        super().__init__()
        inner = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()]
        self.layers = nn.Sequential(nn.Linear(3 * 4 * 4, 8), nn.ReLU(), *inner)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, 8] of images [B, 3, 4, 4]."""
        return cast(Tensor, self.layers(x.flatten(1)))


def tiny() -> Workload:
    """Return a workload of tiny tensors, whose rounds take little but the host's time."""
    return Workload(
        "FedAvg, tiny tensors",
        lambda clients: FedAvg(CLASSES, clients, TinyNetwork(), training=TRAINING),
        size=4,
        batch=10,
    )


def cnn() -> Workload:
    """All weights of pFedPT's CNN."""
    return Workload("FedAvg, pFedPT's CNN", lambda clients: FedAvg(CLASSES, clients, PaperCNN(), training=TRAINING))


def tiny_vit() -> Workload:
    """All weights of pFedPT's small ViT."""
    return Workload("FedAvg, tiny ViT", lambda clients: FedAvg(CLASSES, clients, TinyViT(), training=TRAINING))


def fedvpt(name: str, size: int, batch: int = 16, epochs: int = 1) -> Workload:
    """Prompts and head on a frozen ViT of timm."""
    training = LocalTraining(lr=1e-3, epochs=epochs)
    return Workload(
        f"FedVPT, {name} at {size} px",
        lambda clients: FedVPT(CLASSES, clients, frozen_vit(name, size), training=training),
        size,
        batch,
        "bf16-mixed" if device() == "cuda" else "32-true",
    )


def promptfl(name: str, batch: int = 16) -> Workload:
    """A text prompt for a frozen CLIP, from the images' features where these are kept."""
    return Workload(
        f"PromptFL, CLIP {name}",
        lambda clients: PromptFL(clients, class_names(), frozen_clip(name), training=TRAINING),
        _clip_size(name),
        batch,
    )


def fedpgp(name: str, batch: int = 16) -> Workload:
    """Two text prompts and their contrast."""
    return Workload(
        f"FedPGP, CLIP {name}",
        lambda clients: FedPGP(clients, class_names(), frozen_clip(name), training=TRAINING),
        _clip_size(name),
        batch,
    )


def headtune(name: str, size: int) -> Workload:
    """A linear classifier on a frozen ViT."""
    return Workload(
        f"HeadTune, {name} at {size} px",
        lambda clients: HeadTune(CLASSES, clients, frozen_vit(name, size), training=TRAINING),
        size,
    )


def pfedbayespt(name: str, size: int) -> Workload:
    """Prompts made from a frozen ViT's tokens."""
    return Workload(
        f"PFedBayesPT, {name} at {size} px",
        lambda clients: PFedBayesPT(CLASSES, clients, frozen_vit(name, size), training=TRAINING),
        size,
    )


def sgpt(name: str, size: int) -> Workload:
    """Shared and group prompts, the group selected by a frozen ViT's query."""
    return Workload(
        f"SGPT, {name} at {size} px",
        lambda clients: SGPT(CLASSES, clients, frozen_vit(name, size), num_groups=CLASSES, training=TRAINING),
        size,
    )


def _clip_size(name: str) -> int:
    return 32 if name == "micro_clip" else 224


def large_vit() -> tuple[str, int]:
    """The frozen ViT of this machine: ViT-B/16 at 224 px on a GPU, ViT-Ti/16 at 112 px on a CPU."""
    return ("vit_base_patch16_224", 224) if device() == "cuda" else ("vit_tiny_patch16_224", 112)


def large_clip() -> str:
    """The CLIP of this machine."""
    return "ViT-B-16" if device() == "cuda" else "micro_clip"
