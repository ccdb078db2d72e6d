"""From stored uint8 images to what a backbone sees: resize, augment and normalise, in batches, on the device."""

import math
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.errors import ConfigurationError

STATISTICS: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}


@lru_cache
def _statistics(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, [3, 1, 1] each; made once, since a copy to a GPU in every step would wait for it."""
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in STATISTICS[name])
    return mean, std


class ImageTransform:
    """Resize to a square, augment the training images, normalise.

    Args:
        size: side in pixels that the backbone takes; None keeps the stored size.
        normalize: mean and standard deviation per channel: ``half`` (0.5 and 0.5: pFedPT, and the ViTs trained on
            ImageNet-21k), ``imagenet``, or ``clip``. Training and test images are normalised alike.
        augment: of training images: ``none``; ``fedbn`` (horizontal flip, rotation within 30 degrees); or ``clip``
            (crop of 8 to 100 % of the area with aspect ratio 3/4 to 4/3, resized to ``size``, and horizontal flip, as
            CoOp does). Each is one bilinear resampling with numbers drawn per image.

    Raises:
        ConfigurationError: ``size`` is not positive.
    """

    def __init__(
        self,
        size: int | None = None,
        normalize: Literal["half", "imagenet", "clip"] = "half",
        augment: Literal["none", "fedbn", "clip"] = "none",
    ) -> None:
        if size is not None and size < 1:
            raise ConfigurationError(f"transform.size must be a number of pixels of at least 1, got {size}")
        self.size = size
        self.normalize = normalize
        self.augment = augment
        #: uniform numbers that one image's augmentation takes
        self.augment_numbers = {"none": 0, "fedbn": 2, "clip": 5}[augment]

    def __call__(self, images: Tensor, noise: Tensor | None) -> Tensor:
        """Transform a batch.

        Args:
            images: uint8, [..., 3, h, w].
            noise: uniform numbers [..., augment_numbers], or None for no augmentation (evaluation).

        Returns:
            float32, [..., 3, size, size], normalised.
        """
        lead = images.shape[:-3]
        x = images.flatten(0, -4).float().div_(255)
        size = self.size or x.shape[-1]
        if noise is not None and self.augment_numbers:
            x = self._resample(x, noise.flatten(0, -2), size)
        elif x.shape[-2:] != (size, size):
            x = F.interpolate(x, (size, size), mode="bicubic", antialias=True).clamp_(0, 1)
        mean, std = _statistics(self.normalize, x.device)
        return x.sub_(mean).div_(std).unflatten(0, lead)

    def _resample(self, x: Tensor, u: Tensor, size: int) -> Tensor:
        """Flip with rotation, or with a random crop, as one affine resampling; u is [n, augment_numbers]."""
        n = len(x)
        flip = torch.where(u[:, 0] < 0.5, -1.0, 1.0)
        theta = torch.zeros(n, 2, 3, device=x.device)
        if self.augment == "fedbn":
            angle = (2 * u[:, 1] - 1) * math.radians(30)
            theta[:, 0, 0], theta[:, 0, 1] = flip * angle.cos(), -angle.sin()
            theta[:, 1, 0], theta[:, 1, 1] = flip * angle.sin(), angle.cos()
        else:
            area = 0.08 + 0.92 * u[:, 1]
            log_ratio = (2 * u[:, 2] - 1) * math.log(4 / 3)
            width = (area * log_ratio.exp()).sqrt().clamp(max=1)
            height = (area / log_ratio.exp()).sqrt().clamp(max=1)
            theta[:, 0, 0], theta[:, 1, 1] = flip * width, height
            theta[:, 0, 2] = (2 * u[:, 3] - 1) * (1 - width)
            theta[:, 1, 2] = (2 * u[:, 4] - 1) * (1 - height)
        grid = F.affine_grid(theta, [n, 3, size, size], align_corners=False)
        return F.grid_sample(x, grid, mode="bilinear", align_corners=False)
