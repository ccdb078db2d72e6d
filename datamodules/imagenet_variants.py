"""ImageNet's variants: test images of its classes, collected, drawn or chosen in other ways, that nobody trains on."""

import warnings
from pathlib import Path
from typing import ClassVar

import numpy as np

from benchmark.errors import ConfigurationError, listed
from benchmark.paths import user_path
from benchmark.ranges import Size
from datamodules.coop_layout import PUBLISHED
from datamodules.folders import list_class_folders, read_images, subfolders, without_copies
from datamodules.imagenet import read_names
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource


class ImageNetVariant(ImageSource):
    """Base of the variants. Subclasses say what they are called, where they lie and which folder is which class.

    Classes are in the order of their WordNet ids and have ImageNet's names, so that a text prompt of a class is the one
    that ImageNet trains: ``classnames.txt`` is read from ``<root>/imagenet``, or from beside the folder of the classes,
    where CoOp has a copy. Images are resized and cut as those of :class:`datamodules.ImageNet`.

    Args:
        root: folder of all data sets.
        size: height and width of the stored images in pixels.

    Raises:
        ConfigurationError: there is no folder of the variant, no ``classnames.txt``, or a class folder without a name.
    """

    test_only = True
    title: ClassVar[str]
    home: ClassVar[str]
    #: where the class folders may be below ``root``, CoOp's place first, and what is in them there
    places: ClassVar[tuple[str, ...]]
    layout = "<WordNet id>/*.jpg"
    #: classes and images of the release
    sizes: ClassVar[tuple[int, int]]

    def __init__(self, root: str = "data", size: Size = 224) -> None:
        below = user_path(root)
        self.size = size
        found = [below / place for place in self.places if (below / place).is_dir()]
        if not found:
            raise self.missing(
                f"{self.title} is not in {below}: download it from {self.home} and put it there as "
                f"{self.places[0]}/{self.layout}"
            )
        self.at = found[0]
        first, copy = below / "imagenet" / "classnames.txt", self.at.parent / "classnames.txt"
        path = first if first.is_file() else copy
        if not path.is_file():
            raise self.missing(f"{self.title} has no names of classes: put classnames.txt from {PUBLISHED} at {first}")
        self.folders = self.class_folders(read_names(path), path)
        self.class_names = tuple(self.folders.values())

    def class_folders(self, names: dict[str, str], path: Path) -> dict[str, str]:
        """Return the classes' names by their folder, in order; here all that ImageNet has.

        Args:
            names: of ImageNet's classes by WordNet id, in order of the ids.
            path: where they were read, for messages.

        Raises:
            ConfigurationError: a folder of no class.
        """
        return names

    @property
    def decoding(self) -> Decoding:
        """Return how a file becomes stored pixels."""
        return Decoding(self.size, "crop")

    def load(self) -> ImagePool:
        """Read all images, each a test image; the first time from their files, then from a cache beside them.

        Raises:
            ConfigurationError: a class folder is missing, empty or unknown, or an image is damaged.
        """
        files, labels = list_class_folders(self.at, ".", [[folder] for folder in self.folders])
        if (len(self.folders), len(files)) != self.sizes:
            warnings.warn(
                f"{self.title} has {self.sizes[0]} classes and {self.sizes[1]} images, {self.at} has "
                f"{len(self.folders)} and {len(files)}: results compare with no published number",
                stacklevel=2,
            )
        decoded = read_images(self.at, files, self.decoding.size, self.decoding.fit)
        return without_copies(decoded, labels, np.ones(len(files), dtype=bool), np.zeros_like(labels))


class ImageNetV2(ImageNetVariant):
    """10,000 images of the 1,000 classes, collected anew as ImageNet was: the "matched frequency" set.

    From Recht et al., "Do ImageNet Classifiers Generalize to ImageNet?", ICML 2019. Folders are numbers: 0 is the class
    of the first WordNet id in ImageNet's order, 999 that of the last.
    """

    title = "ImageNetV2"
    home = "https://huggingface.co/datasets/vaishaal/ImageNetV2"
    places = (
        "imagenetv2/imagenetv2-matched-frequency-format-val",
        "imagenetv2-matched-frequency-format-val",
    )
    layout = "<0 to 999>/*.jpeg"
    sizes = (1000, 10_000)

    def class_folders(self, names: dict[str, str], path: Path) -> dict[str, str]:
        """Return the names by number."""
        return {str(number): name for number, name in enumerate(names.values())}


class ImageNetSketch(ImageNetVariant):
    """50,889 sketches of the 1,000 classes (Wang et al., "Learning Robust Global Representations", NeurIPS 2019)."""

    title = "ImageNet-Sketch"
    home = "https://github.com/HaohanWang/ImageNet-Sketch"
    places = ("imagenet-sketch/images", "imagenet-sketch/sketch", "sketch")
    layout = "<WordNet id>/*.JPEG"
    sizes = (1000, 50_889)


class ImageNetSubset(ImageNetVariant):
    """Base of the variants that have some of ImageNet's classes: those that there is a folder of."""

    def class_folders(self, names: dict[str, str], path: Path) -> dict[str, str]:
        """Return the names of the folders that are there.

        Raises:
            ConfigurationError: one is of no class of ImageNet, or there are fewer than two.
        """
        found = sorted(subfolders(self.at))
        if unknown := [folder for folder in found if folder not in names]:
            raise ConfigurationError(
                f"{self.at} must hold folders of ImageNet's classes by WordNet id, and {path} does not name "
                f"{listed(unknown)}; take other folders away, or get classnames.txt from {PUBLISHED}"
            )
        if len(found) < 2:
            raise ConfigurationError(
                f"{self.at} must hold a folder for each of {self.sizes[0]} classes, it has {len(found)}; download "
                f"{self.title} from {self.home} again"
            )
        return {folder: names[folder] for folder in found}


class ImageNetA(ImageNetSubset):
    """7,500 photographs of 200 classes that a ResNet-50 gets wrong.

    From Hendrycks et al., "Natural Adversarial Examples", CVPR 2021.
    """

    title = "ImageNet-A"
    home = "https://github.com/hendrycks/natural-adv-examples"
    places = ("imagenet-adversarial/imagenet-a", "imagenet-a")
    sizes = (200, 7_500)


class ImageNetR(ImageNetSubset):
    """30,000 paintings, toys, sculptures and other renditions of 200 classes.

    From Hendrycks et al., "The Many Faces of Robustness", ICCV 2021.
    """

    title = "ImageNet-R"
    home = "https://github.com/hendrycks/imagenet-r"
    places = ("imagenet-rendition/imagenet-r", "imagenet-r")
    sizes = (200, 30_000)
