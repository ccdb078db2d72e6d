"""Corrupted test images: six kinds of noise, blur, light and compression at five severities.

Kinds and strengths follow Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations" (ICLR 2019), made with Pillow and torchvision alone. They are no CIFAR-100-C: do not compare with its
published numbers.
"""

import hashlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import gaussian_blur as blurred

from benchmark.engine.device.memory import free_memory
from benchmark.errors import ConfigurationError
from benchmark.federation import CorruptedRows
from benchmark.metrics import CLEAN, CORRUPTIONS, version_name
from benchmark.ranges import PositiveInt, checked
from benchmark.seeds import numpy_generator
from datamodules.source import ImagePool

Kind = Literal["gaussian_noise", "gaussian_blur", "brightness", "contrast", "jpeg", "pixelate"]
Severity = Literal[1, 2, 3, 4, 5]
Pixels = NDArray[np.float64]  # [3, H, W], in [0, 1]

#: Largest side of what counts as a small image, in pixels.
SMALL = 64
#: Strengths of each kind by severity, of small images and of others.
STRENGTHS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "gaussian_noise": ((0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38)),
    "gaussian_blur": ((0.4, 0.6, 0.7, 0.8, 1.0), (1, 2, 3, 4, 6)),
    "brightness": ((0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": ((0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05)),
    "jpeg": ((80, 65, 58, 50, 40), (25, 18, 15, 10, 7)),
    "pixelate": ((0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25)),
}


def _blurred(x: Pixels, sigma: float) -> Pixels:
    side = 2 * math.ceil(3 * sigma) + 1
    return blurred(torch.from_numpy(x), [side, side], [sigma, sigma]).numpy()


def _brighter(x: Pixels, more: float) -> Pixels:
    """Raise the value (of hue, saturation and value) of each pixel; black becomes grey."""
    value = x.max(0)
    raised = np.minimum(value + more, 1)
    return np.where(value > 0, x * (raised / np.where(value > 0, value, 1)), raised)


def _flatter(x: Pixels, share: float) -> Pixels:
    mean = x.mean((1, 2), keepdims=True)
    return (x - mean) * share + mean


def _compressed(x: Pixels, quality: float) -> Pixels:
    stream = io.BytesIO()
    _picture(x).save(stream, "JPEG", quality=int(quality), subsampling="4:2:0")
    return _pixels(Image.open(stream))


def _pixelated(x: Pixels, share: float) -> Pixels:
    picture = _picture(x)
    small = picture.resize((round(share * picture.width), round(share * picture.height)), Image.Resampling.BOX)
    return _pixels(small.resize(picture.size, Image.Resampling.BOX))


#: All but noise, which has a key.
CHANGES: Mapping[str, Callable[[Pixels, float], Pixels]] = {
    "gaussian_blur": _blurred,
    "brightness": _brighter,
    "contrast": _flatter,
    "jpeg": _compressed,
    "pixelate": _pixelated,
}


def _bytes(x: Pixels) -> NDArray[np.uint8]:
    return np.floor(255 * np.clip(x, 0, 1) + 0.5).astype(np.uint8)


def _picture(x: Pixels) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(_bytes(x).transpose(1, 2, 0)))


def _pixels(picture: Image.Image) -> Pixels:
    return np.asarray(picture, dtype=np.float64).transpose(2, 0, 1) / 255


def _strength(kind: str, severity: int, sides: Sequence[int]) -> float:
    small, others = STRENGTHS[kind]
    return (small if max(sides) <= SMALL else others)[severity - 1]


def smallest_side(kind: str, severity: int, sides: Sequence[int]) -> int:
    """Return how many pixels each side must have for a corruption of images with these sides.

    A blur mirrors the image at its borders, and what it mirrors is smaller than the image; of a pixelated one a pixel
    is left.
    """
    strength = _strength(kind, severity, sides)
    if kind == "gaussian_blur":
        return math.ceil(3 * strength) + 1
    if kind == "pixelate":
        return next(side for side in range(1, SMALL) if round(strength * side) > 0)
    return 1


def corrupted(image: Tensor, kind: str, severity: int) -> Tensor:
    """Corrupt an image at the size at which it is stored; the same image always in the same way.

    Args:
        image: uint8 [3, H, W].
        kind: one of :data:`benchmark.metrics.CORRUPTIONS`; :data:`benchmark.metrics.CLEAN` leaves it as it is.
        severity: 1 to 5.

    Returns:
        uint8 [3, H, W].
    """
    if kind == CLEAN:
        return image
    strength = _strength(kind, severity, image.shape[1:])
    x = image.numpy().astype(np.float64) / 255
    if kind == "gaussian_noise":
        digest = hashlib.sha256(np.ascontiguousarray(image.numpy()).tobytes()).hexdigest()
        made = x + numpy_generator(0, "corrupt", kind, severity, digest).normal(0, strength, x.shape)
    else:
        made = CHANGES[kind](x, strength)
    return torch.from_numpy(_bytes(made))


