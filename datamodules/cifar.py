"""CIFAR-10 and CIFAR-100 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009)."""

import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from datamodules.folders import DecodedImages, list_class_folders, read_images
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource
from datamodules.splitting import equal_images


class CIFAR(ImageSource):
    """The base of CIFAR-10 and CIFAR-100: 50,000 train and 10,000 test images of 32 x 32.

    Read from ``<root>/<folder>/{train,test}/<class>/`` if that is there, else from torchvision's form of the
    data set in ``root``. The order of images differs between the two, so that a partition's manifest fits
    only one of them. A training image that is identical to a test image is left out (about ten of
    CIFAR-100's), so that no test image ever trains.

    Args:
        root: folder of all data sets.
        download: let torchvision download the data set into ``root`` if it is not there.
    """

    title: ClassVar[str]
    folder: ClassVar[str]
    home: ClassVar[str] = "https://www.cs.toronto.edu/~kriz/cifar.html"

    def __init__(self, root: str = "data", download: bool = False) -> None:
        self.root = user_path(root)
        self.download = download

    @property
    def decoding(self) -> Decoding:
        """Return how a file becomes stored pixels."""
        return Decoding(32, "squash")

    def load(self) -> ImagePool:
        """Read all images; the first time from their files, then from a cache beside them."""
        at = self.root / self.folder
        decoded, labels, test = self._from_folders(at) if at.is_dir() else self._from_torchvision()
        if (np.count_nonzero(~test), np.count_nonzero(test)) != (50_000, 10_000):
            warnings.warn(
                f"{self.title} has 50000 train and 10000 test images, {at} has {np.count_nonzero(~test)} and "
                f"{np.count_nonzero(test)}: results compare with no published number",
                stacklevel=2,
            )
        keep = test | ~np.isin(decoded.group, decoded.group[test])
        images = decoded.images if keep.all() else decoded.images[keep]
        return ImagePool(
            images=torch.from_numpy(images),
            labels=torch.from_numpy(labels[keep]),
            test=torch.from_numpy(test[keep]),
            domains=torch.zeros(int(keep.sum()), dtype=torch.int64),
            group=torch.from_numpy(decoded.group[keep]),
        )

    def _from_folders(self, at: Path) -> tuple[DecodedImages, NDArray[np.int64], NDArray[np.bool_]]:
        folders = [[name] for name in self.class_names]
        train_files, train_labels = list_class_folders(at, "train", folders)
        test_files, test_labels = list_class_folders(at, "test", folders)
        test = np.arange(len(train_files) + len(test_files)) >= len(train_files)
        decoded = read_images(at, train_files + test_files, self.decoding.size, self.decoding.fit)
        return decoded, np.concatenate([train_labels, test_labels]), test

    def _from_torchvision(self) -> tuple[DecodedImages, NDArray[np.int64], NDArray[np.bool_]]:
        # torchvision unpickles these files, but only after their MD5 sums have matched the published ones.
        sides = []
        for train in (True, False):
            try:
                sides.append(self._torchvision_side(train))
            except Exception as error:  # a network failure can be of any kind
                failed = f" ({error})" if self.download else ""
                raise self.missing(
                    f"{self.title} is not in {self.root}: download it from {self.home} and put it there as "
                    f"{self.folder}/train/<class>/*.png and {self.folder}/test/<class>/*.png, or unpack the archive of "
                    f"the Python version in {self.root}{failed}"
                ) from error
        for side in sides:
            if tuple(side.classes) != self.class_names:
                raise ConfigurationError(f"{self.title} in {self.root} has other classes than the official ones")
        images = np.ascontiguousarray(np.concatenate([side.data for side in sides]).transpose(0, 3, 1, 2))
        labels = np.concatenate([np.array(side.targets, dtype=np.int64) for side in sides])
        test = np.arange(len(images)) >= len(sides[0].data)
        return DecodedImages(images, equal_images(images)), labels, test

    def _torchvision_side(self, train: bool) -> Any:
        """The data set as torchvision reads it."""
        raise NotImplementedError


class CIFAR10(CIFAR):
    """CIFAR-10: 10 classes, 5,000 train and 1,000 test images each."""

    title = "CIFAR-10"
    folder = "cifar10"
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def _torchvision_side(self, train: bool) -> Any:
        from torchvision import datasets  # slow to import

        return datasets.CIFAR10(self.root, train=train, download=self.download)


class CIFAR100(CIFAR):
    """CIFAR-100 with its 100 fine classes, 500 train and 100 test images each."""

    title = "CIFAR-100"
    folder = "cifar100"
    # fmt: off
    class_names = (
        "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle",
        "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle",
        "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur",
        "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard",
        "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
        "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree",
        "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket",
        "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider",
        "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger",
        "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
    )
    # fmt: on

    def _torchvision_side(self, train: bool) -> Any:
        from torchvision import datasets  # slow to import

        return datasets.CIFAR100(self.root, train=train, download=self.download)
