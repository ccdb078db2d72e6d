"""Groups of images of one label, which a merged partition never tears apart."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from datamodules.partition.splits import ClientSplits, Indices


@dataclass(frozen=True)
class Units:
    """The units that a merged partition hands out: the images of one group and one label, which stay together.

    Attributes:
        members: indices of the images of each unit.
        labels: int64, [u], label of each unit.
        sizes: int64, [u], images of each unit.
        train_only: bool, [u], True where the unit's group also holds other labels. Its units can end up at
            different clients, so one side is fixed for all of them: they train.
    """

    members: list[Indices]
    labels: Indices
    sizes: Indices
    train_only: NDArray[np.bool_]

    def images(self, units: Indices) -> Indices:
        """All images of these units, ascending."""
        parts = [self.members[unit] for unit in units]
        return np.sort(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64)

    def cut(self, order: Indices, ends: NDArray[np.int64]) -> list[Indices]:
        """Cut units in this order at numbers of images, rounded down to whole units. ``ends``: [N + 1]."""
        at = np.searchsorted(np.cumsum(self.sizes[order]), ends, side="right")
        return [order[a:b] for a, b in pairwise(at)]


def units_of(labels: Indices, group: Indices) -> Units:
    """The units of a pool. ``labels`` and ``group``: [n]. Where no group repeats, each image is a unit."""
    pairs, inverse, sizes = np.unique(np.stack([group, labels]), axis=1, return_inverse=True, return_counts=True)
    order = np.argsort(inverse.reshape(-1), kind="stable").astype(np.int64)
    members = np.split(order, np.cumsum(sizes)[:-1])
    _, which, labels_in_group = np.unique(pairs[0], return_inverse=True, return_counts=True)
    return Units(members, pairs[1], sizes.astype(np.int64), labels_in_group[which.reshape(-1)] > 1)


def split_units(
    units: Units, held: Sequence[Indices], test_fraction: float, rng: np.random.Generator | np.random.RandomState
) -> ClientSplits:
    """Split each client's units at random into train and test, not stratified.

    Of n images ``floor((1 - test_fraction) n)`` train, more where a whole unit does not fit into the test
    side. ``held``: unit numbers of each client. Units of groups with several labels train, with a warning.

    Raises:
        ConfigurationError: such units leave a client without test images.
    """
    mixed, images = int(units.sizes[units.train_only].sum()), int(units.sizes.sum())
    said = f"{mixed} of {images} images are of groups with images of several classes, which are spread over clients"
    train, test = [], []
    for mine in held:
        n = int(units.sizes[mine].sum())
        n_test = n - int(np.floor((1 - test_fraction) * n + 1e-9))
        free = rng.permutation(mine[~units.train_only[mine]])
        tested = free[: np.searchsorted(np.cumsum(units.sizes[free]), n_test, side="right")]
        test.append(units.images(tested))
        train.append(units.images(np.setdiff1d(mine, tested)))
    untested = [client for client, mine in enumerate(held) if not len(test[client]) and units.train_only[mine].any()]
    if untested:
        raise ConfigurationError(
            f"{len(untested)} of {len(held)} clients have no test images (first: client {untested[0]}): {said}, and so "
            "train only; take datamodules.partition.DirichletShared, which tests on the data set's own test images, or "
            "give the images of each class a group of their own"
        )
    if mixed:
        warnings.warn(f"{said}: all of these train, and none is tested", stacklevel=3)
    return ClientSplits(train, test)
