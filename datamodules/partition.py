"""Which client holds which images.

The functions are pure: labels and a generator in, one index array per client out. The classes carry
their arguments from a config and apply the functions to a pool of images. What the published code
does beyond its paper is said at each one.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.ranges import Checked, Concentration, InsideUnit, NumClients, PositiveInt
from datamodules.source import ImagePool, ImageSource

Indices = NDArray[np.int64]

DRAWS_AT_ONCE = 64
#: Cuts that draws made at once may have: with many clients and classes fewer draws are made at once.
CUTS_AT_ONCE = 2**24
#: A Dirichlet draw that succeeds with a probability below exp(-14), in all its retries together, is given up.
HOPELESS = 14


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


# Pure functions ---------------------------------------------------------------------------------------


def members_by_class(labels: Indices, within: NDArray[np.bool_] | None = None) -> list[Indices]:
    """Indices of each class that occurs in ``labels``, by ascending class; only those where ``within`` is True."""
    kept = np.ones(len(labels), dtype=bool) if within is None else within
    return [np.flatnonzero((labels == c) & kept) for c in np.unique(labels)]


def deal_stratified(members: Sequence[Indices], num_clients: int, rng: np.random.Generator) -> list[Indices]:
    """Deal every class's shuffled images round and round over the clients.

    Client sizes differ by at most one image, and so does what two clients hold of a class.
    """
    dealt = np.concatenate([rng.permutation(images) for images in members])
    return [dealt[client::num_clients] for client in range(num_clients)]


def dirichlet_cuts(
    class_sizes: NDArray[np.int64],
    num_clients: int,
    alpha: float,
    min_size: int,
    max_retries: int,
    rng: np.random.Generator,
) -> Iterator[NDArray[np.int64]]:
    """Draws of capped Dirichlet proportions that give every client enough images.

    For each class one ``p ~ Dir(alpha 1_N)``; clients that already hold the mean number of images of
    side 0 get nothing more; the rest is normalised and every side of the class is cut at
    ``floor(cumsum(p) * n_c)``. Sizes follow from the cuts alone, so a draw that fails costs no indices.

    Args:
        class_sizes: [S, C], images of each class on each side (side 0 = train, or everything merged).
        num_clients: N.
        alpha: concentration.
        min_size: images that every client must have on every side.
        max_retries: how often to draw in all.
        rng: where the draws come from.

    Yields:
        Cuts, [S, C, N + 1], rising from 0 to ``class_sizes``: client k takes ``cuts[s, c, k:k + 2]``.

    Raises:
        ConfigurationError: ``max_retries`` draws are used up, or so many clients got too few images in the first of
            them that no draw will do.
    """
    sides, num_classes = class_sizes.shape
    mean = class_sizes[0].sum() / num_clients
    advice = "raise alpha, use fewer clients or lower min_size"
    if class_sizes.sum(axis=1).min() < min_size * num_clients:
        raise ConfigurationError(
            f"{num_clients} clients with at least min_size={min_size} images each need {min_size * num_clients} "
            f"images, the data set has {class_sizes.sum(axis=1).min()}; use fewer clients or lower min_size"
        )
    best = short = 0
    at_once = max(1, min(DRAWS_AT_ONCE, CUTS_AT_ONCE // (sides * num_classes * (num_clients + 1))))
    for start in range(0, max_retries, at_once):
        draws = min(at_once, max_retries - start)
        cuts = np.zeros((draws, sides, num_classes, num_clients + 1), dtype=np.int64)
        sizes = np.zeros((draws, sides, num_clients), dtype=np.int64)
        possible = np.ones(draws, dtype=bool)
        for c in range(num_classes):
            p = rng.dirichlet(np.full(num_clients, alpha), size=draws) * (sizes[:, 0] < mean)
            total = p.sum(axis=1, keepdims=True)
            # With a small alpha all of a class's mass can fall on clients that are full: no such draw counts.
            possible &= total[:, 0] > 0
            ends = np.cumsum(np.divide(p, total, out=np.zeros_like(p), where=total > 0), axis=1)
            for side in range(sides):
                size = class_sizes[side, c]
                cuts[:, side, c, 1:] = np.minimum(np.floor(ends * size), size)
                cuts[:, side, c, -1] = size
                sizes[:, side] += np.diff(cuts[:, side, c], axis=1)
        smallest = np.where(possible, sizes.min(axis=(1, 2)), 0)
        best = max(best, int(smallest.max()))
        for draw in np.flatnonzero(possible & (smallest >= min_size)):
            yield cuts[draw]
        short += int((sizes < min_size).any(axis=1).sum())
        # Of m clients that get too few on average none does with a probability of at most exp(-m), as what one client
        # gets is taken from the others. Four standard errors below the average of the draws so far:
        average = short / (start + draws)
        if average - 4 * np.sqrt(average / (start + draws)) > HOPELESS + np.log(max_retries):
            raise ConfigurationError(
                f"no Dirichlet draw with alpha={alpha:g} will give all {num_clients} clients min_size={min_size} "
                f"images: in {start + draws} draws {average:.0f} clients got fewer on average; {advice}"
            )
    raise ConfigurationError(
        f"no Dirichlet draw with alpha={alpha:g} in {max_retries} gave all {num_clients} clients min_size={min_size} "
        f"images: the smallest client got at most {best}; {advice}, or raise max_retries"
    )


@dataclass(frozen=True)
class Units:
    """What a merged partition hands out: the images of one group and one label, never torn apart.

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


