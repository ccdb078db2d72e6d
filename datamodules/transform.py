"""From stored uint8 images to what a backbone sees: resize, augment and normalise, in batches, on the device.

Kornia augments batches too, with draws of torch's global generator. Here they are keyed by client, round and step, so
that neither the width of a cohort nor a resume changes an image.
"""

import math
from copy import copy
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.errors import ConfigurationError
from benchmark.ranges import Checked, Size

# As in timm.data.constants, whose import takes a second that a run of a CNN has no use for.
STATISTICS: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}


#: RandomResizedCrop's, with which CoOp trains: tries of a box, share of the area, and largest ratio of the sides.
CROP_TRIES = 10
CROP_AREA = (0.08, 1.0)
CROP_RATIO = 4 / 3

Statistics = tuple[tuple[float, ...], tuple[float, ...]]


@lru_cache
def _on_device(statistics: Statistics, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, [3, 1, 1] each; made once, since a copy to a GPU in every step would wait for it."""
    mean, std = (torch.tensor(values, dtype=torch.float32, device=device).view(3, 1, 1) for values in statistics)
    return mean, std


class ImageTransform(Checked):
    """Resize to a square, augment the training images, normalise.

    What is not given is the backbone's (see ``matched``), so that images are as its weights were trained.

    Args:
        size: side in pixels of what the backbone takes; None is the backbone's ``image_size``.
        normalize: mean and standard deviation per channel: ``half`` (0.5 and 0.5: pFedPT, and the ViTs trained on
            ImageNet-21k), ``imagenet``, or ``clip``; None is the backbone's ``mean`` and ``std``, and ``half`` for a
            backbone that has none. Training and test images are normalised alike.
        augment: of training images: ``none``; ``fedbn`` (horizontal flip, rotation within 30 degrees); or ``clip``
            (a crop as torchvision's RandomResizedCrop draws it, of 8 to 100 % of the area with aspect ratio 3/4 to
            4/3, resized to ``size``, and horizontal flip, as CoOp does; see ``crop_boxes``). Each is one bilinear
            resampling with numbers drawn per image. Images stored larger than ``size`` are resized before they are
            turned. Crops are taken of what is stored; from larger images a pixel is the mean of a grid of points, as
            many each way as a stored image is larger, rounded up.

    Attributes:
        statistics: mean and standard deviation of the channels, for pixels in [0, 1].
        augment_numbers: uniform numbers that one image's augmentation takes.

    Raises:
        ConfigurationError: ``size`` is not positive.
    """

    def __init__(
        self,
        size: Size | None = None,
        normalize: Literal["half", "imagenet", "clip"] | None = None,
        augment: Literal["none", "fedbn", "clip"] = "none",
    ) -> None:
        self.size = size
        self.normalize = normalize
        self.augment = augment
        self.statistics: Statistics = STATISTICS[normalize or "half"]
        self.augment_numbers = {"none": 0, "fedbn": 2, "clip": 1 + 2 * CROP_TRIES + 2}[augment]

    def matched(self, backbone: nn.Module) -> "ImageTransform":
        """The transform to what a backbone takes: its size, and the pixels' statistics where none are given here.

        Args:
            backbone: with ``image_size`` (H, W), ``mean`` and ``std`` of the channels, and ``pretrained``: whether
                its weights were trained on images of that mean and standard deviation.

        Raises:
            ConfigurationError: another size is given here, or other statistics than a pretrained backbone's.
        """
        height, width = backbone.image_size  # type: ignore[misc]
        statistics: Statistics = (tuple(backbone.mean), tuple(backbone.std))  # type: ignore[arg-type]
        if height != width:
            raise ConfigurationError(f"the backbone takes images of {height} x {width} pixels; images here are square")
        if self.size not in (None, height):
            raise ConfigurationError(
                f"data.transform.init_args.size={self.size}, but the backbone takes {height} x {width} pixels: leave "
                f"it out, and images stored at any data.source.init_args.size are resized to {height}, or set the "
                f"backbone's image_size (model.init_args.backbone.init_args.image_size, or that of clip) to {self.size}"
            )
        if self.normalize is not None and backbone.pretrained and self.statistics != statistics:
            wanted = next((name for name, known in STATISTICS.items() if known == statistics), "none of these")
            raise ConfigurationError(
                f"data.transform.init_args.normalize={self.normalize}, but the backbone's weights were trained with "
                f"mean {statistics[0]} and standard deviation {statistics[1]} ({wanted}): leave normalize out, and "
                "images are normalised so"
            )
        matched = copy(self)
        matched.size = height
        if self.normalize is None:
            matched.statistics = statistics
        return matched

    def for_method(self, method: nn.Module) -> "ImageTransform":
        """The transform to what a method's backbone takes; this one, for a backbone that says nothing of it.

        Raises:
            ConfigurationError: see :meth:`matched`.
        """
        for module in method.modules():
            if all(hasattr(module, name) for name in ("image_size", "mean", "std", "pretrained")):
                return self.matched(module)
        return self

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
            with torch.autocast(x.device.type, enabled=False):  # a place in an image takes more bits than bfloat16 has
                if self.augment == "fedbn" and x.shape[-1] > size:  # as FedBN does; else a turn picks single pixels
                    x = _resized(x, (size, size))
                x = self._resample(x, noise.flatten(0, -2), size)
        elif x.shape[-2:] != (size, size):
            x = _resized(x, (size, size))
        mean, std = _on_device(self.statistics, x.device)
        return x.sub_(mean).div_(std).unflatten(0, lead)

    def _resample(self, x: Tensor, u: Tensor, size: int) -> Tensor:
        """Flip with rotation, or with a random crop, as one affine resampling; u is [n, augment_numbers]."""
        n = len(x)
        flip = torch.where(u[:, 0] < 0.5, -1.0, 1.0)
        theta = torch.zeros(n, 2, 3, dtype=x.dtype, device=x.device)
        if self.augment == "fedbn":
            angle = (2 * u[:, 1] - 1) * math.radians(30)
            theta[:, 0, 0], theta[:, 0, 1] = flip * angle.cos(), -angle.sin()
            theta[:, 1, 0], theta[:, 1, 1] = flip * angle.sin(), angle.cos()
        else:
            height, width = x.shape[-2:]
            top, left, high, wide = crop_boxes(u[:, 1:], height, width).float().unbind(1)
            theta[:, 0, 0], theta[:, 1, 1] = flip * wide / width, high / height
            theta[:, 0, 2] = (2 * left + wide) / width - 1
            theta[:, 1, 2] = (2 * top + high) / height - 1
        points = math.ceil(max(x.shape[-2:]) / size)  # a pixel each way: one alone would miss what lies between two
        grid = F.affine_grid(theta, [n, 3, points * size, points * size], align_corners=False)
        sampled = F.grid_sample(x, grid, mode="bilinear", align_corners=False)
        return sampled if points == 1 else F.avg_pool2d(sampled, points)


def _resized(x: Tensor, size: tuple[int, ...]) -> Tensor:
    return F.interpolate(x, size, mode="bicubic", antialias=True).clamp_(0, 1)


def resized_pixels(images: Tensor, size: tuple[int, ...]) -> Tensor:
    """Bring stored images to another size, as a transform does before it normalises them.

    Args:
        images: uint8 [n, 3, h, w].
        size: height H and width W.

    Returns:
        uint8 [n, 3, H, W]; images of that size already are as they were.
    """
    if images.shape[-2:] == torch.Size(size):
        return images
    parts = images.split(64)  # in float32 an image takes four times its bytes
    return torch.cat([_resized(part.float() / 255, size).mul_(255).round_().to(torch.uint8) for part in parts])


def crop_boxes(u: Tensor, height: int, width: int) -> Tensor:
    """Boxes as torchvision's RandomResizedCrop draws them, with CLIP's area of 8 to 100 % and ratio of 3/4 to 4/3.

    Ten times an area and a ratio are drawn; the first box that fits into the image is taken, anywhere in it. Where none
    fits, it is the largest box of a permitted ratio, in the centre: the whole of a square image.

    Args:
        u: uniform numbers in [0, 1], [n, 22]: the areas of ten tries, their ratios, and the place down and across.
        height: of the images, in pixels.
        width: of the images, in pixels.

    Returns:
        [n, 4]: top, left, height and width of each box in whole pixels.
    """
    u = u.double()  # so that rounding to pixels is that of a float of Python
    area = height * width * (CROP_AREA[0] + (CROP_AREA[1] - CROP_AREA[0]) * u[:, :CROP_TRIES])
    ratio = ((2 * u[:, CROP_TRIES : 2 * CROP_TRIES] - 1) * math.log(CROP_RATIO)).exp()
    wide, high = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (wide >= 1) & (wide <= width) & (high >= 1) & (high <= height)
    # The central box is the last try, which always fits.
    central = (min(height, round(width * CROP_RATIO)), min(width, round(height * CROP_RATIO)))
    high, wide = (F.pad(sides, (0, 1), value=last) for sides, last in zip((high, wide), central, strict=True))
    first = F.pad(fits, (0, 1), value=True).int().argmax(dim=1, keepdim=True)
    high, wide = high.gather(1, first), wide.gather(1, first)
    free = torch.cat([height - high, width - wide], dim=1)
    drawn = torch.minimum((u[:, 2 * CROP_TRIES :] * (free + 1)).floor(), free)
    place = torch.where(first == CROP_TRIES, (free / 2).floor(), drawn)
    return torch.cat([place, high, wide], dim=1)
