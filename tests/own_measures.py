"""Metrics as users write them: good ones, and one of each kind of mistake."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric


class MeanRank(Metric):
    """Mean rank of the right class, 1 at best."""

    higher_is_better = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("ranks", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("images", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count images."""
        own = preds.gather(1, target.unsqueeze(1))
        self.ranks += (preds >= own).sum()
        self.images += len(target)

    def compute(self) -> Tensor:
        """Return the mean."""
        return self.ranks / self.images


def among_two(logits: Tensor, labels: Tensor, first: int = 2) -> float:
    """The share of images whose class is one of the two likeliest."""
    return (logits.topk(first).indices == labels.unsqueeze(1)).any(1).double().mean().item()


def of_the_first(logits: Tensor, labels: Tensor) -> float:
    """Depends on the order of images."""
    return logits[0].max().item()


def fails(logits: Tensor, labels: Tensor) -> float:
    """Ends in an error where a class is missing."""
    if len(labels.unique()) < 2:
        raise RuntimeError("no second class")
    return 0.5


def by_class(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns a value for each class."""
    return logits.mean(0)


def of_numpy(logits: Tensor, labels: Tensor) -> Any:
    """The share of images that are right, as a number of NumPy."""
    return np.mean((logits.argmax(1) == labels).numpy(), dtype="float32")


def energy(logits: Tensor, labels: Tensor) -> float:
    """A large sum of float32, whose last digits depend on the order of its terms."""
    return (1e6 * logits.square()).sum().item()


def odds(logits: Tensor, labels: Tensor) -> float:
    """Finite, and beyond what a record holds where all classes are there."""
    return 1e41 if len(labels.unique()) > 1 else 2.0


def count(logits: Tensor, labels: Tensor) -> int:
    """A whole number that no float can hold."""
    return 10**400


class NoMetric:
    """Has no update."""