def split_units(units: Units, held: Sequence[Indices], test_fraction: float, rng: np.random.Generator) -> ClientSplits:
    """Split each client's units at random into train and test, not stratified.

    Of n images ``floor((1 - test_fraction) n)`` train, more where a whole unit does not fit into the test
    side. ``held``: unit numbers of each client.
    """
    train, test = [], []
    for mine in held:
        n = int(units.sizes[mine].sum())
        n_test = n - int(np.floor((1 - test_fraction) * n + 1e-9))
        free = rng.permutation(mine[~units.train_only[mine]])
        tested = free[: np.searchsorted(np.cumsum(units.sizes[free]), n_test, side="right")]
        test.append(units.images(tested))
        train.append(units.images(np.setdiff1d(mine, tested)))
    return ClientSplits(train, test)


def dirichlet_merged(
    labels: Indices,
    group: Indices,
    num_clients: int,
    alpha: float,
    min_size: int,
    test_fraction: float,
    max_retries: int,
    rng: np.random.Generator,
) -> ClientSplits:
    """Capped Dirichlet over all images, then a random split of each client. See ``DirichletMerged``."""
    units = units_of(labels, group)
    members = members_by_class(units.labels)
    class_sizes = np.array([[units.sizes[mine].sum() for mine in members]])
    for cuts in dirichlet_cuts(class_sizes, num_clients, alpha, min_size, max_retries, rng):
        parts = [units.cut(rng.permutation(mine), ends) for mine, ends in zip(members, cuts[0], strict=True)]
        held = [np.concatenate(mine) for mine in zip(*parts, strict=True)]
        # Cuts are rounded to whole units, so a client can come out smaller than its cut where groups are large.
        if min(units.sizes[mine].sum() for mine in held) >= min_size:
            return split_units(units, held, test_fraction, rng)
    raise AssertionError("dirichlet_cuts ends by raising")


def dirichlet_shared(
    labels: Indices,
    test: NDArray[np.bool_],
    num_clients: int,
    alpha: float,
    min_size: int,
    max_retries: int,
    rng: np.random.Generator,
) -> ClientSplits:
    """One capped Dirichlet draw per class cuts its train and its test images. See ``DirichletShared``."""
    sides = [members_by_class(labels, ~test), members_by_class(labels, test)]
    class_sizes = np.array([[len(mine) for mine in side] for side in sides])
    cuts = next(dirichlet_cuts(class_sizes, num_clients, alpha, min_size, max_retries, rng))
    held = []
    for side, ends in zip(sides, cuts, strict=True):
        parts = [np.split(rng.permutation(mine), at[1:-1]) for mine, at in zip(side, ends, strict=True)]
        held.append([np.concatenate(mine) for mine in zip(*parts, strict=True)])
    return ClientSplits(held[0], held[1])


