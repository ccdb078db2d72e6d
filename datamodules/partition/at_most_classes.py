"""At most so many classes at a client, with unequal shares of a class."""

from collections.abc import Sequence

import numpy as np

from benchmark.errors import ConfigurationError
from benchmark.ranges import NumClients, PositiveInt
from datamodules.partition.members import check_class_count, members_by_side
from datamodules.partition.partition import Partition
from datamodules.partition.splits import ClientSplits, Indices
from datamodules.source import ImagePool


def draw_shares(
    num_classes: int, num_clients: int, classes: int, rng: np.random.Generator
) -> list[list[tuple[int, float]]]:
    """Pairs (class, share of the class) of every client, ``classes`` pairs each. See ``AtMostClasses``.

    The shares of a class are Uniform(0.4, 0.6) draws, normalised over its ``N * classes / C`` holders.
    """
    times = num_clients * classes // num_classes
    weights = rng.uniform(0.4, 0.6, size=(num_classes, times))
    weights /= weights.sum(axis=1, keepdims=True)
    left = np.full(num_classes, times)
    shares: list[list[tuple[int, float]]] = []
    for _ in range(num_clients):
        mine = []
        for _ in range(classes):
            c = int(rng.choice(np.flatnonzero(left == left.max())))
            left[c] -= 1
            mine.append((c, float(weights[c, left[c]])))
        shares.append(mine)
    return shares


def hand_out_shares(
    members: Sequence[Indices], shares: Sequence[Sequence[tuple[int, float]]], rng: np.random.Generator
) -> list[Indices]:
    """Consecutive chunks of ``int(n_c * share)`` images of each shuffled class; what is left over is unused."""
    shuffled = [rng.permutation(images) for images in members]
    taken = [0] * len(shuffled)
    held = []
    for mine in shares:
        chunks = []
        for c, share in mine:
            size = int(len(shuffled[c]) * share)
            chunks.append(shuffled[c][taken[c] : taken[c] + size])
            taken[c] += size
        held.append(np.concatenate(chunks))
    return held


class AtMostClasses(Partition):
    """At most s classes per client, with unequal shares of a class (pFedBayesPT's setting, SGPT's algorithm).

    Every class is held ``N s / C`` times, with shares drawn from Uniform(0.4, 0.6) and normalised. Client
    after client draws s times at random one of the classes with the most holdings left; it can meet a class
    twice, hence "at most". Train and test images of a class are cut with the same shares into chunks
    of ``int(n_c share)``; the few images left over by rounding are not used.
    pFedBayesPT: CIFAR-100, 100 clients, s in 5, 10, 15, 20, 50.

    Args:
        classes: s.
        num_clients: N; ``N s`` must be a multiple of the number of classes.
    """

    paper_setting = "s={classes}"

    def __init__(self, classes: PositiveInt, num_clients: NumClients) -> None:
        self.classes = classes
        self.num_clients: int = num_clients

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Draw the shares and cut both sides by them."""
        train, test = members_by_side(pool)
        check_class_count("classes", self.classes, len(train))
        if self.num_clients * self.classes % len(train):
            raise ConfigurationError(
                f"num_clients={self.num_clients} times classes={self.classes} is not a multiple of the {len(train)} "
                "classes of the data set, so that not every class can be held equally often"
            )
        shares = draw_shares(len(train), self.num_clients, self.classes, rng)
        return ClientSplits(hand_out_shares(train, shares, rng), hand_out_shares(test, shares, rng))
