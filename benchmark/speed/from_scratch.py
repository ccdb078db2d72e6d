"""Seconds of a round of every method that trains pFedPT's CNN from scratch, one client at a time and ten together."""

from collections.abc import Callable
from pathlib import Path

import torch

from benchmark.backbones.cnn import PaperCNN
from benchmark.backbones.pixel_prompts import PaddingPrompt
from benchmark.contract import LocalTraining
from benchmark.method import FederatedMethod
from benchmark.speed.measure import RandomImages, Timing, fit
from datamodules.federated import FederatedDataModule
from datamodules.partition import IID
from datamodules.transform import ImageTransform
from methods import MOON, FedAvg, FedBABU, FedMTL, FedPer, FedProx, FedRep, Local, PFedPT

CLIENTS, IMAGES, BATCH = 10, 80, 16
EPOCH = LocalTraining(lr=0.005, epochs=1)


def _methods() -> dict[str, Callable[[], FederatedMethod]]:
    """The nine rows of pFedPT's Table 1, with one local epoch of each of their phases."""

    def prompt() -> PaddingPrompt:
        return PaddingPrompt(training=LocalTraining(lr=1.0, epochs=1))

    return {
        "Local": lambda: Local(10, CLIENTS, PaperCNN(), training=EPOCH),
        "FedAvg": lambda: FedAvg(10, CLIENTS, PaperCNN(), training=EPOCH),
        "FedProx": lambda: FedProx(10, CLIENTS, PaperCNN(), training=EPOCH),
        "MOON": lambda: MOON(10, CLIENTS, PaperCNN(), training=EPOCH),
        "FedPer": lambda: FedPer(10, CLIENTS, PaperCNN(), training=EPOCH),
        "FedRep": lambda: FedRep(10, CLIENTS, PaperCNN(), head_training=EPOCH, training=EPOCH),
        "FedMTL": lambda: FedMTL(10, CLIENTS, PaperCNN(), training=EPOCH),
        "FedBABU": lambda: FedBABU(10, CLIENTS, PaperCNN(), training=EPOCH),
        "pFedPT": lambda: PFedPT(10, CLIENTS, PaperCNN(), training=EPOCH, visual_prompt=prompt()),
    }


def run(folder: Path) -> tuple[str, list[Timing]]:
    """Local training and aggregation; the ratio is of width 10 to width 1 of the same method."""
    rows = []
    for name, build in _methods().items():
        seconds = {}
        for width in (1, 10):
            torch.manual_seed(0)
            source = RandomImages(CLIENTS * IMAGES, CLIENTS)
            data = FederatedDataModule(source, IID(CLIENTS), ImageTransform(), batch_size=BATCH, clients_at_once=width)
            seconds[width] = fit(build(), data, rounds=3).best
            rows.append(
                Timing(
                    f"{name}, width {width}",
                    f"{CLIENTS} clients x {IMAGES // BATCH} steps of {BATCH} images in each phase",
                    seconds[width],
                    seconds[width] / seconds[1],
                )
            )
    return "One round of every method trained from scratch", rows
