"""Who holds which images, and the rules that every partition keeps."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from datamodules.source import ImagePool

Indices = NDArray[np.int64]


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

    train: list[Indices]
    test: list[Indices]
    others: dict[str, list[Indices]] = field(default_factory=dict)
    label_spaces: dict[str, tuple[int, ...]] = field(default_factory=dict)


def check_splits(splits: ClientSplits, pool: ImagePool) -> None:
    """Refuse a partition that breaks a rule every partition must keep.

    Indices lie in the pool; no client holds an image twice or is without train or test images; no image and
    no group of images trains anywhere and is tested anywhere, over all clients together.

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
    for side, held in (("train", splits.train), ("test", splits.test), *splits.others.items()):
        empty = [client for client, indices in enumerate(held) if len(indices) == 0]
        if empty:
            raise ConfigurationError(
                f"{len(empty)} of {len(held)} clients have no {side} images (first: client {empty[0]}); "
                "use fewer clients, more classes per client or a less skewed partition"
            )
        for client, indices in enumerate(held):
            if indices.min() < 0 or indices.max() >= n:
                raise ConfigurationError(
                    f"client {client} has {side} index {indices.max() if indices.min() >= 0 else indices.min()}, "
                    f"the data set has images 0 to {n - 1}"
                )
            if len(np.unique(indices)) != len(indices):
                raise ConfigurationError(f"client {client} holds a {side} image more than once")
    train = np.concatenate(splits.train)
    test = np.concatenate([*splits.test, *(indices for held in splits.others.values() for indices in held)])
    labels = pool.labels.numpy()
    sides = {"train": splits.train, "test": splits.test, **splits.others}
    for name, classes in splits.label_spaces.items():
        outside = set(np.unique(labels[np.concatenate(sides[name])]).tolist()) - set(classes)
        if outside:
            raise ConfigurationError(f"split {name!r} holds images of class {min(outside)}, not in its label space")
    both = np.intersect1d(train, test)
    if len(both):
        raise ConfigurationError(f"{len(both)} images are trained on and tested on (first: image {both[0]})")
    group = pool.group.numpy()
    leaking = np.intersect1d(group[train], group[test])
    if len(leaking):
        first = np.flatnonzero(group == leaking[0])
        raise ConfigurationError(
            f"{len(leaking)} groups of images that show the same thing are on both the train and the test side "
            f"(first: images {', '.join(map(str, first[:6]))}); the data set's test flags must keep a group on one side"
        )
