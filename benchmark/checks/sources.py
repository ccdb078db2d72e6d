"""Checks that every source of images must pass, whatever it reads."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image, ImageOps

from benchmark.checks.outcome import FailedCheck, NotCheckedError, own_errors, require
from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.seeds import global_states
from datamodules.folders import SUFFIXES
from datamodules.manifest import images_sha256
from datamodules.partition import IID
from datamodules.pixels import FORMATS
from datamodules.source import ImagePool, ImageSource

#: What a folder may hold to be copied for a check.
FILES, BYTES = 5000, 2**28
CPU = torch.device("cpu")
DRAWS = "draw from benchmark.seeds, keyed by a seed of the constructor, and from nothing else"


@dataclass(frozen=True)
class SourceUnderCheck:
    """A source that can be made again and again.

    Attributes:
        kind: its class.
        arguments: of its constructor; the folder that it reads is called ``root``.
    """

    kind: type[ImageSource]
    arguments: dict[str, Any]

    @cached_property
    def source(self) -> ImageSource:
        """The source."""
        return self.make()

    @cached_property
    def pool(self) -> ImagePool:
        """Its images."""
        return loaded(self.source)

    def make(self, root: Path | None = None) -> ImageSource:
        """It, made anew, perhaps on another folder.

        Raises:
            ConfigurationError: it refuses its arguments.
            FailedCheck: it ends in another error.
        """
        with own_errors():
            return self.kind(**{**self.arguments, **({} if root is None else {"root": str(root)})})

    @property
    def folder(self) -> Path:
        """The folder that it reads.

        Raises:
            NotCheckedError: it reads none.
        """
        if self.arguments.get("root") is None:
            raise NotCheckedError("it takes no folder as its argument root")
        return user_path(self.arguments["root"])


def loaded(source: ImageSource) -> ImagePool:
    """Load a source and return its images.

    Raises:
        ConfigurationError: the source refuses its data.
        FailedCheck: ``load`` raises another error, or returns no ``ImagePool``.
    """
    with own_errors():
        pool = source.load()
    require(isinstance(pool, ImagePool), f"load gives {type(pool).__name__}; give an ImagePool")
    return pool


def require_same(found: ImagePool, expected: ImagePool, otherwise: str) -> None:
    """Require the same images in the same order, and the same of each.

    Raises:
        FailedCheck: they are not the same.
    """
    for name in ("images", "labels", "test", "domains", "group"):
        require(torch.equal(getattr(found, name), getattr(expected, name)), f"other {name}; {otherwise}")


# --------------------------------------------------------------------------------------------------- the checks


def check_load(subject: SourceUnderCheck) -> None:
    """It can be made, and loads a pool of images."""
    require(len(subject.pool.labels) > 0, "it has no images")


def check_names(subject: SourceUnderCheck) -> None:
    """Classes and domains have names before an image is read."""
    source = subject.source
    for what, names in (("class_names", source.class_names), ("domain_names", source.domain_names)):
        kept = isinstance(names, tuple) and all(isinstance(name, str) and name.isprintable() for name in names)
        require(kept, f"{what} is {names!r:.80}; give a tuple of texts, in the order of the labels")
        require(len(set(names)) == len(names) > 0, f"{what} is empty or has a name twice")
    require(len(source.class_names) > 1 and all(source.class_names), "expected two named classes at least")
    require(source.template.count("{}") == 1, f"template is {source.template!r}; give {{}} the class's place in it")
    again = subject.make()
    same = (again.class_names, again.domain_names) == (source.class_names, source.domain_names)
    require(same, "made again it has other names or another order of them; sort what comes from files and sets")


def check_images(subject: SourceUnderCheck) -> None:
    """Images are squares of the declared size in three channels, and labels lie within the names."""
    source, pool = subject.source, subject.pool
    kinds = {name: getattr(pool, name).dtype for name in ("labels", "domains", "group", "test")}
    expected = {"labels": torch.int64, "domains": torch.int64, "group": torch.int64, "test": torch.bool}
    wrong = {name: str(kind) for name, kind in kinds.items() if kind != expected[name]}
    require(not wrong, f"{wrong}; labels, domains and group are int64, test is bool")
    height, width = pool.images.shape[2:]
    declared = getattr(source, "size", height)
    require(height == width == declared, f"images are {height} x {width} pixels, its size is {declared}")
    for name, values, names in (
        ("labels", pool.labels, source.class_names),
        ("domains", pool.domains, source.domain_names),
    ):
        strange = sorted(set(values.tolist()) - set(range(len(names))))
        require(not strange, f"{name} {strange[:3]} have no name; they are places in {len(names)} names")
    side, named = ("test", pool.test) if source.test_only else ("training", ~pool.test)
    for name, here, of in (
        ("class", pool.labels[named], source.class_names),
        ("domain", pool.domains, source.domain_names),
    ):
        without = [of[at] for at in sorted(set(range(len(of))) - set(here.tolist()))]
        require(not without, f"no {side} image is of the {name} {without[:3]}; leave it out of the names")


def check_columns(subject: SourceUnderCheck) -> None:
    """Of each image every column has a text."""
    images = len(subject.pool.labels)
    for name in subject.source.image_columns:
        with own_errors():
            values = subject.source.image_column(name)
        texts = sum(isinstance(value, str) for value in values)
        otherwise = f"{texts} texts among {len(values)} values of {images} images; give a text for each, empty or not"
        require(texts == len(values) == images, f"the column {name!r} has {otherwise}")


def check_sides(subject: SourceUnderCheck) -> None:
    """Images are trained on or tested on, and what shows the same thing is on one side."""
    pool = subject.pool
    trained, tested = pool.group[~pool.test], pool.group[pool.test]
    if subject.source.test_only:
        require(not len(trained), f"{len(trained)} images train, and test_only says that all test; correct one of them")
        return
    require(len(trained) > 0 and len(tested) > 0, "it has no training images, or no test images")
    both = np.intersect1d(trained, tested).size
    require(not both, f"{both} groups are on both sides; leave out one, or say test of all of a group")
    splits = IID(2).split(pool, np.random.default_rng(0))
    for name, side, rows in (("training", splits.train, trained), ("test", splits.test, tested)):
        require(sum(map(len, side)) == len(rows), f"a partition deals not all of the {name} images")


def check_again(subject: SourceUnderCheck) -> None:
    """Loaded again it is the same, whatever was drawn before."""
    expected, again = subject.pool, subject.make()
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    torch.manual_seed(1)
    states = global_states(CPU)
    require_same(loaded(again), expected, DRAWS)
    require(global_states(CPU) == states, f"it draws from a global generator; {DRAWS}")


class Entries(list[Any]):
    """A replacement for the iterator of ``os.scandir``, with its entries in a given order."""

    def __enter__(self) -> "Entries":
        return self

    def __exit__(self, *error: object) -> None: ...

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        return self.pop(0)

    def close(self) -> None:
        """Close nothing."""


@contextmanager
def listed_in_order(backwards: bool) -> Iterator[None]:
    """Inside, folders list what they hold from A to Z, or from Z to A."""
    scandir, listdir = os.scandir, os.listdir

    def scanned(at: Any = ".") -> Entries:
        with scandir(at) as entries:
            return Entries(sorted(entries, key=lambda entry: entry.name, reverse=backwards))

    def listed(at: Any = ".") -> list[Any]:
        return sorted(listdir(at), reverse=backwards)

    with patch.object(os, "scandir", scanned), patch.object(os, "listdir", listed):
        yield


def check_order_of_files(subject: SourceUnderCheck) -> None:
    """The order of files in a folder has no say."""
    expected, names = subject.pool, (subject.source.class_names, subject.source.domain_names)
    advice = "sort what os.listdir, Path.iterdir and glob give"
    for backwards in (False, True):
        with listed_in_order(backwards):
            found = subject.make()
            require((found.class_names, found.domain_names) == names, f"names are in another order; {advice}")
            require_same(loaded(found), expected, advice)


def check_content(subject: SourceUnderCheck) -> None:
    """Another folder of the same images is the same, and with other images it has another fingerprint."""
    expected = subject.pool
    with tempfile.TemporaryDirectory() as made:
        root, images = copied(subject.folder, Path(made) / subject.folder.name)
        first = loaded(subject.make(root))
        require_same(first, expected, "names of files below root may decide, and where root lies may not")
        fingerprint = images_sha256(first)
        for path in images:
            inverted(path)
        other = images_sha256(loaded(subject.make(root)))
        require(other != fingerprint, "other images are read as those of before; key what is cached by times of change")


def copied(root: Path, to: Path) -> tuple[Path, list[Path]]:
    """A copy of a folder, less what is hidden, and the images in it.

    Raises:
        NotCheckedError: it is large, or has no images in files.
    """
    if not root.is_dir():
        raise NotCheckedError(f"{root} is no folder")
    count = size = 0
    for path in root.rglob("*"):
        count, size = count + 1, size + path.lstat().st_size
        if count > FILES or size > BYTES:
            raise NotCheckedError(f"{root} has more than {FILES} files or {BYTES // 2**20} MB to copy")
    shutil.copytree(root, to, ignore=shutil.ignore_patterns(".*"))
    images = sorted(path for path in to.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not images:
        raise NotCheckedError(f"{root} has no images in files of their own")
    return to, images


def inverted(path: Path) -> None:
    """Put the negative in an image's place."""
    with Image.open(path, formats=FORMATS) as opened:
        negative = ImageOps.invert(opened.convert("RGB"))
    negative.save(path, format="PNG")


