"""One's own images: in a folder a class, in a folder a domain and class, or listed in an index."""

import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError, listed
from benchmark.paths import user_path
from benchmark.ranges import Bits, Seed, Size
from benchmark.seeds import numpy_generator
from datamodules.decoded_cache import BESIDE
from datamodules.folders import DecodedImages, file_statuses, no_copies, pool_of, read_images
from datamodules.names import check_names, in_order, whole
from datamodules.own_folders import (
    SIDE_NAMES,
    SIDES,
    Listed,
    common_classes,
    folders_in,
    images_in_folders,
    sides_in,
)
from datamodules.pixels import Decoding, Fit
from datamodules.source import ImagePool, ImageSource
from datamodules.splitting import draw_test, draw_units, united
from datamodules.tables import columns_of, read_numbered, read_table

#: Columns of an index beside path and label that say how images are read and split.
OPTIONAL = ("domain", "split", "group")
#: Names of data sets with their own source that older configurations use for folders; those configurations stay valid.
NAMED_BEFORE = frozenset(
    {
        *("camelyon17", "fedisic2019", "fgvcaircraft", "imagenet", "imageneta", "imagenetr", "imagenetsketch"),
        *("imagenetv2", "medmnist", "officehome", "pacs", "sun397", "vlcs"),
    }
)