def pathological_pfllib(
    units: Units, num_clients: int, classes_per_client: int, min_size: int, rng: np.random.Generator
) -> list[Indices]:
    """The units of each client in PFLlib's pathological form. See ``PathologicalPFLlib``.

    Raises:
        ConfigurationError: a class has too few images for its clients.
    """
    by_class = members_by_class(units.labels)
    takers = num_clients * classes_per_client // len(by_class)
    if takers == 0:
        raise ConfigurationError(
            f"{num_clients} clients with {classes_per_client} classes each cannot hold all {len(by_class)} classes; "
            "use more clients or more classes per client"
        )
    wanted = np.full(num_clients, classes_per_client)
    held: list[list[Indices]] = [[] for _ in range(num_clients)]
    for members in by_class:
        clients = np.flatnonzero(wanted > 0)[:takers]
        n = int(units.sizes[members].sum())
        low, high = int(max(n / len(clients) / 10, min_size / len(by_class))), n // len(clients)
        if low >= high and len(clients) > 1:
            raise ConfigurationError(
                f"class {units.labels[members[0]]} has {n} images, too few for {len(clients)} clients "
                f"(num_clients={num_clients}, classes_per_client={classes_per_client}); use fewer clients"
            )
        sizes = rng.integers(low, high, size=len(clients) - 1)
        parts = units.cut(rng.permutation(members), np.concatenate([[0], np.cumsum(sizes), [n]]))
        for client, part in zip(clients, parts, strict=True):
            held[client].append(part)
        wanted[clients] -= 1
    return [np.concatenate(mine) if mine else np.zeros(0, dtype=np.int64) for mine in held]


def pathological_split(
    labels: Indices, group: Indices, num_clients: int, classes_per_client: int, rng: np.random.Generator
) -> ClientSplits:
    """PFLlib's pathological form with pFedPT's constants: at least 8 images per client, 75 % of them train."""
    units = units_of(labels, group)
    return split_units(units, pathological_pfllib(units, num_clients, classes_per_client, 8, rng), 0.25, rng)