def check_missing(subject: SourceUnderCheck) -> None:
    """Data that are not there, or damaged, are said in one line."""
    folder = subject.folder
    with tempfile.TemporaryDirectory() as made:
        require_refused(subject, Path(made) / "nothing", "images that are not there")
        root, images = copied(folder, Path(made) / folder.name)
        for path in images:
            path.write_bytes(path.read_bytes()[:20])
        require_refused(subject, root, "images that are cut off")


def require_refused(subject: SourceUnderCheck, root: Path, what: str) -> None:
    """Require one line about a folder that cannot be read, which names it.

    Raises:
        FailedCheck: there is no error, another error, more than a line, or the folder is not in it.
    """
    advice = "raise benchmark.errors.ConfigurationError with one line: which file or folder, what to do"
    try:
        loaded(subject.make(root))
    except ConfigurationError as error:
        said = str(error)
    except FailedCheck as error:
        raise FailedCheck(f"{what}: {error}; {advice}") from error
    else:
        raise FailedCheck(f"{what} are passed over without a word; {advice}")
    require("\n" not in said and str(root) in said, f"{what} are said so: {said!r:.200}; {advice}")


CHECKS = (
    check_names,
    check_images,
    check_columns,
    check_sides,
    check_again,
    check_order_of_files,
    check_content,
    check_missing,
)
