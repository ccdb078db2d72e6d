"""Who holds which images, and the rules that every partition keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmark.errors import ConfigurationError
from datamodules.partition.client_rows import ClientRows, Indices
from datamodules.source import ImagePool


@dataclass(frozen=True)
class ClientSplits:
    """The images of every client: ascending int64 indices into the pool, one array per client.

    Attributes:
        train: what client ``k`` trains on.
        test: what client ``k`` is tested on: its own test images.
        others: further test sets by split name, such as ``base`` and ``novel``; clients may share their images.
        label_spaces: by split name (``train`` and ``test`` too) the classes that are told apart there, in the order in
            which labels are counted; a split that is not named has all classes.
    """

    train: Sequence[Indices]
    test: Sequence[Indices]
    others: Mapping[str, Sequence[Indices]] = field(default_factory=dict)
    label_spaces: dict[str, tuple[int, ...]] = field(default_factory=dict)


def check_splits(splits: ClientSplits, pool: ImagePool, remedy: str = "give every client some") -> None:
    """Refuse a partition that breaks a rule every partition must keep.

    Indices lie in the pool; no client holds an image twice or is without train or test images; no image and
    no group of images trains anywhere and is tested anywhere, over all clients together.

    Args:
        splits: the partition.
        pool: what it divides.
        remedy: of clients without images, for the message.

    Raises:
        ConfigurationError: what is broken, and at which client or image.
    """
    n = len(pool.labels)
    if len(splits.train) != len(splits.test) or not splits.train:
        raise ConfigurationError(
            f"a partition needs train and test images of the same clients, got {len(splits.train)} train lists "
            f"and {len(splits.test)} test lists"
        )
    for name, others in splits.others.items():
        if len(others) != len(splits.train):
            raise ConfigurationError(
                f"split {name!r} has {len(others)} lists of images for {len(splits.train)} clients"
            )
    held_by_side = {"train": splits.train, "test": splits.test, **splits.others}
    sides = {side: ClientRows.of(held) for side, held in held_by_side.items()}
    for side, held in sides.items():
        empty = np.flatnonzero(held.sizes == 0)
        if len(empty):
            raise ConfigurationError(
                f"{len(empty)} of {len(held)} clients have no {side} images (first: client {empty[0]}); {remedy}"
            )
        rows, owners = held.rows, held.owners
        outside = np.flatnonzero((rows < 0) | (rows >= n))
        if len(outside):
            of = held[owners[outside[0]]]
            raise ConfigurationError(
                f"client {owners[outside[0]]} has {side} index {of.max() if of.min() >= 0 else of.min()}, "
                f"the data set has images 0 to {n - 1}"
            )
        keys = np.sort(owners * n + rows)
        twice = np.flatnonzero(keys[1:] == keys[:-1])
        if len(twice):
            raise ConfigurationError(f"client {keys[twice[0]] // n} holds a {side} image more than once")
    train = sides["train"].rows
    test = np.concatenate([held.rows for side, held in sides.items() if side != "train"])
    labels = pool.labels.numpy()
    for name, classes in splits.label_spaces.items():
        unknown = set(np.unique(labels[sides[name].rows]).tolist()) - set(classes)
        if unknown:
            raise ConfigurationError(f"split {name!r} holds images of class {min(unknown)}, not in its label space")
    both = _on_both_sides(train, test, n)
    if len(both):
        raise ConfigurationError(f"{len(both)} images are trained on and tested on (first: image {both[0]})")
    groups, group = np.unique(pool.group.numpy(), return_inverse=True)
    leaking = _on_both_sides(group[train], group[test], len(groups))
    if len(leaking):
        first = np.flatnonzero(group == leaking[0])
        raise ConfigurationError(
            f"{len(leaking)} groups of images that show the same thing are on both the train and the test side "
            f"(first: images {', '.join(map(str, first[:6]))}); the data set's test flags must keep a group on one side"
        )


def _on_both_sides(train: Indices, test: Indices, count: int) -> Indices:
    """Return the numbers below ``count`` that are in both, ascending."""
    sides = np.zeros((2, count), dtype=bool)
    sides[0, train] = True
    sides[1, test] = True
    return np.flatnonzero(sides.all(0))