class OwnImages(ImageSource):
    """Base of the sources that take the names of classes and domains from the data.

    The data set's name is given, and is part of a run's configuration, its hash and its record: runs on two folders are
    no seeds of one experiment. Images are as one sees them: turned as EXIF says, what is transparent on white. Images
    where no train and test side is given are split 80/20 in each domain, stratified by class; images with a copy, of
    the same pixels at the stored size, and the only one of a class, then train. Training images that are copies of a
    given test image are left out, with a warning.

    Args:
        name: of the data set, in records and reports.
        root: the data set's folder.
        size: height and width of the stored images in pixels.
        fit: ``squash`` resizes to a square, ``crop`` resizes the short side and cuts out the centre (CLIP's way).
        split_seed: seed of the split into train and test, where it is drawn.
        bits: how many are in use of the values in files of 16 bits, such as 12 of an X-ray: ``2 ** bits - 1`` is white.
            Files of 8 bits are as they are.
        cache: folder of the decoded images, seen from ``root``; null keeps them in memory.

    Raises:
        ConfigurationError: the folder is not there or not of this form, or the name is that of another data set.
    """

    def __init__(
        self,
        name: str,
        root: str,
        size: Size = 224,
        fit: Fit = "squash",
        split_seed: Seed = 0,
        bits: Bits | None = None,
        cache: str | None = BESIDE,
    ) -> None:
        self.name = _own_name(name)
        self.at = user_path(root)
        self.size = size
        self.fit: Fit = fit
        self.split_seed = split_seed
        self.bits = bits
        self.cache = cache
        #: of each listed image, once they are read, whether the pool has it
        self._in_pool: NDArray[np.bool_] | None = None
        if not self.at.is_dir():
            raise ConfigurationError(
                f"{name} is not in {root}: there is no such folder; put the images there, or give their folder as "
                "data.source.init_args.root"
            )

    def listing(self) -> Listed:
        """List the images."""
        raise NotImplementedError

    def _decoded(self, images: Listed) -> DecodedImages:
        """Read them.

        Raises:
            ConfigurationError: a file is in two classes, by links or under two names.
        """
        rows: dict[tuple[int, int], int] = {}
        for row, status in enumerate(file_statuses(self.at, images.files)):
            first = rows.setdefault((status.st_dev, status.st_ino), row)
            if images.labels[first] != images.labels[row]:
                one, other = (f"{images.files[n]} ({self.class_names[images.labels[n]]})" for n in (first, row))
                raise ConfigurationError(
                    f"{self.at}: {one} and {other} are one file in two classes, by a link of a file or of a class "
                    "folder; remove it from one of them"
                )
        return read_images(self.at, images.files, self.size, self.fit, True, self.bits, self.cache)

    @property
    def decoding(self) -> Decoding:
        """Return how a file becomes stored pixels."""
        return Decoding(self.size, self.fit, True, self.bits)

    def load(self) -> ImagePool:
        """Read all images; the first time from their files, then from a cache beside them.

        Raises:
            ConfigurationError: a folder or a file is not as it must be, or a class or side is left without images.
        """
        images = self.listing()
        decoded = self._decoded(images)
        self._tell_of_copies(images, decoded.group)
        copies = decoded.group
        if images.units is None:
            drawn = self._drawn(images, copies)
        else:
            drawn = self._drawn_units(images, united(images.units, copies))
        test = images.test | drawn
        stays = no_copies(copies, test)
        left_out = {"are copies of test images": int((~stays).sum())}
        if images.units is not None:
            rest, group = np.flatnonzero(stays), images.units.copy()
            group[rest] = united(images.units[rest], copies[rest])  # a copy that is left out unites nobody
            stays[rest] = no_copies(group[rest], test[rest])
            left_out["are of a group with test images"] = len(rest) - int(stays.sum())
            decoded = replace(decoded, group=group)
        self._in_pool = stays
        pool = pool_of(decoded, images.labels, test, images.domains, stays)
        for why, count in left_out.items():
            if count:
                warnings.warn(f"{self.name}: {count} training images {why} and do not train", stacklevel=2)
        self._check_sides(images, pool)
        return pool

    def _tell_of_copies(self, images: Listed, group: NDArray[np.int64]) -> None:
        """Warn of images of the same pixels in several classes."""
        several = group[images.labels != images.labels[group]]  # a group is called by its first image
        if len(several):
            rows = np.flatnonzero(group == several[0])
            other = rows[images.labels[rows] != images.labels[rows[0]]][0]
            count = int(np.isin(group, several).sum())
            warnings.warn(
                f"{self.name}: {count} images have the same pixels as one of another class (first: "
                f"{images.files[rows[0]]} and {images.files[other]})",
                stacklevel=3,
            )

    def _check_sides(self, images: Listed, pool: ImagePool) -> None:
        """Refuse a pool without test images or with classes that do not train; warn of classes that aren't tested."""
        if not bool(pool.test.any()):
            if images.given.all():
                raise ConfigurationError(
                    f"{self.name} has no test images: every image is given as train; give some as test, or leave the "
                    "sides out, and a fifth is drawn"
                )
            raise ConfigurationError(f"{self.name} has no test images: it has too few that are no copies of another")
        classes = len(self.class_names)
        held, tested = (np.bincount(of, minlength=classes) for of in (images.labels, pool.labels[pool.test]))
        trained = np.bincount(pool.labels[~pool.test], minlength=classes)
        if not trained.all():
            raise ConfigurationError(
                f"{self.name} has no training images of {self._named(trained == 0)}; add some, or remove the class"
            )
        said = {"no test image": (tested == 0) & (held > 1), "a single image": held == 1}
        lacking = [f"{what} of {self._named(which)}" for what, which in said.items() if which.any()]
        if lacking:
            warnings.warn(f"{self.name}: {', and '.join(lacking)}: accuracy says nothing of them", stacklevel=3)

    def _named(self, which: NDArray[np.bool_]) -> str:
        return listed([self.class_names[label] for label in np.flatnonzero(which)])

    def _drawn(self, images: Listed, group: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Test flags of an 80/20 split of each domain, of the images whose side is not given."""
        copies = np.isin(group, group[group != np.arange(len(group))])
        test = np.zeros(len(group), dtype=bool)
        for number, domain in enumerate(self.domain_names):
            rows = np.flatnonzero(~images.given & (images.domains == number))
            if len(rows):
                labels = images.labels[rows]
                rng = numpy_generator(self.split_seed, "own images", domain)
                test[rows] = draw_test(labels, ~copies[rows] & (np.bincount(labels)[labels] > 1), rng)
        return test

    def _drawn_units(self, images: Listed, group: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The same, about a fifth of each domain and class, by whole groups."""
        test = np.zeros(len(group), dtype=bool)
        rows = np.flatnonzero(~images.given)
        strata = images.domains * len(self.class_names) + images.labels
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
        bits: of a 16-bit value that are in use; null: all.
        cache: folder of the decoded images, seen from ``root``; null: none.
    """

    def __init__(
        self,
        name: str,
        root: str,
        size: Size = 224,
        fit: Fit = "squash",
        split_seed: Seed = 0,
        bits: Bits | None = None,
        cache: str | None = BESIDE,
    ) -> None:
        super().__init__(name, root, size, fit, split_seed, bits, cache)
        self.class_names = common_classes(self.name or "", self.at, sides_in(self.at, "."))

    def listing(self) -> Listed:
        return images_in_folders(self.at, ["."], self.class_names)


class DomainFolders(OwnImages):
    """One's own images of several domains: ``<root>/<domain>/<class>/*``, as PACS or Office-Home are unpacked.

    A domain may have ``train/<class>`` and ``test/<class>`` instead of its classes. Domains and classes are named by
    their folders and come in the order of the names, 2 before 10; every domain has every class. Files and folders whose
    names begin with a dot, and files that are no images, are passed over.

    Args:
        name: of the data set, in records and reports.
        root: the data set's folder.
        size: height and width of the stored images in pixels.
        fit: ``squash`` or ``crop``.
        split_seed: seed of the split of each domain that has no folders ``train`` and ``test``.
        bits: of a 16-bit value that are in use; null: all.
        cache: folder of the decoded images, seen from ``root``; null: none.
    """

    def __init__(
        self,
        name: str,
        root: str,
        size: Size = 224,
        fit: Fit = "squash",
        split_seed: Seed = 0,
        bits: Bits | None = None,
        cache: str | None = BESIDE,
    ) -> None:
        super().__init__(name, root, size, fit, split_seed, bits, cache)
        self.domain_names = tuple(folders_in(self.at))
        check_names(self.domain_names, "domain", self.at)
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
        places = [place for domain in self.domain_names for place in sides_in(self.at, domain)]
        self.class_names = common_classes(self.name or "", self.at, places)

    def listing(self) -> Listed:
        return images_in_folders(self.at, self.domain_names, self.class_names)


class ImageIndex(OwnImages):
    """One's own images wherever they lie below a folder, listed in a CSV or Parquet file, a row an image.

    Columns are ``path`` (relative to ``root``) and ``label`` (name of the class), and where wanted ``domain``,
    ``split`` (``train`` or ``test``) and ``group``: images of one group, such as a patient's, are on one side of every
    split. Of other columns, such as ``sex``, those are read that ``data.subgroups`` names. Classes and domains come in
    the order of their names, 2 before 10; a domain may lack a class.

    Args:
        name: of the data set, in records and reports.
        root: the data set's folder.
        index: the file, seen from ``root``.
        size: height and width of the stored images in pixels.
        fit: ``squash`` or ``crop``.
        split_seed: seed of the split, where there is no column ``split``.
        bits: of a 16-bit value that are in use; null: all.
        cache: folder of the decoded images, seen from ``root``; null: none.
    """

    def __init__(
        self,
        name: str,
        root: str,
        index: str = "index.csv",
        size: Size = 224,
        fit: Fit = "squash",
        split_seed: Seed = 0,
        bits: Bits | None = None,
        cache: str | None = BESIDE,
    ) -> None:
        super().__init__(name, root, size, fit, split_seed, bits, cache)
        self.index = self.at / index
        if not self.index.is_file():
            raise ConfigurationError(
                f"{name}: there is no index {self.index}; put a CSV or Parquet file with columns path and label there, "
                "or name it as data.source.init_args.index, seen from root"
            )
        mend = f"call the image's file path and its class label (optional: {', '.join(OPTIONAL)})"
        read = read_numbered(self.index, ("path", "label"), OPTIONAL, mend)
        rows = [{k: (v or "").strip() for k, v in row.items() if k in ("path", "label", *OPTIONAL)} for _, row in read]
        for column in {"label", "domain", "group"}.intersection(*rows[:1]):
            for row, text in zip(rows, whole([row[column] for row in rows]), strict=True):
                row[column] = text
        self._check(rows, [number for number, _ in read])
        self.class_names = tuple(in_order(row["label"] for row in rows))
        self.domain_names = tuple(in_order(row.get("domain", "") for row in rows))
        for kind, names in (("class", self.class_names), ("domain", self.domain_names)):
            check_names(names, kind, self.index)
        if len(self.class_names) < 2:
            raise ConfigurationError(f"{self.index}: expected at least two classes in the column label, got one")
        domains, labels = ({name: n for n, name in enumerate(of)} for of in (self.domain_names, self.class_names))
        self.rows = sorted(rows, key=lambda row: (domains[row.get("domain", "")], labels[row["label"]], row["path"]))

    @property
    def image_columns(self) -> tuple[str, ...]:
        """Return the names of the columns that say more of an image than where it is, and which class and side."""
        return tuple(name for name in columns_of(self.index) if name not in ("path", "label", "split", "group"))

    def image_column(self, name: str) -> list[str]:
        """Return the values of such a column, of whole numbers without ``.0``.

        Raises:
            ConfigurationError: the index has the column twice, or other images than when it was first read.
        """
        assert self._in_pool is not None, "load() comes first"
        read = read_table(self.index, ("path",), (name,))
        texts = whole([(row.get(name) or "").strip() for row in read])
        values = dict(zip((row["path"].strip() for row in read), texts, strict=True))
        files = [self.rows[number]["path"] for number in np.flatnonzero(self._in_pool)]
        if not values.keys() >= {*files}:
            raise ConfigurationError(f"{self.index} was changed while the images were read; start again")
        return [values[file] for file in files]

    def _check(self, rows: Sequence[dict[str, str]], numbers: Sequence[int]) -> None:
        """Refuse rows without images, images given twice, sides that do not exist, and groups on both sides."""
        places: dict[str, int] = {}
        sides: dict[str, str] = {}
        for number, row in zip(numbers, rows, strict=True):
            at = f"{self.index}: row {number}"
            empty = [name for name in ("path", "label", "domain", "split") if row.get(name, "given") == ""]
            if empty:
                raise ConfigurationError(f"{at} has an empty {empty[0]}; fill it in, or remove the row")
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

    def listing(self) -> Listed:
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
    known = {plain: kind.__name__ for kind in kinds if (plain := _plain(kind.__name__)) not in NAMED_BEFORE}
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
