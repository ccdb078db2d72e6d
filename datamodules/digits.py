"""Handwritten digits in six visual domains: the data set that every machine has.

The digits are scikit-learn's copy of the UCI "Optical Recognition of Handwritten Digits" test set: 1,797
images of 8x8 pixels with 17 grey levels, inside the scikit-learn wheel. They are enlarged to 32x32 and
rendered in six styles. Numbers from it are a demonstration, not a published benchmark.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from benchmark.ranges import Seed
from benchmark.seeds import numpy_generator
from datamodules.source import ImagePool, ImageSource

SIZE = 32
TEST_SHARE = 0.2

Strokes = NDArray[np.float32]  # [32, 32], 0 where there is paper, 1 where there is full ink


def _enlarged(image: NDArray[np.uint8]) -> Strokes:
    large = Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    return np.asarray(large).astype(np.float32) / np.float32(255)


def _grey(values: Strokes) -> NDArray[np.float32]:
    return np.repeat(values[..., None], 3, axis=2)


def _mix(strokes: Strokes, ground: tuple[float, float, float], ink: tuple[float, float, float]) -> NDArray[np.float32]:
    weight = strokes[..., None]
    return (1 - weight) * np.array(ground, np.float32) + weight * np.array(ink, np.float32)


def _ink(strokes: Strokes, _: np.random.Generator) -> NDArray[np.float32]:
    return _grey(1 - strokes)


def _inverted(strokes: Strokes, _: np.random.Generator) -> NDArray[np.float32]:
    return _grey(strokes)


def _coloured(strokes: Strokes, _: np.random.Generator) -> NDArray[np.float32]:
    return _mix(strokes, ground=(0.90, 0.25, 0.15), ink=(0.10, 0.45, 0.30))


def _outline(strokes: Strokes, _: np.random.Generator) -> NDArray[np.float32]:
    # A band around half ink is the contour of the stroke, half a source pixel wide.
    return _grey(1 - np.exp(-(((strokes - 0.5) / 0.2) ** 2)))


def _noise(strokes: Strokes, generator: np.random.Generator) -> NDArray[np.float32]:
    noise = generator.normal(0.0, 0.22, size=(SIZE, SIZE, 3)).astype(np.float32)
    return _grey(0.75 - 0.5 * strokes) + noise


def _low_contrast(strokes: Strokes, _: np.random.Generator) -> NDArray[np.float32]:
    return _grey(0.42 + 0.10 * strokes)


STYLES: dict[str, Callable[[Strokes, np.random.Generator], NDArray[np.float32]]] = {
    "ink": _ink,
    "inverted": _inverted,
    "coloured": _coloured,
    "outline": _outline,
    "noise": _noise,
    "low_contrast": _low_contrast,
}


def rendered(original: NDArray[np.uint8], style: str, *key: int | str) -> NDArray[np.uint8]:
    """Render a small grey image in one of :data:`STYLES`.

    Args:
        original: [8, 8], 255 where there is full ink.
        style: its name.
        key: of the style's noise.

    Returns:
        [32, 32, 3].
    """
    pixels = STYLES[style](_enlarged(original), numpy_generator(*key))
    return np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8)


class DigitDomains(ImageSource):
    """Ten digits in six domains, with one fixed split of the handwritten originals.

    Of each class, 20 % of the originals are for testing and appear in *every* domain; the rest train, each
    in *one* domain, so that the domains' training sets are disjoint and class-balanced. A test digit
    therefore never trains in any style. ``ImagePool.group`` is the original's index, 0 to 1796.

    Args:
        seed: key of the split and of the noise domain's noise.
    """

    title = "Digits in domains"
    embedded = True
    class_names = (
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
    )
    domain_names = tuple(STYLES)

    def __init__(self, seed: Seed = 0) -> None:
        self.seed = seed

    def load(self) -> ImagePool:
        """Render the pool: about 240 training and 360 test images a domain, uint8 [n, 3, 32, 32]."""
        from sklearn.datasets import load_digits  # slow to import, and not needed to know the names

        digits = load_digits()
        labels = digits.target.astype(np.int64)
        # Whole grey levels and Pillow's integer resampling give the same bytes on every machine.
        originals = np.round(digits.images * (255 / 16)).astype(np.uint8)
        rows = self._rows(labels)
        styles = self.domain_names
        images = np.stack([rendered(originals[n], styles[d], "digits", styles[d], self.seed, n) for n, d, _ in rows])
        group, domains, test = (torch.tensor(column) for column in zip(*rows, strict=True))
        return ImagePool(
            images=torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(),
            labels=torch.from_numpy(labels)[group],
            test=test,
            domains=domains,
            group=group,
        )

    def _rows(self, labels: NDArray[np.int64]) -> list[tuple[int, int, bool]]:
        """(original, domain, test) of every image of the pool, by domain, training images first."""
        rows = []
        for label in range(len(self.class_names)):
            of_class = np.flatnonzero(labels == label)
            order = numpy_generator("digits", "split", self.seed, label).permutation(of_class)
            n_test = round(TEST_SHARE * len(order))
            for digit in order[:n_test].tolist():
                rows += [(digit, domain, True) for domain in range(len(self.domain_names))]
            for place, digit in enumerate(order[n_test:].tolist()):
                # Starting at another domain for each class evens out the domains' sizes.
                rows.append((digit, (place + label) % len(self.domain_names), False))
        return sorted(rows, key=lambda row: (row[1], row[2], row[0]))
