"""The images of a federation where they are used: on the device if they fit, else where they lie."""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from benchmark.engine.device.memory import free_memory
from benchmark.engine.plan.work import Step
from benchmark.masked import IGNORE
from benchmark.placing import picked


class Transform(Protocol):
    """From stored images to the backbone's input."""

    augment_numbers: int

    def __call__(self, images: Tensor, noise: Tensor | None, /) -> Tensor:
        """Make uint8 [..., 3, h, w] into float32 [..., 3, H, W]."""


class Images(Protocol):
    """All images of a data set: uint8 [n, 3, H, W], and their labels, int64 [n]."""

    @property
    def images(self) -> Tensor:
        """The pixels."""

    @property
    def labels(self) -> Tensor:
        """Classes."""


class Pool:
    """Images and labels of a data set.

    Args:
        images: uint8 [n, 3, H, W].
        labels: int64 [n].
        transform: applied to what is gathered.
    """

    def __init__(self, images: Tensor, labels: Tensor, transform: Transform) -> None:
        self.images = images
        self.labels = labels
        self.transform = transform
        self._resident: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return images and labels, on the device if they take less than half of the free memory there."""
        if device not in self._resident:
            images, labels = self.images, self.labels
            if device.type != "cpu" and images.numel() < free_memory(device) // 2:
                images, labels = images.to(device), labels.to(device)
            self._resident[device] = (images, labels)
        return self._resident[device]

    def images_at(self, rows: Tensor, device: torch.device) -> Tensor:
        """Return the images of these rows on the device."""
        images = self.on(device)[0]
        return picked(images, rows.to(images.device)).to(device)

    def input(self, images: Tensor, uniform: Tensor | None, kind: torch.dtype) -> Tensor:
        """Make images what the backbone takes, in the method's type of numbers."""
        return self.transform(images, uniform).to(kind)

    def gathered(self, step: Step) -> Step:
        """Put images and labels into a step where they lie, as a loader process does."""
        return gather(step, self.images, self.labels)

    def gather(self, step: Step, images: bool = True) -> Step:
        """Put labels and, unless nobody needs them, images into a step."""
        assert step.index is not None
        return gather(step, *self.on(step.index.device), images)


def gather(step: Step, pool: Tensor, labels: Tensor, images: bool = True) -> Step:
    """Put the images (uint8) and labels of a step's rows into it; images of size 0 where none are wanted."""
    assert step.index is not None
    assert step.mask is not None
    rows = step.index if step.index.device == labels.device else step.index.to(labels.device)
    return replace(
        step,
        images=picked(pool if images else pool[:, :0], rows).to(step.index.device),
        labels=picked(labels, rows).to(step.index.device).masked_fill(~step.mask, IGNORE),
    )
