"""Who holds which images, and the rules that every partition keeps."""

from collections.abc import Sequence
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
        rows, owners = flattened(held)
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
    train = np.concatenate(splits.train)
    test = np.concatenate([*splits.test, *(indices for held in splits.others.values() for indices in held)])
    labels = pool.labels.numpy()
    sides = {"train": splits.train, "test": splits.test, **splits.others}
    for name, classes in splits.label_spaces.items():
        unknown = set(np.unique(labels[np.concatenate(sides[name])]).tolist()) - set(classes)
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


def flattened(held: Sequence[Indices]) -> tuple[Indices, Indices]:
    """Put the clients' indices one after the other; return them, and the client of each.

    Hundreds of thousands of clients are handled so in a few operations; one by one each takes microseconds.
    """
    return np.concatenate(held), np.repeat(np.arange(len(held)), [len(indices) for indices in held])


def per_client(rows: Indices, held: Sequence[Indices]) -> list[Indices]:
    """Cut what ``flattened`` has put together, or something of the same length, into the clients' parts again."""
    ends = np.cumsum([len(indices) for indices in held]).tolist()
    return [rows[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def ascending(held: Sequence[Indices]) -> list[Indices]:
    """Sort each client's indices, as int64."""
    if not held or not any(map(len, held)):
        return [np.asarray(indices, dtype=np.int64) for indices in held]
    rows, owners = flattened(held)
    return per_client(rows[np.lexsort((rows, owners))].astype(np.int64), held)


def class_counts(held: Sequence[Indices], labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """Count each client's images by class: [N, C]."""
    rows, owners = flattened(held)
    counts = np.bincount(owners * num_classes + labels[rows], minlength=len(held) * num_classes)
    return counts.reshape(len(held), num_classes)
