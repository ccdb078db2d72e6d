"""Folders of the user's own images: which of them are sides of a split, which are classes, and the images in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from datamodules.folders import list_class_folders, subfolders
from datamodules.names import check_names, check_printable, in_order

SIDES = ("train", "test")
#: How other libraries call sides of a split.
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


def folders_in(at: Path) -> list[str]:
    """Names of the folders in a folder, in order, without hidden ones and those of the system."""
    found = in_order(subfolders(at))
    for name in found:
        check_printable(name, at)
    return found


def sides_in(root: Path, below: str) -> list[str]:
    """List the folders, relative to ``root``, that hold a domain's class folders.

    They are the domain's folders ``train`` and ``test``, or the domain's folder itself.

    Raises:
        ConfigurationError: there are other folders beside ``train`` and ``test``, or sides have other names.
    """
    found = folders_in(root / below)
    if set(SIDES) <= set(found):
        others = [name for name in found if name not in SIDES]
        if others:
            raise ConfigurationError(
                f"{root / below} holds {', '.join(others[:5])} beside train and test: move those images into one of "
                "the two, or take the folder away (data.val_fraction holds out images to tune on)"
            )
        return [side if below == "." else f"{below}/{side}" for side in SIDES]
    sides = [name for name in found if name.lower() in SIDE_NAMES]
    if len(sides) > 1 or (sides and sides == found):
        raise ConfigurationError(
            f"{root / below} holds {' and '.join(sides)}, which are sides of a split and no classes; sides are called "
            "train and test, and both must be there: rename the folders, or put the class folders of a single side "
            f"into {root / below} itself, and a fifth of the images is drawn for testing"
        )
    return [below]


def common_classes(name: str, root: Path, places: Sequence[str]) -> tuple[str, ...]:
    """The classes that every place has a folder of.

    Raises:
        ConfigurationError: there are none, or a place lacks a class that another has.
    """
    found = {place: folders_in(root / place) for place in places}
    classes = in_order(label for labels in found.values() for label in labels)
    check_names(classes, "class", root)
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


def images_in_folders(root: Path, domains: Sequence[str], classes: Sequence[str]) -> Listed:
    """The images of domains of which each has its folder.

    Raises:
        ConfigurationError: a class folder is empty, or holds folders, whose images would go unnoticed.
    """
    files: list[str] = []
    parts: list[tuple[NDArray[np.int64], ...]] = []
    for number, domain in enumerate(domains):
        places = sides_in(root, domain)
        for place in places:
            for label in classes:
                inner = folders_in(root / place / label)
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
