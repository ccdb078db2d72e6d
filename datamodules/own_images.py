"""One's own images: in a folder a class, in a folder a domain and class, or listed in an index."""

import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.ranges import Seed, Size
from benchmark.seeds import numpy_generator
from datamodules.folders import DecodedImages, Fit, list_class_folders, read_images, without_copies
from datamodules.source import ImagePool, ImageSource, in_order
from datamodules.splitting import draw_test, draw_units, united
from datamodules.tables import read_table

SIDES = ("train", "test")
#: What no domain is called, as folders of other libraries are.
SIDE_NAMES = frozenset({*SIDES, "training", "testing", "val", "valid", "validation"})


@dataclass(frozen=True)
class Listed:
    """Images by domain, class and name, before any is read.

    Attributes:
        files: [n], paths relative to the data set's folder.
        labels: [n].
        domains: [n].
        test: bool, [n], True where an image is given as a test image.
        given: bool, [n], whether its side is given; else it is drawn.
        units: [n], images of equal value stay on one side; None where nothing is said of it.
    """

    files: list[str]
    labels: NDArray[np.int64]
    domains: NDArray[np.int64]
    test: NDArray[np.bool_]
    given: NDArray[np.bool_]
    units: NDArray[np.int64] | None = None


class OwnImages(ImageSource):
    """Base of the sources that take the names of classes and domains from the data.

    The data set's name is given, and is part of a run's configuration, its hash and its record: runs on two folders are
    no seeds of one experiment. Images where no train and test side is given are split 80/20 in each domain, stratified
    by class; images with a byte-identical copy, and the only one of a class, then train. Training images that are
    byte-identical to a given test image are left out, with a warning.

    Args:
        name: of the data set, in records and reports.
        root: the data set's folder.
        size: height and width of the stored images in pixels.
        fit: ``squash`` resizes to a square, ``crop`` resizes the short side and cuts out the centre (CLIP's way).
        split_seed: seed of the split into train and test, where it is drawn.

    Raises:
        ConfigurationError: the folder is not there or not of this form, or the name is that of another data set.
    """

    def __init__(self, name: str, root: str, size: Size = 224, fit: Fit = "squash", split_seed: Seed = 0) -> None:
        self.name = _own_name(name)
        self.at = user_path(root)
        self.size = size
        self.fit: Fit = fit
        self.split_seed = split_seed
        if not self.at.is_dir():
            raise ConfigurationError(
                f"{name} is not in {root}: there is no such folder; put the images there, or give their folder as "
                "data.source.init_args.root"
            )

    def _listed(self) -> Listed:
        """List the images."""
        raise NotImplementedError

    def _decoded(self, listed: Listed) -> DecodedImages:
        """Read them."""
        return read_images(self.at, listed.files, self.size, self.fit)

    def load(self) -> ImagePool:
        """Read all images; the first time from their files, then from a cache beside them.

        Raises:
            ConfigurationError: a folder or a file is not as it must be, or a class or side is left without images.
        """
        listed = self._listed()
        decoded = self._decoded(listed)
        if listed.units is None:
            test = listed.test | self._drawn(listed, decoded.group)
        else:
            decoded = replace(decoded, group=united(listed.units, decoded.group))
            test = listed.test | self._drawn_units(listed, decoded.group)
        pool = without_copies(decoded, listed.labels, test, listed.domains)
        left_out = len(listed.files) - len(pool.labels)
        if left_out:
            warnings.warn(
                f"{self.name}: {left_out} training images are copies of test images and do not train", stacklevel=2
            )
        if not bool(pool.test.any()):
            raise ConfigurationError(f"{self.name} has no test images: it has too few that are no copies of another")
        trained = set(pool.labels[~pool.test].tolist())
        without = [name for label, name in enumerate(self.class_names) if label not in trained]
        if without:
            raise ConfigurationError(
                f"{self.name} has no training images of {', '.join(without[:5])}; add some, or remove the class"
            )
        return pool

    def _drawn(self, listed: Listed, group: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Test flags of an 80/20 split of each domain, of the images whose side is not given."""
        copies = np.isin(group, group[group != np.arange(len(group))])
        test = np.zeros(len(group), dtype=bool)
        for number, domain in enumerate(self.domain_names):
            rows = np.flatnonzero(~listed.given & (listed.domains == number))
            if len(rows):
                labels = listed.labels[rows]
                rng = numpy_generator(self.split_seed, "own images", domain)
                test[rows] = draw_test(labels, ~copies[rows] & (np.bincount(labels)[labels] > 1), rng)
        return test

    def _drawn_units(self, listed: Listed, group: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The same, about a fifth of each domain and class, by whole groups."""
        test = np.zeros(len(group), dtype=bool)
        rows = np.flatnonzero(~listed.given)
        strata = listed.domains * len(self.class_names) + listed.labels
        test[rows] = draw_units(strata[rows], group[rows], self.split_seed, "own images")
        if len(rows) and not test.any():
            raise ConfigurationError(
                f"{self.name}: too few groups to draw a test split of whole ones, one in each domain and class; say "
                "in a column split which images are train and which test"
            )
        return test


class ImageFolders(OwnImages):
    """One's own images of one domain: ``<root>/<class>/*``, or that in both ``<root>/train`` and ``<root>/test``.

    Classes are named by their folders and come in the order of the names, 2 before 10. Files and folders whose names
    begin with a dot, and files that are no images, are passed over. :class:`OwnImages` says what the arguments mean.

    Args:
        name: of the data set, in records and reports.
        root: the data set's folder.
        size: height and width of the stored images in pixels.
        fit: ``squash`` or ``crop``.
        split_seed: seed of the split, where there are no folders ``train`` and ``test``.
    """

    def __init__(self, name: str, root: str, size: Size = 224, fit: Fit = "squash", split_seed: Seed = 0) -> None:
        super().__init__(name, root, size, fit, split_seed)
        self.class_names = _common_classes(self.name or "", self.at, _places(self.at, "."))

    def _listed(self) -> Listed:
        return _in_folders(self.at, ["."], self.class_names)


class DomainFolders(OwnImages):
    """One's own images of several domains: ``<root>/<domain>/<class>/*``, as PACS or Office-Home are unpacked.

    A domain may have ``train/<class>`` and ``test/<class>`` in place of its classes. Domains and classes are named by
    their folders and come in the order of the names, 2 before 10; every domain has every class. Files and folders whose
    names begin with a dot, and files that are no images, are passed over.

    Args:
        name: of the data set, in records and reports.
        root: the data set's folder.
        size: height and width of the stored images in pixels.
        fit: ``squash`` or ``crop``.
        split_seed: seed of the split of each domain that has no folders ``train`` and ``test``.
    """

    def __init__(self, name: str, root: str, size: Size = 224, fit: Fit = "squash", split_seed: Seed = 0) -> None:
        super().__init__(name, root, size, fit, split_seed)
        self.domain_names = tuple(_folders(self.at))
        if len(self.domain_names) < 2:
            raise ConfigurationError(
                f"{self.at} must hold a folder for each of at least two domains, it has {len(self.domain_names)}; "
                "ImageFolders reads images of one domain, <root>/<class>/*"
            )
        if len(sides := [name for name in self.domain_names if name.lower() in SIDE_NAMES]) > 1:
            raise ConfigurationError(
                f"{self.at} holds {' and '.join(sides)}, which are sides of a split and no domains: read as domains, "
                "images of each would train. ImageFolders reads <root>/train/<class> and <root>/test/<class>: call "
                "them so"
            )
        places = [place for domain in self.domain_names for place in _places(self.at, domain)]
        self.class_names = _common_classes(self.name or "", self.at, places)

    def _listed(self) -> Listed:
        return _in_folders(self.at, self.domain_names, self.class_names)


class ImageIndex(OwnImages):
    """One's own images wherever they lie below a folder, listed in a CSV or Parquet file, a row an image.

    Columns are ``path`` (relative to ``root``) and ``label`` (name of the class), and where wanted ``domain``,
    ``split`` (``train`` or ``test``) and ``group``: images of one group, such as a patient's, are on one side of every
    split. Other columns are passed over. Classes and domains come in the order of their names, 2 before 10; a domain
    may lack a class.

    Args:
        name: of the data set, in records and reports.
        root: the data set's folder.
        index: the file, seen from ``root``.
        size: height and width of the stored images in pixels.
        fit: ``squash`` or ``crop``.
        split_seed: seed of the split, where there is no column ``split``.
    """

    def __init__(
        self,
        name: str,
        root: str,
        index: str = "index.csv",
        size: Size = 224,
        fit: Fit = "squash",
        split_seed: Seed = 0,
    ) -> None:
        super().__init__(name, root, size, fit, split_seed)
        self.index = self.at / index
        if not self.index.is_file():
            raise ConfigurationError(
                f"{name}: there is no index {self.index}; put a CSV or Parquet file with columns path and label there, "
                "or name it as data.source.init_args.index, seen from root"
            )
        rows = [
            {k: (v or "").strip() for k, v in row.items() if k} for row in read_table(self.index, ("path", "label"))
        ]
        self._check(rows)
        self.class_names = tuple(in_order(row["label"] for row in rows))
        self.domain_names = tuple(in_order(row.get("domain", "") for row in rows))
        if len(self.class_names) < 2:
            raise ConfigurationError(f"{self.index}: expected at least two classes in the column label, got one")
        domains, labels = ({name: n for n, name in enumerate(of)} for of in (self.domain_names, self.class_names))
        self.rows = sorted(rows, key=lambda row: (domains[row.get("domain", "")], labels[row["label"]], row["path"]))

    def _check(self, rows: Sequence[dict[str, str]]) -> None:
        """Refuse rows without images, images given twice, sides that do not exist, and groups on both sides."""
        places: dict[str, int] = {}
        sides: dict[str, str] = {}
        for number, row in enumerate(rows, start=2 if self.index.suffix != ".parquet" else 1):
            at = f"{self.index}: row {number}"
            empty = [name for name in ("path", "label", "domain", "split") if row.get(name, "given") == ""]
            if empty:
                raise ConfigurationError(f"{at} has an empty {empty[0]}; fill it in, or remove the row")
            for name in ("label", "domain"):
                _check_printable(row.get(name, ""), at)
            if places.setdefault(os.path.normpath(row["path"]), number) != number:
                earlier = places[os.path.normpath(row["path"])]
                raise ConfigurationError(f"{at} names {row['path']}, as row {earlier} does; keep one of them")
            side = row.get("split", "train")
            if side not in SIDES:
                raise ConfigurationError(
                    f"{at}: split must be train or test, got {side!r} (data.val_fraction holds out images to tune on)"
                )
            if row.get("group") and sides.setdefault(row["group"], side) != side:
                raise ConfigurationError(
                    f"{at}: the group {row['group']!r} is on both sides; put all of its images into train or into test"
                )
        if not rows:
            raise ConfigurationError(f"{self.index} lists no image; add rows with path and label")

    def _listed(self) -> Listed:
        labels = {name: label for label, name in enumerate(self.class_names)}
        domains = {name: domain for domain, name in enumerate(self.domain_names)}
        units = None
        if "group" in self.rows[0]:  # an image without a group is alone in its own
            keys = [f"group {row['group']}" if row["group"] else f"image {row['path']}" for row in self.rows]
            units = np.unique(keys, return_inverse=True)[1].reshape(-1).astype(np.int64)
        return Listed(
            [row["path"] for row in self.rows],
            np.array([labels[row["label"]] for row in self.rows], dtype=np.int64),
            np.array([domains[row.get("domain", "")] for row in self.rows], dtype=np.int64),
            np.array([row.get("split") == "test" for row in self.rows], dtype=bool),
            np.full(len(self.rows), "split" in self.rows[0]),
            units,
        )


def _own_name(name: str) -> str:
    """The name, if it is one that no other data set has.

    Raises:
        ConfigurationError: it is empty, long, holds signs that names do not have, or is that of a source.
    """
    if not re.fullmatch(r"\w[\w .,+()-]{0,59}", name):
        raise ConfigurationError(
            f"data.source.init_args.name: expected a name of up to 60 letters, digits, spaces and . , + - ( ) _, got "
            f"{name[:80]!r}"
        )
    own = __name__.partition(".")[0]
    kinds = (kind for kind in _sources(ImageSource) if kind.__module__.partition(".")[0] == own)
    known = {_plain(kind.__name__): kind.__name__ for kind in kinds}
    if _plain(name) in known:
        raise ConfigurationError(
            f"data.source.init_args.name: {name!r} is the data set that datamodules.{known[_plain(name)]} reads; take "
            "that source, or give your images another name"
        )
    return name


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _sources(base: type[ImageSource]) -> set[type[ImageSource]]:
    children = set(base.__subclasses__())
    return children.union(*map(_sources, children))


def _check_printable(name: str, at: Path | str) -> None:
    if not name.isprintable():
        raise ConfigurationError(f"{at}: the name {name!r} has signs that cannot be printed; rename it")


def _folders(at: Path) -> list[str]:
    """Names of the folders in a folder, in order, without hidden ones."""
    try:
        with os.scandir(at) as entries:
            found = in_order(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise ConfigurationError(f"cannot read the image folder {at}: {error.strerror}") from error
    for name in found:
        _check_printable(name, at)
    return found


def _places(root: Path, below: str) -> list[str]:
    """Where the class folders of a domain are: its folders ``train`` and ``test``, or the domain's folder itself.

    Raises:
        ConfigurationError: there are other folders beside ``train`` and ``test``.
    """
    found = _folders(root / below)
    if not set(SIDES) <= set(found):
        return [below]
    others = [name for name in found if name not in SIDES]
    if others:
        raise ConfigurationError(
            f"{root / below} holds {', '.join(others[:5])} beside train and test: move those images into one of the "
            "two, or take the folder away (data.val_fraction holds out images to tune on)"
        )
    return [side if below == "." else f"{below}/{side}" for side in SIDES]


def _common_classes(name: str, root: Path, places: Sequence[str]) -> tuple[str, ...]:
    """The classes that every place has a folder of.

    Raises:
        ConfigurationError: there are none, or a place lacks a class that another has.
    """
    found = {place: _folders(root / place) for place in places}
    classes = in_order(label for labels in found.values() for label in labels)
    if len(classes) < 2:
        raise ConfigurationError(
            f"{name}: expected a folder for each of at least two classes in {root / places[0]}, got {len(classes)}; "
            "put the images into folders named by their class"
        )
    for place, labels in found.items():
        for label in classes:
            if label not in labels:
                other = next(there for there, theirs in found.items() if label in theirs)
                raise ConfigurationError(
                    f"{name}: {root / other} has the class {label}, {root / place} has not: name the classes alike, or "
                    "list the images in an index (ImageIndex), where a domain may lack a class"
                )
    return tuple(classes)


def _in_folders(root: Path, domains: Sequence[str], classes: Sequence[str]) -> Listed:
    """The images of domains of which each has its folder.

    Raises:
        ConfigurationError: a class folder is empty, or holds folders, whose images would go unnoticed.
    """
    files: list[str] = []
    parts: list[tuple[NDArray[np.int64], ...]] = []
    for number, domain in enumerate(domains):
        places = _places(root, domain)
        for place in places:
            for label in classes:
                inner = _folders(root / place / label)
                if inner:
                    raise ConfigurationError(
                        f"{root / place / label} holds the folder {inner[0]}, and a class folder holds images only; "
                        "<root>/<domain>/<class> is read by DomainFolders, <root>/<class> by ImageFolders, and any "
                        "other form by ImageIndex"
                    )
            listed, labels = list_class_folders(root, place, [[label] for label in classes])
            files += listed
            n, given = len(listed), len(places) > 1
            parts.append((labels, np.full(n, number), np.full(n, given and place.endswith("test")), np.full(n, given)))
    labels, numbers, test, given_sides = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Listed(files, labels, numbers, test.astype(bool), given_sides.astype(bool))
