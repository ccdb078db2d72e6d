"""Fed-ISIC2019 (Ogier du Terrail et al., "FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in
Realistic Healthcare Settings", NeurIPS 2022): the training images of the ISIC challenge of 2019 at six centers.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.ranges import Seed, Size
from datamodules.folders import Fit, read_images, without_copies
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource
from datamodules.splitting import draw_units, united, warn_of_leaks
from datamodules.tables import read_table

LISTS = ("train_test_split.csv", "train_test_split")
LIST_HOME = "https://github.com/owkin/FLamby (flamby/datasets/fed_isic2019/dataset_creation_scripts)"
PREPROCESSED, RAW = "ISIC_2019_Training_Input_preprocessed", "ISIC_2019_Training_Input"
HOME = "https://challenge.isic-archive.com/data/#2019"
LESIONS = "ISIC_2019_Training_Metadata.csv"
#: train and test images of each center
SIZES = ((9930, 2483), (3163, 791), (2691, 672), (1807, 452), (655, 164), (351, 88))


class FedISIC2019(ImageSource):
    """23,247 skin lesion images of eight classes at six centers, one domain a center, as FLamby splits them.

    Read from ``<root>/fed_isic2019``: FLamby's list ``train_test_split`` (with or without ``.csv``) and its resized
    images, ``ISIC_2019_Training_Input_preprocessed/<image>.jpg``; where that folder is not there, the release's
    ``ISIC_2019_Training_Input``, with a warning, as FLamby's images have their colours evened out. Images come by
    center, class and name. Training copies of test images are left out.

    **FLamby's split is by image**: test images can show a lesion that also trains. Where the release's
    ``ISIC_2019_Training_Metadata.csv`` is there, it is said how many do. With ``split="lesion"`` no lesion is on two
    sides.

    Args:
        root: folder of all data sets.
        size: height and width of the stored images in pixels.
        fit: ``crop`` resizes the short side and cuts out the centre, ``squash`` resizes to a square.
        split: ``image``: FLamby's. ``lesion``: drawn 80/20 in each center and class by the metadata's lesions; an
            image without a lesion id counts as a lesion.
        split_seed: seed of the split by lesion.
    """

    title = "Fed-ISIC2019"
    class_names = (
        "melanoma",
        "melanocytic nevus",
        "basal cell carcinoma",
        "actinic keratosis",
        "benign keratosis",
        "dermatofibroma",
        "vascular lesion",
        "squamous cell carcinoma",
    )
    domain_names = ("BCN", "HAM_vidir_molemax", "HAM_vidir_modern", "HAM_rosendahl", "MSK", "HAM_vienna_dias")

    def __init__(
        self,
        root: str = "data",
        size: Size = 224,
        fit: Fit = "crop",
        split: Literal["image", "lesion"] = "image",
        split_seed: Seed = 0,
    ) -> None:
        self.at = user_path(root) / "fed_isic2019"
        self.size = size
        self.fit: Fit = fit
        self.split = split
        self.split_seed = split_seed

    @property
    def decoding(self) -> Decoding:
        """Return how a file becomes stored pixels."""
        return Decoding(self.size, self.fit)

    def load(self) -> ImagePool:
        """Read all images; the first time from their files, then from a cache beside them.

        Raises:
            ConfigurationError: list or images are not there, are damaged, or are not of this form.
        """
        listed, folder = self._found()
        rows = self._rows(listed)
        names = [name for name, *_ in rows]
        centers, labels, sides = np.array([row[1:] for row in rows], dtype=np.int64).T
        test = sides == 1
        self._tell_of_sizes(folder, centers, test)
        decoded = read_images(
            self.at, [f"{folder}/{name}.jpg" for name in names], self.decoding.size, self.decoding.fit
        )
        lesions = self._lesions(names)
        if self.split == "lesion":
            decoded = replace(decoded, group=united(lesions, decoded.group))
            strata = centers * len(self.class_names) + labels
            test = draw_units(strata, decoded.group, self.split_seed, "fed_isic2019")
        else:
            warn_of_leaks(self.title, "lesion", lesions, centers, test, self.domain_names)
        return without_copies(decoded, labels, test, centers)

    def _found(self) -> tuple[Path, str]:
        """The list, and the name of the folder of images."""
        listed = next((self.at / name for name in LISTS if (self.at / name).is_file()), None)
        folder = next((name for name in (PREPROCESSED, RAW) if (self.at / name).is_dir()), None)
        if listed is None or folder is None:
            missing = [] if listed else [f"{LISTS[0]} from {LIST_HOME}"]
            missing += [] if folder else [f"{PREPROCESSED}/*.jpg, made by FLamby's scripts of the images from {HOME}"]
            raise self.missing(f"Fed-ISIC2019 is not complete in {self.at}: put there {' and '.join(missing)}")
        return listed, folder

    def _rows(self, path: Path) -> list[tuple[str, int, int, int]]:
        """Name, center, label and side (0 trains, 1 tests) of each image, by center, class and name."""
        centers, labels = map(str, range(len(self.domain_names))), map(str, range(len(self.class_names)))
        allowed = {"center": list(centers), "target": list(labels), "fold": ["train", "test"]}
        rows: dict[str, tuple[str, int, int, int]] = {}
        for row in read_table(path, ("image", *allowed)):
            name = row["image"]
            wrong = next((column for column, values in allowed.items() if row[column] not in values), None)
            if wrong:
                raise ConfigurationError(
                    f"{path}: the image {name} has {wrong} {row[wrong]!r}, expected one of "
                    f"{', '.join(allowed[wrong])}; get the list from {LIST_HOME}"
                )
            if name in rows:
                raise ConfigurationError(f"{path} lists {name} more than once; get the list from {LIST_HOME}")
            rows[name] = name, int(row["center"]), int(row["target"]), allowed["fold"].index(row["fold"])
        if {side for *_, side in rows.values()} != {0, 1}:
            raise ConfigurationError(f"{path} lists no image to train or to test on; get the list from {LIST_HOME}")
        return sorted(rows.values(), key=lambda row: (row[1], row[2], row[0]))

    def _tell_of_sizes(self, folder: str, centers: NDArray[np.int64], test: NDArray[np.bool_]) -> None:
        """Warn of other images than FLamby's."""
        sides = [np.bincount(centers[of], minlength=len(SIZES)).tolist() for of in (~test, test)]
        if tuple(zip(*sides, strict=True)) != SIZES:
            warnings.warn(
                f"Fed-ISIC2019 has {sum(train for train, _ in SIZES)} train and {sum(last for _, last in SIZES)} test "
                f"images at its centers, {self.at} has {sum(sides[0])} and {sum(sides[1])}, or others at a center: "
                "results compare with no published number",
                stacklevel=3,
            )
        if folder == RAW:
            warnings.warn(
                f"{self.at / RAW} holds the release's images and not FLamby's, whose colours are evened out "
                f"({PREPROCESSED}): results compare with no published number",
                stacklevel=3,
            )

    def _lesions(self, names: list[str]) -> NDArray[np.int64]:
        """A number for each image's lesion, [n]; an image without a lesion id is alone in its own."""
        path = self.at / LESIONS
        if not path.is_file():
            if self.split == "lesion":
                raise ConfigurationError(
                    f"split=lesion needs lesion ids: put {LESIONS} from {HOME} into {self.at}, or take split=image"
                )
            return np.arange(len(names))
        known = {row["image"]: row["lesion_id"] for row in read_table(path, ("image", "lesion_id"))}
        lesions = [f"lesion {known[name]}" if known.get(name) else f"image {name}" for name in names]
        return np.unique(lesions, return_inverse=True)[1].reshape(-1).astype(np.int64)