class CorruptedImages:
    """Versions of drawn test images; made when first asked for, since only the last round shows them.

    Args:
        pool: of the federation.
        drawn: rows of the pool, int64 [n].
        versions: kind and severity of each, V of them; the first is the clean one.
    """

    def __init__(self, pool: ImagePool, drawn: NDArray[np.int64], versions: Sequence[tuple[str, int]]) -> None:
        self._clean = pool.images
        self._drawn = drawn
        self._versions = versions
        self.labels = pool.labels[torch.from_numpy(drawn)].repeat_interleave(len(versions))

    @cached_property
    def images(self) -> Tensor:
        """Return all versions of the first image, then those of the second, ..., uint8 [nV, 3, H, W]."""
        made = torch.empty(len(self.labels), *self._clean.shape[1:], dtype=torch.uint8)
        for row, place in enumerate(self._drawn.tolist()):
            for number, (kind, severity) in enumerate(self._versions):
                made[row * len(self._versions) + number] = corrupted(self._clean[place], kind, severity)
        return made


@checked
@dataclass(frozen=True)
class CorruptedTests:
    """Test images that are scored in corrupted versions, too, in the last round.

    Attributes:
        kinds: of corruptions.
        severities: of each kind, 1 to 5.
        images: of each client at most, drawn by a key of the client alone.
    """

    kinds: list[Kind] = field(default_factory=lambda: list(STRENGTHS))  # type: ignore[arg-type]
    severities: list[Severity] = field(default_factory=lambda: [1, 3, 5])
    images: PositiveInt = 20

    def __post_init__(self) -> None:
        """Refuse what leaves nothing to corrupt, or corrupts twice.

        Raises:
            ConfigurationError: it is so.
        """
        for name, values, known in (("kinds", self.kinds, CORRUPTIONS), ("severities", self.severities, range(1, 6))):
            wrong = [value for value in values if value not in known]
            if wrong or not values or len({*values}) < len(values):
                raise ConfigurationError(
                    f"data.corruptions.{name}: expected some of {', '.join(map(str, known))}, each once; got "
                    f"{', '.join(map(str, values)) or 'none'}"
                )

    def read(self, pool: ImagePool, tested: Mapping[int, NDArray[np.int64]]) -> tuple[CorruptedImages, CorruptedRows]:
        """Draw the images of each client.

        Args:
            pool: of the federation.
            tested: per client, its test rows of the pool.

        Returns:
            The corrupted images, and which rows of them each client scores.

        Raises:
            ConfigurationError: the images are too small for a corruption, or do not fit into half of the free memory.
        """
        versions = [(CLEAN, 0), *((kind, severity) for kind in self.kinds for severity in self.severities)]
        sides = tuple(pool.images.shape[2:])
        for kind, severity in versions[1:]:
            if (needed := smallest_side(kind, severity, sides)) > min(sides):
                raise ConfigurationError(
                    f"data.corruptions: {kind} of severity {severity} needs images of at least {needed} pixels a side, "
                    f"and these are stored with {sides[0]} x {sides[1]}; leave it out of kinds, give lower severities, "
                    "or store larger images (data.source.init_args.size, where the source takes it)"
                )
        chosen = {
            client: np.sort(rows[numpy_generator("corrupted images", client).permutation(len(rows))[: self.images]])
            for client, rows in tested.items()
        }
        drawn = np.unique(np.concatenate(list(chosen.values())))
        need = len(drawn) * len(versions) * pool.images[0].numel()
        if need > (room := free_memory(torch.device("cpu")) // 2):
            raise ConfigurationError(
                f"data.corruptions: {len(versions)} versions of {len(drawn):,} images take {need / 1e6:,.0f} "
                f"MB, and half of the free memory is {room / 1e6:,.0f} MB; give fewer images, kinds or severities"
            )
        numbers = np.arange(len(versions))
        rows = {
            client: (np.searchsorted(drawn, of)[:, None] * len(versions) + numbers).ravel()
            for client, of in chosen.items()
        }
        return CorruptedImages(pool, drawn, versions), CorruptedRows(rows, tuple(version_name(*v) for v in versions))
