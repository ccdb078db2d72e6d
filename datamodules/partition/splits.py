"""The images of every client, and the rules that every partition keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmark.errors import ConfigurationError
from datamodules.partition.client_rows import ClientRows, Indices
from datamodules.source import ImagePool

LabelSpace = tuple[int, ...] | list[tuple[int, ...]]


@dataclass(frozen=True)
class ClientSplits:
    """The images of every client: ascending int64 indices into the pool, one array per client.

    Attributes:
        train: what client ``k`` trains on.
        test: what client ``k`` is tested on: its own test images.
        others: further test sets by split name, such as ``base`` and ``novel``; clients may share their images.
        label_spaces: by split name (``train`` and ``test`` too) the classes that are told apart there, in the order in
            which labels are counted: one tuple for all clients, or a list of one for each client, which is empty where
            it holds no images. A split that is not named has all classes.
        testers: so many of the last clients hold images of ``others`` alone. They are scored with the server's values.
            What is scored once for the whole federation, such as a data set that nobody trains on, is theirs; then no
            other client holds images of that split.
    """

    train: Sequence[Indices]
    test: Sequence[Indices]
    others: Mapping[str, Sequence[Indices]] = field(default_factory=dict)
    label_spaces: Mapping[str, LabelSpace] = field(default_factory=dict)
    testers: int = 0

    def spaces(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Return the label spaces, and per split with one for each client their numbers, as ``Terms`` have them."""
        shared: dict[str, tuple[int, ...]] = {}
        own: dict[str, tuple[int, ...]] = {}
        for split, space in self.label_spaces.items():
            if isinstance(space, tuple):
                shared[split] = space
            else:
                numbers = {classes: number for number, classes in enumerate(dict.fromkeys(filter(None, space)))}
                shared |= {f"{split}/{number}": classes for classes, number in numbers.items()}
                own[split] = tuple(numbers.get(classes, -1) for classes in space)
        return shared, own


def check_splits(splits: ClientSplits, pool: ImagePool, remedy: str = "give every client some") -> None:
    """Refuse a partition that breaks a rule every partition must keep.

    Indices lie in the pool; no client holds an image twice or is without train or test images, nor a tester with such
    or without others; no image and no group of images trains anywhere and is tested anywhere, over all clients
    together.

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
    _check_testers(splits, sides)
    trained = len(splits.train) - splits.testers
    for side, held in sides.items():
        empty = np.flatnonzero(held.sizes[:trained] == 0)
        if len(empty) and not held.sizes[trained:].any():
            raise ConfigurationError(
                f"{len(empty)} of {trained} clients have no {side} images (first: client {empty[0]}); {remedy}"
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
    for name, space in splits.label_spaces.items():
        if isinstance(space, list) and len(space) != len(splits.train):
            raise ConfigurationError(
                f"split {name!r} has {len(space)} label spaces for {len(splits.train)} clients; give one to each, or "
                "one tuple for all"
            )
        whole = [(space, sides[name].rows)] if isinstance(space, tuple) else zip(space, sides[name], strict=True)
        for classes, rows in whole:
            unknown = set(np.unique(labels[rows]).tolist()) - set(classes)
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


def _check_testers(splits: ClientSplits, sides: Mapping[str, ClientRows]) -> None:
    """Refuse testers that hold images of their own, or none, and splits that are theirs and others' too."""
    trained = len(splits.train) - splits.testers
    if not splits.testers:
        return
    if trained < 1:
        raise ConfigurationError(f"a partition has {splits.testers} testers and no client that trains; give it one")
    further = np.zeros(splits.testers, dtype=np.int64)
    for side, held in sides.items():
        others, theirs = held.sizes[:trained], held.sizes[trained:]
        if side in ("train", "test"):
            if theirs.any():
                raise ConfigurationError(f"a tester has {side} images; it holds images of further splits alone")
        elif theirs.any() and others.any():
            raise ConfigurationError(f"split {side!r} is a tester's and another client's; give each a split of its own")
        else:
            further += theirs
    if not further.all():
        raise ConfigurationError("a tester has no images; give it some of a further split, or leave it out")


def _on_both_sides(train: Indices, test: Indices, count: int) -> Indices:
    """Return the numbers below ``count`` that are in both, ascending."""
    sides = np.zeros((2, count), dtype=bool)
    sides[0, train] = True
    sides[1, test] = True
    return np.flatnonzero(sides.all(0))