def draw_class_sets(
    num_classes: int, num_clients: int, classes_per_client: int, max_retries: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Each client draws its classes without replacement, until every class has a holder.

    Returns:
        bool, [N, C], True where the client holds the class.

    Raises:
        ConfigurationError: no draw of ``max_retries`` gave every class a holder.
    """
    if num_clients * classes_per_client < num_classes:
        raise ConfigurationError(
            f"{num_clients} clients with {classes_per_client} classes each cannot hold all {num_classes} classes; "
            "use more clients or more classes per client"
        )
    for start in range(0, max_retries, DRAWS_AT_ONCE):
        draws = min(DRAWS_AT_ONCE, max_retries - start)
        ranks = rng.random((draws, num_clients, num_classes)).argsort(axis=2).argsort(axis=2)
        holds = ranks < classes_per_client
        covered = np.flatnonzero(np.all(np.any(holds, axis=1), axis=1))
        if len(covered):
            return holds[covered[0]]
    raise ConfigurationError(
        f"no draw of {max_retries} gave each of {num_classes} classes a holder among {num_clients} clients with "
        f"{classes_per_client} classes each; use more clients, more classes per client, or DisjointClasses"
    )


def share_evenly(members: Sequence[Indices], holds: NDArray[np.bool_], rng: np.random.Generator) -> list[Indices]:
    """Shuffle each class's images and split them evenly among its holders. ``holds``: [N, C]."""
    held: list[list[Indices]] = [[np.zeros(0, dtype=np.int64)] for _ in holds]
    for images, column in zip(members, holds.T, strict=True):
        holders = np.flatnonzero(column)
        for client, part in zip(holders, np.array_split(rng.permutation(images), len(holders)), strict=True):
            held[client].append(part)
    return [np.concatenate(mine) for mine in held]


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


# Partitions -------------------------------------------------------------------------------------------


class Partition(Checked):
    """How a pool of images is divided over clients. Subclasses take their arguments and define ``assign``.

    Attributes:
        num_clients: N; None where the data decide it (one client per domain, one per group of classes).
    """

    num_clients: int | None = None

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Indices of every client, in any order. Called by ``split``, which checks them."""
        raise NotImplementedError

    def split(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Divide the pool. The result depends on the pool and the generator's state alone.

        Raises:
            ConfigurationError: the arguments do not fit the data, or the outcome breaks a rule of
                ``check_splits``.
        """
        images = len(pool.labels)
        if self.num_clients is not None and self.num_clients > images:
            raise ConfigurationError(f"num_clients={self.num_clients} is more than the {images} images of the data set")
        splits = self.assign(pool, rng)
        splits = ClientSplits(
            [np.sort(indices).astype(np.int64) for indices in splits.train],
            [np.sort(indices).astype(np.int64) for indices in splits.test],
            {name: [np.sort(indices).astype(np.int64) for indices in held] for name, held in splits.others.items()},
            splits.label_spaces,
        )
        check_splits(splits, pool)
        return splits

    def client_names(self, source: ImageSource) -> list[str]:
        """Names of the clients, in order; known before any image is read.

        Raises:
            ConfigurationError: the arguments do not fit the data set's classes.
        """
        if self.num_clients is None:
            return list(source.domain_names)
        return [f"client {client}" for client in range(self.num_clients)]

    @property
    def description(self) -> str:
        """Name and arguments, for records."""
        given = ", ".join(f"{name}={value}" for name, value in self.arguments().items())
        return f"{type(self).__name__}({given})"

    def arguments(self) -> dict[str, int | float | str | None]:
        """The constructor's arguments by name, for the manifest."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}


class IID(Partition):
    """Every client gets the same share of every class, of the train set and of the test set.

    The official train and test sets stay apart.
    """

    def __init__(self, num_clients: NumClients) -> None:
        self.num_clients: int = num_clients

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Deal the train images, then the test images."""
        train, test = members_by_side(pool)
        return ClientSplits(deal_stratified(train, self.num_clients, rng), deal_stratified(test, self.num_clients, rng))


class DirichletMerged(Partition):
    """PFLlib's and pFedPT's Dirichlet form: train and test merged, then each client split at random.

    For every class p ~ Dir(alpha) over clients, where clients that already hold the mean number of images
    get nothing more; drawn again until every client holds ``min_size``. Then every client's own images are
    split into train and test, not stratified: they share proportions only in expectation.
    pFedPT: alpha 0.3, 50 clients, min_size 8. Images of one group go to one client and one side.

    Args:
        alpha: concentration; smaller is more skewed.
        num_clients: N.
        min_size: images, train and test together, that every client must hold.
        test_fraction: share of a client's images that it is tested on.
        max_retries: draws before giving up.
    """

    def __init__(
        self,
        alpha: Concentration,
        num_clients: NumClients,
        min_size: PositiveInt = 8,
        test_fraction: InsideUnit = 0.25,
        max_retries: PositiveInt = 10_000,
    ) -> None:
        self.alpha = alpha
        self.num_clients: int = num_clients
        self.min_size = min_size
        self.test_fraction = test_fraction
        self.max_retries = max_retries

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Draw the clients' images, then their sides."""
        return dirichlet_merged(
            pool.labels.numpy(),
            pool.group.numpy(),
            self.num_clients,
            self.alpha,
            self.min_size,
            self.test_fraction,
            self.max_retries,
            rng,
        )


class DirichletShared(Partition):
    """Dirichlet with the same proportions for train and test (pFedPG, FedPGP, FedOTP).

    As ``DirichletMerged``, but the official train and test sets stay apart, the cap counts train images,
    one draw per class cuts both, and every client needs ``min_size`` images on both sides.
    pFedPG: alpha 0.1, 10 clients. FedPGP: alpha 0.3, 100 clients.

    Args:
        alpha: concentration; smaller is more skewed.
        num_clients: N.
        min_size: train images and test images that every client must hold.
        max_retries: draws before giving up.
    """

    def __init__(
        self,
        alpha: Concentration,
        num_clients: NumClients,
        min_size: PositiveInt = 10,
        max_retries: PositiveInt = 10_000,
    ) -> None:
        self.alpha = alpha
        self.num_clients: int = num_clients
        self.min_size = min_size
        self.max_retries = max_retries

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Draw the proportions and cut both sides by them."""
        return dirichlet_shared(
            pool.labels.numpy(),
            pool.test.numpy(),
            self.num_clients,
            self.alpha,
            self.min_size,
            self.max_retries,
            rng,
        )


class DisjointClasses(Partition):
    """Clients share no class (pFedPG's disjoint label space, after ViT-FL).

    Classes are shuffled and cut into consecutive groups; a client gets all train and all test images of
    its group. CIFAR-10 with 2 classes per client has 5 clients, CIFAR-100 with 10 has 10.

    Args:
        classes_per_client: size of a group; must divide the number of classes.
        num_clients: number of groups; None takes what follows from the data, a number is checked.
    """

    def __init__(self, classes_per_client: PositiveInt, num_clients: NumClients | None = None) -> None:
        self.classes_per_client = classes_per_client
        self.num_clients = num_clients

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Shuffle the classes and group them."""
        labels = pool.labels.numpy()
        classes = np.unique(labels)
        self._count(len(classes))
        groups = rng.permutation(classes).reshape(-1, self.classes_per_client)
        test = pool.test.numpy()
        mine = [np.isin(labels, group) for group in groups]
        return ClientSplits([np.flatnonzero(m & ~test) for m in mine], [np.flatnonzero(m & test) for m in mine])

    def client_names(self, source: ImageSource) -> list[str]:
        """One client per group of classes."""
        return [f"client {client}" for client in range(self._count(len(source.class_names)))]

    def _count(self, classes: int) -> int:
        check_class_count("classes_per_client", self.classes_per_client, classes)
        clients, rest = divmod(classes, self.classes_per_client)
        if rest:
            raise ConfigurationError(
                f"classes_per_client={self.classes_per_client} does not divide the {classes} classes of the data set; "
                "disjoint groups must be of one size"
            )
        if self.num_clients not in (None, clients):
            raise ConfigurationError(
                f"num_clients={self.num_clients}, but {classes} classes in groups of {self.classes_per_client} make "
                f"{clients} clients; leave num_clients out or set it to {clients}"
            )
        return clients


class PathologicalPFLlib(Partition):
    """PFLlib's pathological form as published: not random, and very uneven.

    Train and test are merged. For class 0, 1, ...: of the clients that still need classes the first
    floor(N * classes_per_client / C) in index order take it; all but the last of these get between a tenth and
    the whole of an even share, drawn uniformly, the last one gets the rest. Then every client's images are split
    75/25 at random. With 50 clients and 5 of 10 classes, clients 0-24 all hold classes 0-4, clients 25-49 the
    others, and clients 24 and 49 together about half of all images. Use ``PathologicalRandom`` for what the
    papers' text describes. The published code takes a class's images in stored order, which is random in the
    official files; here they are shuffled, so that the order of files on disk does not matter.

    Args:
        classes_per_client: classes of each client (pFedPT: 5 of 10, 50 of 100).
        num_clients: N (pFedPT: 50).
    """

    def __init__(self, classes_per_client: PositiveInt, num_clients: NumClients) -> None:
        self.classes_per_client = classes_per_client
        self.num_clients: int = num_clients

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Hand out the classes in order, then split every client."""
        labels = pool.labels.numpy()
        check_class_count("classes_per_client", self.classes_per_client, len(np.unique(labels)))
        return pathological_split(labels, pool.group.numpy(), self.num_clients, self.classes_per_client, rng)


class IIDPFLlib(Partition):
    """What PFLlib's code makes of "iid": ``PathologicalPFLlib`` with every class at every client.

    Every client holds all classes, but the last client holds about half of all images.

    Args:
        num_clients: N.
    """

    def __init__(self, num_clients: NumClients) -> None:
        self.num_clients: int = num_clients

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Hand out every class to every client, then split every client."""
        labels = pool.labels.numpy()
        return pathological_split(labels, pool.group.numpy(), self.num_clients, len(np.unique(labels)), rng)


class PathologicalRandom(Partition):
    """The pathological form as the papers' text has it: each client draws its classes at random.

    Drawn without replacement, until every class has a holder; a class's train images and its test images
    are split evenly among its holders. The official train and test sets stay apart.

    Args:
        classes_per_client: classes of each client.
        num_clients: N.
    """

    def __init__(self, classes_per_client: PositiveInt, num_clients: NumClients) -> None:
        self.classes_per_client = classes_per_client
        self.num_clients: int = num_clients

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Draw the clients' classes, then share out the images."""
        train, test = members_by_side(pool)
        check_class_count("classes_per_client", self.classes_per_client, len(train))
        holds = draw_class_sets(len(train), self.num_clients, self.classes_per_client, 10_000, rng)
        return ClientSplits(share_evenly(train, holds, rng), share_evenly(test, holds, rng))


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


class DomainPerClient(Partition):
    """One domain, one client (pFedPG; FedPGP's source clients), in the data set's order of domains."""

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Take every domain's official train and test images; nothing is drawn."""
        domains, test = pool.domains.numpy(), pool.test.numpy()
        mine = [domains == domain for domain in range(int(domains.max()) + 1)]
        return ClientSplits([np.flatnonzero(m & ~test) for m in mine], [np.flatnonzero(m & test) for m in mine])


# Checks -----------------------------------------------------------------------------------------------


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


def members_by_side(pool: ImagePool) -> tuple[list[Indices], list[Indices]]:
    """Indices by class, of the official train set and of the official test set."""
    labels, test = pool.labels.numpy(), pool.test.numpy()
    return members_by_class(labels, ~test), members_by_class(labels, test)


def check_class_count(name: str, wanted: int, classes: int) -> None:
    """Refuse more classes per client than the data have."""
    if wanted > classes:
        raise ConfigurationError(f"{name}={wanted} is more than the {classes} classes of the data set")
