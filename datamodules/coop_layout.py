"""Image sets in the form that CoOp gave them (Zhou et al., "Learning to Prompt for Vision-Language Models", IJCV 2022).

Each has one fixed split into train, validation and test images, which CoOp publishes as a JSON file beside the images
(https://github.com/KaiyangZhou/CoOp, DATASETS.md). The prompt-learning papers all train and test on these splits. The
validation images serve no one here: they are neither trained on nor tested on.
"""

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.ranges import Seed, Size
from benchmark.seeds import numpy_generator
from datamodules.folders import list_class_folders, read_images
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource

TRAIN, VAL, TEST = 0, 1, 2
SIDES = ("train", "val", "test")
PUBLISHED = "https://github.com/KaiyangZhou/CoOp (DATASETS.md)"


@dataclass(frozen=True)
class Listing:
    """The files of a data set.

    Attributes:
        files: paths below the folder of the images, with forward slashes.
        labels: int64, [n].
        sides: int8, [n]: TRAIN, VAL or TEST.
    """

    files: list[str]
    labels: NDArray[np.int64]
    sides: NDArray[np.int8]


def read_split(path: Path, class_names: Sequence[str]) -> Listing:
    """Read one of CoOp's ``split_zhou_*.json``: per side a list of [file, label, class name].

    Args:
        path: the file.
        class_names: the names that its labels must have, in order; underscores and spaces are the same there.

    Raises:
        ConfigurationError: the file cannot be read, is no split file, names its classes otherwise, lists a file twice,
            or none to train or to test on.
    """
    content = _json(path)
    files: list[str] = []
    labels: list[int] = []
    sides: list[int] = []
    for side, name in enumerate(SIDES):
        rows = content.get(name) if isinstance(content, dict) else None
        if not isinstance(rows, list):
            raise ConfigurationError(f"{path} is not a split file: expected a JSON object of lists {', '.join(SIDES)}")
        for row in rows:
            match row:
                case [str(file), int(label), str(called)]:
                    pass
                case _:
                    raise ConfigurationError(f"{path}: a row of {name!r} is not [file, label, class name]: {row!r}")
            if not 0 <= label < len(class_names):
                raise ConfigurationError(f"{path}: {file} has label {label}, expected 0 to {len(class_names) - 1}")
            if called.replace("_", " ") != class_names[label]:
                raise ConfigurationError(
                    f"{path}: class {label} is called {called!r}, expected {class_names[label]!r}; get the split file "
                    f"of this data set from {PUBLISHED}"
                )
            files.append(file)
            labels.append(label)
            sides.append(side)
    return check_sides(path, files, labels, sides)


def check_sides(path: Path, files: list[str], labels: list[int], sides: list[int]) -> Listing:
    """The listing of files that are published with their sides.

    Args:
        path: where they are listed, for messages.
        files: as in ``Listing``, like what follows.
        labels: of each file.
        sides: of each file.

    Raises:
        ConfigurationError: a file is listed twice, or none to train or to test on.
    """
    for side in (TRAIN, TEST):
        if side not in sides:
            raise ConfigurationError(
                f"{path} lists no image under {SIDES[side]!r}; get the split file from {PUBLISHED}"
            )
    if len(set(files)) != len(files):
        raise ConfigurationError(f"{path} lists {Counter(files).most_common(1)[0][0]} more than once")
    return Listing(files, np.array(labels, dtype=np.int64), np.array(sides, dtype=np.int8))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read the split file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not a split file: it is not JSON ({error})") from error


def draw_sides(
    labels: NDArray[np.int64], official_test: NDArray[np.bool_] | None, rng: np.random.Generator
) -> NDArray[np.int8]:
    """Draw a split of CoOp's proportions, class by class.

    Without an official test set half of a class trains, a fifth validates and the rest tests; with one, a fifth of the
    other images validates and the rest trains. Rounded as in CoOp's files, so that every class gets the same numbers.

    Args:
        labels: [n].
        official_test: bool, [n], or None.
        rng: where the draw comes from.

    Returns:
        int8, [n]: TRAIN, VAL or TEST.
    """
    sides = np.full(len(labels), TEST, dtype=np.int8)
    for label in np.unique(labels):
        mine = np.flatnonzero((labels == label) & (True if official_test is None else ~official_test))
        val = round(0.2 * len(mine))
        train = round(0.5 * len(mine)) if official_test is None else len(mine) - val
        shuffled = rng.permutation(mine)
        sides[shuffled[:train]] = TRAIN
        sides[shuffled[train : train + val]] = VAL
    return sides


