"""The class-by-class train-test split of sources, and the groups of images that stay together in it.

scikit-learn's stratified splits are not used. They round shares by another draw, cannot exclude images from it, and may
change with its version, which would give old runs other test images.
"""

import hashlib
import warnings
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from benchmark.seeds import numpy_generator


def draw_test(labels: NDArray[np.int64], free: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw a fifth of the images for testing, rounded up, every class in proportion (largest remainders).

    Args:
        labels: [n].
        free: [n], True where the image may be a test image.
        rng: where the draw comes from.

    Returns:
        bool, [n], True for test images. Fewer than a fifth only where too few images are free.
    """
    return draw_in_proportion(labels, len(labels) - 4 * len(labels) // 5, rng, free)


def draw_in_proportion(
    labels: NDArray[np.int64], size: int, rng: np.random.Generator, free: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_]:
    """Draw ``size`` of n images, every class in proportion (largest remainders).

    Args:
        labels: [n].
        size: at most n.
        rng: where the draw comes from.
        free: [n], True where the image may be drawn; by default all may.

    Returns:
        bool, [n]. Fewer than ``size`` only where too few of a class are free.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    # A class's share is n_c * size / n; whole numbers keep ties equal on every machine.
    quota, remainder = np.divmod(sizes * size, len(labels))
    quota[np.argsort(-remainder, kind="stable")[: size - quota.sum()]] += 1
    drawn = np.zeros(len(labels), dtype=bool)
    for label, number in zip(classes, quota, strict=True):
        of_class = labels == label if free is None else (labels == label) & free
        drawn[rng.permutation(np.flatnonzero(of_class))[:number]] = True
    return drawn


def draw_units(strata: NDArray[np.int64], units: NDArray[np.int64], seed: int, name: str) -> NDArray[np.bool_]:
    """Draw about a fifth of the images for testing by whole units, each stratum by itself.

    Of a stratum's units in a drawn order those that bring the number nearest to a fifth of its images: at least one,
    and not all; of a single unit none.

    Args:
        strata: [n], such as the class of each image; a unit counts to that of its first image.
        units: [n], images of equal value stay together.
        seed: seed of the draw.
        name: what is drawn, part of the key.

    Returns:
        bool, [n], True for test images.
    """
    _, first, inverse, sizes = np.unique(units, return_index=True, return_inverse=True, return_counts=True)
    test = np.zeros(len(first), dtype=bool)
    for stratum in np.unique(strata[first]):
        mine = numpy_generator(seed, name, int(stratum)).permutation(np.flatnonzero(strata[first] == stratum))
        away = np.abs(5 * np.cumsum(sizes[mine]) - sizes[mine].sum())[:-1]
        if len(away):
            test[mine[: int(away.argmin()) + 1]] = True
    return test[inverse.reshape(-1)]


def equal_images(images: Iterable[NDArray[np.uint8]]) -> NDArray[np.int64]:
    """Groups of images with the same pixels, by their first image: [n]."""
    seen: dict[bytes, int] = {}
    first = (seen.setdefault(hashlib.blake2b(image.tobytes()).digest(), row) for row, image in enumerate(images))
    return np.fromiter(first, np.int64)


def equal_across(images: NDArray[np.uint8], sets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Groups of images with the same pixels that are in several sets, by their first image; others are alone: [n].

    Args:
        images: [n, 3, H, W].
        sets: of each image, [n].
    """
    alone = np.arange(len(images))
    # Most images differ in their middle rows: those that share it with one of another set are compared as a whole.
    likely = np.flatnonzero(_in_several(equal_images(images[:, :, images.shape[2] // 2]), sets))
    copies = alone.copy()
    copies[likely] = likely[equal_images(images[row] for row in likely)]
    return np.where(_in_several(copies, sets), copies, alone)


def _in_several(group: NDArray[np.int64], sets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which images are of a group that several sets have; a group is called by one of its images."""
    least, most = sets.copy(), sets.copy()
    np.minimum.at(least, group, sets)
    np.maximum.at(most, group, sets)
    return (least != most)[group]


def known_among(images: NDArray[np.uint8], others: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which images have the pixels of one of the others: [n]. Both: [..., 3, H, W]."""
    middle = images.shape[2] // 2
    rows = {image[:, middle].tobytes() for image in images}
    known = {other.tobytes() for other in others if other[:, middle].tobytes() in rows}
    return np.fromiter((image.tobytes() in known for image in images), bool)


def united(units: NDArray[np.int64], copies: NDArray[np.int64]) -> NDArray[np.int64]:
    """Groups of images of one unit, such as a lesion, or whose units share a byte-identical file. All arrays: [n]."""
    group = units.copy()
    values, counts = np.unique(copies, return_counts=True)
    for value in values[counts > 1]:
        together = np.unique(group[copies == value])
        group[np.isin(group, together)] = together[0]
    return group


def warn_of_leaks(
    title: str,
    unit: str,
    units: NDArray[np.int64],
    sites: NDArray[np.int64],
    test: NDArray[np.bool_],
    site_names: tuple[str, ...],
) -> None:
    """Say how many test images of each site show a unit that also trains at that site.

    Args:
        title: of the data set, which has an argument ``split`` that takes the unit's name.
        unit: what images share, such as a lesion or a patient.
        units: [n], like what follows.
        sites: of each image.
        test: whether it is a test image.
        site_names: of all sites.
    """
    said = []
    for site, name in enumerate(site_names):
        tested = units[(sites == site) & test]
        leaking = int(np.isin(tested, units[(sites == site) & ~test]).sum())
        if leaking:
            said.append(f"{leaking} of {len(tested)} at site {name}")
    if said:
        warnings.warn(
            f"{title} is split by image: test images that show a {unit} which also trains: {', '.join(said)}; "
            f"split={unit} keeps each {unit} on one side",
            stacklevel=3,
        )
