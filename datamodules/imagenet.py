"""ImageNet (Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", IJCV 2015), 1,000 classes."""

import re
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.ranges import PositiveInt, Seed, Size
from benchmark.seeds import numpy_generator
from datamodules.coop_layout import PUBLISHED, read_lines
from datamodules.folders import list_class_folders, read_images, without_copies
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource

SIZES = (1_281_167, 50_000)


class ImageNet(ImageSource):
    """1,281,167 train and 50,000 validation images, which test, as in CoOp; the official test set has no labels.

    Read from ``<root>/imagenet/images/{train,val}/<WordNet id>/*.JPEG`` (CoOp's form) or without the folder ``images``.
    Classes are in the order of their WordNet ids, and named by CoOp's ``classnames.txt`` in ``<root>/imagenet``. It has
    two names twice, ``missile`` and ``sunglasses``: the second of them is told apart by its id, in CLIP's prompts as
    well. The short side of an image is resized to ``size`` and the centre cut out, as CLIP tests. Decoded images take
    150 kB each at 224 pixels: 200 GB without ``shots``.

    Args:
        root: folder of all data sets.
        size: height and width of the stored images in pixels.
        shots: how many training images of each class are drawn; null: all.
        split_seed: seed of that draw.
    """

    def __init__(
        self, root: str = "data", size: Size = 224, shots: PositiveInt | None = None, split_seed: Seed = 0
    ) -> None:
        self.at = user_path(root) / "imagenet"
        self.size = size
        self.shots = shots
        self.split_seed = split_seed
        if not (self.at / "classnames.txt").is_file():
            raise self.missing(
                f"ImageNet is not in {self.at}: put classnames.txt from {PUBLISHED} there, and the images of "
                "https://www.image-net.org/download.php as images/{train,val}/<WordNet id>/*.JPEG"
            )
        self.classes = read_names(self.at / "classnames.txt")
        self.class_names = tuple(self.classes.values())

    @property
    def decoding(self) -> Decoding:
        """Return how a file becomes stored pixels."""
        return Decoding(self.size, "crop")

    def load(self) -> ImagePool:
        """Read the images in use; the first time from their files, then from a cache beside them.

        Raises:
            ConfigurationError: a class folder is missing, empty or unknown, or an image is damaged.
        """
        inside = "images/" if (self.at / "images").is_dir() else ""
        folders = [[wnid] for wnid in self.classes]
        train, train_labels = list_class_folders(self.at, f"{inside}train", folders)
        test, test_labels = list_class_folders(self.at, f"{inside}val", folders)
        if (len(train), len(test)) != SIZES:
            warnings.warn(
                f"ImageNet has {SIZES[0]} train and {SIZES[1]} validation images, {self.at} has {len(train)} and "
                f"{len(test)}: results compare with no published number",
                stacklevel=2,
            )
        drawn = self._drawn(train_labels)
        files = [train[row] for row in drawn] + test
        labels = np.concatenate([train_labels[drawn], test_labels])
        decoded = read_images(self.at, files, self.decoding.size, self.decoding.fit)
        return without_copies(decoded, labels, np.arange(len(files)) >= len(drawn), np.zeros_like(labels))

    def _drawn(self, labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """The training images in use, in their order."""
        if self.shots is None:
            return np.arange(len(labels))
        rows = []
        for label, wnid in enumerate(self.classes):
            rng = numpy_generator(self.split_seed, "imagenet", wnid)
            rows.append(rng.permutation(np.flatnonzero(labels == label))[: self.shots])
        return np.sort(np.concatenate(rows))


def read_names(path: Path) -> dict[str, str]:
    """Names of classes by WordNet id, in the order of the ids, from lines of an id and a name.

    Of classes of one name all but the first have their id behind it.

    Raises:
        ConfigurationError: the file cannot be read, or has other lines, an id twice, or a single class.
    """
    found: dict[str, str] = {}
    for line in read_lines(path):
        wnid, _, name = line.partition(" ")
        if not re.fullmatch(r"n\d{8}", wnid, re.ASCII) or not name.strip() or not name.isprintable() or wnid in found:
            raise ConfigurationError(
                f"{path} must have lines of a new WordNet id and a name, such as 'n01440764 tench', got {line[:80]!r}; "
                f"get it from {PUBLISHED}"
            )
        found[wnid] = name.strip()
    if len(found) < 2:
        raise ConfigurationError(f"{path} names a single class; get it from {PUBLISHED}")
    names: dict[str, str] = {}
    for wnid in sorted(found):
        name = found[wnid]
        names[wnid] = f"{name} ({wnid})" if name in names.values() else name
    return names