def read_mat(path: Path, name: str) -> NDArray[Any]:
    """One variable of a MATLAB file, at least one-dimensional, without axes of length 1.

    Raises:
        ConfigurationError: the file cannot be read, or has no such variable.
    """
    from scipy.io import loadmat  # slow to import

    try:
        with path.open("rb") as file:
            return np.atleast_1d(loadmat(file, squeeze_me=True, variable_names=[name])[name])
    except Exception as error:  # a damaged file makes the reader fail in many ways
        raise ConfigurationError(
            f"cannot read {name!r} from {path} ({type(error).__name__}: {error}); download it again"
        ) from error


def check_numbers(path: Path, numbers: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Labels from the class numbers of an official list, which count from 1.

    Raises:
        ConfigurationError: a number is not one of a class.
    """
    if len(numbers) == 0 or numbers.min() < 1 or numbers.max() > classes:
        raise ConfigurationError(f"{path} must number its images' classes from 1 to {classes}; download it again")
    return numbers - 1


def read_lines(path: Path) -> list[str]:
    """The lines of a list that are neither empty nor comments.

    Raises:
        ConfigurationError: the file cannot be read, or has no such line.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the list {path} ({error}); download it again") from error
    lines = [line.strip() for line in content.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        raise ConfigurationError(f"the list {path} is empty; download it again")
    return lines


class CoOpSource(ImageSource):
    """An image set with one of CoOp's splits. Subclasses say what it is called and how its files are found.

    The short side of an image is resized to ``size`` and the centre cut out, bicubic: what CLIP's own test transform
    does. Random crops for training are therefore crops of that square. A training image that is byte-identical to a
    test image is left out, so that no test image ever trains. Images are in order of class, then of file name.

    Args:
        root: folder of all data sets.
        split: ``coop`` reads CoOp's split file, from the data set's folder or from ``<root>/coop_splits``; ``seeded``
            draws a split of the same sizes, which is not the one that published numbers are of.
        split_seed: seed of the ``seeded`` split.
        size: height and width of the stored images in pixels.

    Raises:
        ConfigurationError: ``size`` is not positive.
    """

    title: ClassVar[str]
    home: ClassVar[str]
    #: names of the data set's folder below ``root``, CoOp's first
    folders: ClassVar[tuple[str, ...]]
    #: where the images are in it, and what they look like there
    images: ClassVar[str]
    layout: ClassVar[str]
    #: what CoOp's split file calls the data set
    split_name: ClassVar[str]
    #: train and test images in CoOp's split
    sizes: ClassVar[tuple[int, int]]
    #: folders beside the class folders that hold no class
    ignored: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        root: str = "data",
        split: Literal["coop", "seeded"] = "coop",
        split_seed: Seed = 0,
        size: Size = 224,
    ) -> None:
        self.root = user_path(root)
        self.split = split
        self.split_seed = split_seed
        self.size = size

    @property
    def decoding(self) -> Decoding:
        """Return how a file becomes stored pixels."""
        return Decoding(self.size, "crop")

    def load(self) -> ImagePool:
        """Read all images; the first time from their files, then from a cache beside them.

        Raises:
            ConfigurationError: images or split file are not there, are damaged, or are not of this data set.
        """
        at = self.find()
        if self.split == "coop":
            listing = self.published(at)
        else:
            files, found, official_test = self.list_files(at)
            rng = numpy_generator(self.split_seed, "coop split", self.split_name)
            listing = Listing(files, found, draw_sides(found, official_test, rng))
        sizes = tuple(int(np.count_nonzero(listing.sides == side)) for side in (TRAIN, TEST))
        used = sorted(np.flatnonzero(listing.sides != VAL), key=lambda row: (listing.labels[row], listing.files[row]))
        paths = [(PurePosixPath(self.images) / listing.files[row]).as_posix() for row in used]
        labels, test = listing.labels[used], listing.sides[used] == TEST
        decoded = read_images(at, paths, self.decoding.size, self.decoding.fit)
        keep = test | ~np.isin(decoded.group, decoded.group[test])
        if not keep.all():
            # Read again, as a copy of what is kept would not be backed by a file.
            kept = np.flatnonzero(keep)
            decoded = read_images(at, [paths[row] for row in kept], self.decoding.size, self.decoding.fit)
            labels, test = labels[kept], test[kept]
        if sizes != self.sizes:
            warnings.warn(
                f"{self.title} has {self.sizes[0]} train and {self.sizes[1]} test images in CoOp's split, {at} has "
                f"{sizes[0]} and {sizes[1]}: results compare with no published number",
                stacklevel=2,
            )
        return ImagePool(
            images=torch.from_numpy(decoded.images),
            labels=torch.from_numpy(labels),
            test=torch.from_numpy(test),
            domains=torch.zeros(len(labels), dtype=torch.int64),
            group=torch.from_numpy(decoded.group),
        )

    def published(self, at: Path) -> Listing:
        """The split that CoOp uses; here from its split file.

        Args:
            at: the data set's folder.

        Raises:
            ConfigurationError: there is none, or it is damaged.
        """
        return read_split(self._split_file(at), self.class_names)

    def list_files(self, at: Path) -> tuple[list[str], NDArray[np.int64], NDArray[np.bool_] | None]:
        """The data set's files without CoOp's split; here from one folder a class.

        Args:
            at: the data set's folder.

        Returns:
            Paths below the folder of the images, labels [n], and what the official lists say is for testing, bool [n];
            None where the official release has one set of images.

        Raises:
            ConfigurationError: a class folder is missing, empty or unknown, or an official list cannot be read.
        """
        folders = [self.class_folder(name) for name in self.class_names]
        folders += [name for name in self.ignored if (at / self.images / name).is_dir()]
        files, labels = list_class_folders(at / self.images, ".", [[name] for name in folders])
        kept = int(np.count_nonzero(labels < len(self.class_names)))
        return files[:kept], labels[:kept], None

    def class_folder(self, name: str) -> str:
        """The folder of a class's images."""
        return name.replace(" ", "_")

    def find(self) -> Path:
        """The data set's folder.

        Raises:
            ConfigurationError: it is not there.
        """
        for name in self.folders:
            if (self.root / name / self.images).is_dir():
                return self.root / name
        raise self.missing(
            f"{self.title} is not in {self.root}: download it from {self.home} and put it there as "
            f"{self.folders[0]}/{self.layout}"
        )

    def _split_file(self, at: Path) -> Path:
        name = f"split_zhou_{self.split_name}.json"
        places = [at / name, self.root / "coop_splits" / name]
        for place in places:
            if place.is_file():
                return place
        raise ConfigurationError(
            f"{self.title} has no split file: put {name} from {PUBLISHED} at {places[0]} or {places[1]}, or set split "
            "to seeded for a split of the same sizes drawn here"
        )


class DownloadableCoOpSource(CoOpSource):
    """A ``CoOpSource`` whose images torchvision can download.

    Further arguments as ``CoOpSource``.

    Args:
        download: let torchvision download the images into ``root`` if they are not there.
    """

    def __init__(self, *arguments: Any, download: bool = False, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.download = download

    def find(self) -> Path:
        """The data set's folder, after a download where that is wanted and needed."""
        try:
            return super().find()
        except ConfigurationError as missing:
            if not self.download:
                raise
            try:
                self.fetch()
            except Exception as error:  # a network failure can be of any kind
                raise ConfigurationError(f"{missing}; downloading it failed: {error}") from error
            return super().find()

    def fetch(self) -> None:
        """Let torchvision download and unpack the data set."""
        raise NotImplementedError
