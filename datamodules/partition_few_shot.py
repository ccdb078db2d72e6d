"""Partitions of the prompt-learning papers: a few images of each class, and classes that no client has seen.

The draw of the images comes from the generator that every partition gets; which client holds which classes is drawn
from a seed of its own, so that runs with different seeds share it. The classes are those of FedPGP's code, which
shuffles them with Python's ``random``; its few images are drawn by the same generator going on, and are others here.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from benchmark.errors import ConfigurationError
from benchmark.ranges import Concentration, NumClients, PositiveInt, Seed
from benchmark.seeds import numpy_generator
from datamodules.partition import ClientSplits, Partition
from datamodules.partition.dirichlet_shared import dirichlet_shared
from datamodules.partition.members import draw_shots, members_by_class
from datamodules.source import ImagePool, ImageSource


def class_groups(classes: Sequence[int], num_clients: int, class_seed: int) -> list[tuple[int, ...]]:
    """Disjoint groups of classes: shuffled, then ``round(C / N)`` to each client and what is left to the last one.

    Args:
        classes: C class ids.
        num_clients: N.
        class_seed: seed of the shuffle, by Python's own generator as in FedPGP's code.

    Returns:
        Per client its classes, ascending.

    Raises:
        ConfigurationError: a client would get no class.
    """
    count = len(classes)
    if not _enough(count, num_clients):
        most = max(fewer for fewer in range(1, num_clients) if _enough(count, fewer))
        raise ConfigurationError(
            f"num_clients={num_clients} does not fit {count} classes: with {round(count / num_clients)} classes each "
            f"the last client gets none; use at most {most} clients"
        )
    size = round(count / num_clients)
    order = list(classes)
    random.Random(class_seed).shuffle(order)
    starts = [client * size for client in range(num_clients)] + [count]
    return [tuple(sorted(order[a:b])) for a, b in pairwise(starts)]


def _enough(classes: int, clients: int) -> bool:
    """Return whether every client gets a class, the last one too."""
    size = round(classes / clients)
    return size > 0 and size * (clients - 1) < classes


def hand_out_classes(
    pool: ImagePool, groups: Sequence[Sequence[int]], shots: int | None, rng: np.random.Generator
) -> ClientSplits:
    """Give every client ``shots`` training images of each of its classes, and all their test images.

    Args:
        pool: the images.
        groups: per client its classes.
        shots: training images of a class; None for all.
        rng: where the draw of the training images comes from.
    """
    labels, test = pool.labels.numpy(), pool.test.numpy()
    # Drawn for every class of the pool, in order: so a class has the same shots whoever holds it.
    drawn = draw_shots(members_by_class(labels, ~test), shots, rng)
    few = np.zeros(len(labels), dtype=bool)
    few[np.concatenate(drawn)] = True
    mine = [np.isin(labels, group) for group in groups]
    return ClientSplits([np.flatnonzero(m & few) for m in mine], [np.flatnonzero(m & test) for m in mine])


class NonOverlapping(Partition):
    """No two clients share a class, and a client has a few images of each (FedPGP's pathological setting).

    Unlike ``DisjointClasses`` it takes any number of classes: ``round(C / N)`` for each client, the rest for the last
    one. Labels count over all classes. A client's ``test`` set are all test images of its classes; ``all`` is the
    whole test set, the same for every client. With 4 shots also our reading of ATPFL's label-skewed few-shot setting.

    Args:
        num_clients: N (FedPGP: 10).
        shots: training images of each class (FedPGP: 16, ATPFL: 4), all of a class that has fewer; None for all.
        class_seed: seed of the shuffle of classes, apart from the seed of the run (FedPGP's code: 2023).
    """

    paper_setting = "pathological*"
    further_splits = ("all",)

    def __init__(self, num_clients: NumClients, shots: PositiveInt | None = None, class_seed: Seed = 2023) -> None:
        self.num_clients: int = num_clients
        self.shots = shots
        self.class_seed = class_seed

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Group the classes, draw the shots."""
        groups = class_groups(np.unique(pool.labels.numpy()).tolist(), self.num_clients, self.class_seed)
        splits = hand_out_classes(pool, groups, self.shots, rng)
        everything = np.flatnonzero(pool.test.numpy())
        return replace(splits, others={"all": [everything] * self.num_clients})

    def client_names(self, source: ImageSource) -> list[str]:
        """Numbered, if the classes suffice."""
        class_groups(range(len(source.class_names)), self.num_clients, self.class_seed)
        return super().client_names(source)


class BaseToNovel(Partition):
    """Clients learn the first half of the classes, and are also tested on the other half (FedPGP, CoCoOp's protocol).

    The first ``ceil(C / 2)`` classes are base, the others novel. The base classes are shared out as in
    ``NonOverlapping``. Every client is tested on

    - ``test``: the test images of its own classes,
    - ``base``: those of all base classes,
    - ``base_excl_local``: those of the base classes that it does not hold (not there with one client),
    - ``novel``: those of all novel classes, told apart from each other only.

    Training, ``test``, ``base`` and ``base_excl_local`` count labels over the base classes.

    Args:
        num_clients: N (FedPGP: 10).
        shots: training images of each class (FedPGP: 16), all of a class that has fewer; None for all.
        class_seed: seed of the shuffle of base classes, apart from the seed of the run (FedPGP's code: 2023).
    """

    paper_setting = "base-to-novel*"
    further_splits = ("base", "novel", "base_excl_local")

    def __init__(self, num_clients: NumClients, shots: PositiveInt | None = 16, class_seed: Seed = 2023) -> None:
        self.num_clients: int = num_clients
        self.shots = shots
        self.class_seed = class_seed

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Cut the classes in half, group the base classes, draw the shots."""
        base, novel = base_and_novel(np.unique(pool.labels.numpy()).tolist())
        splits = hand_out_classes(pool, class_groups(base, self.num_clients, self.class_seed), self.shots, rng)
        return with_base_and_novel(splits, pool, base, novel)

    def client_names(self, source: ImageSource) -> list[str]:
        """Numbered, if the base classes suffice."""
        class_groups(base_and_novel(range(len(source.class_names)))[0], self.num_clients, self.class_seed)
        return super().client_names(source)


class BaseToNovelDomains(Partition):
    """A client learns the first half of the classes in its domain, and is tested on the other half, too.

    ``BaseToNovel`` where clients differ in the domain, not in the classes. The first ``ceil(C / 2)`` classes are base,
    the others novel; each client trains on all base classes. It is tested on

    - ``test``: its own domain's test images of base classes,
    - ``base``: those of all domains,
    - ``base_excl_local``: those of all other domains,
    - ``novel``: all domains' test images of novel classes, told apart from each other only.

    No published paper's setting. In a data set of one domain it is ``BaseToNovel`` with one client.

    Args:
        shots: training images of each class and domain, all of a class that has fewer; None for all.
    """

    further_splits = ("base", "novel", "base_excl_local")

    def __init__(self, shots: PositiveInt | None = 16) -> None:
        self.shots = shots

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Cut the classes in half, and draw each domain's shots."""
        labels, test, domain_of = pool.labels.numpy(), pool.test.numpy(), pool.domains.numpy()
        base, novel = base_and_novel(np.unique(labels).tolist())
        held = [np.isin(labels, base) & (domain_of == domain) for domain in range(int(domain_of.max()) + 1)]
        few = [draw_shots(members_by_class(labels, mine & ~test), self.shots, rng) for mine in held]
        splits = ClientSplits([np.concatenate(drawn) for drawn in few], [np.flatnonzero(mine & test) for mine in held])
        return with_base_and_novel(splits, pool, base, novel)

    @property
    def _remedy(self) -> str:
        return "leave out domains without train and test images of base classes, which are the first half"

    def client_names(self, source: ImageSource) -> list[str]:
        """The domains' names, if there are classes to cut in half."""
        base_and_novel(range(len(source.class_names)))
        return super().client_names(source)


def base_and_novel(classes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first ``ceil(C / 2)`` classes and the others.

    Raises:
        ConfigurationError: there is no other class.
    """
    if len(classes) < 2:
        raise ConfigurationError("base and novel classes need a data set of at least 2 classes")
    half = (len(classes) + 1) // 2
    return tuple(classes[:half]), tuple(classes[half:])


def with_base_and_novel(
    splits: ClientSplits, pool: ImagePool, base: Sequence[int], novel: Sequence[int]
) -> ClientSplits:
    """Add the test sets ``base``, ``novel`` and, of several clients, ``base_excl_local``, with their label spaces.

    Args:
        splits: each client's images of base classes.
        pool: the images.
        base: classes that are learnt.
        novel: the others.
    """
    labels, test, count = pool.labels.numpy(), pool.test.numpy(), len(splits.train)
    all_base, all_novel = (np.flatnonzero(test & np.isin(labels, classes)) for classes in (base, novel))
    others = {"base": [all_base] * count, "novel": [all_novel] * count}
    if count > 1:
        others["base_excl_local"] = [np.setdiff1d(all_base, mine) for mine in splits.test]
    spaces = dict.fromkeys(("train", "test", *others), tuple(base)) | {"novel": tuple(novel)}
    return replace(splits, others=others, label_spaces=spaces)


class DirichletFewShot(Partition):
    """``DirichletShared`` over a smaller pool (with 4 shots ATPFL's setting, read as label skew by Dirichlet).

    ``shots`` training images of each class, and ``test_shots`` test images, are drawn for all clients together, then
    shared out in the same proportions. Cuts are rounded down, so that with few shots later clients train on more
    images. ``all`` are all test images that are drawn, the same for every client: with many clients an evaluation of
    them takes far longer than one of the clients' own.

    Args:
        alpha: concentration; smaller is more skewed.
        num_clients: N.
        shots: training images of each class in the pool (ATPFL: 4), all of a class that has fewer.
        min_size: train images and test images that every client must hold.
        max_retries: draws before giving up.
        test_shots: test images of each class in the pool; None for all.
        pool_seed: the pool is drawn from this seed, and not from that of the partition, so that several seeds share
            its images out in several ways.
        score_all: whether there is the split ``all``.
    """

    title = "Dirichlet({alpha}), {clients}"
    later_arguments = ("test_shots", "pool_seed", "score_all")

    def __init__(
        self,
        alpha: Concentration,
        num_clients: NumClients,
        shots: PositiveInt,
        min_size: PositiveInt = 1,
        max_retries: PositiveInt = 10_000,
        test_shots: PositiveInt | None = None,
        pool_seed: Seed | None = None,
        score_all: bool = True,
    ) -> None:
        self.further_splits = ("all",) if score_all else ()
        self.alpha = alpha
        self.num_clients: int = num_clients
        self.shots = shots
        self.min_size = min_size
        self.max_retries = max_retries
        self.test_shots = test_shots
        self.pool_seed = pool_seed
        self.score_all = score_all

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Draw the pool, then the proportions, and cut both sides by them."""
        labels, test = pool.labels.numpy(), pool.test.numpy()
        drawing = rng if self.pool_seed is None else numpy_generator(self.pool_seed, "pool")
        trained = draw_shots(members_by_class(labels, ~test), self.shots, drawing)
        everything = np.flatnonzero(test)
        if self.test_shots is not None:
            everything = np.sort(np.concatenate(draw_shots(members_by_class(labels, test), self.test_shots, drawing)))
        used = np.concatenate([*trained, everything])
        splits = dirichlet_shared(
            labels[used], test[used], self.num_clients, self.alpha, self.min_size, self.max_retries, rng
        )
        return ClientSplits(
            [used[mine] for mine in splits.train],
            [used[mine] for mine in splits.test],
            {split: [everything] * self.num_clients for split in self.further_splits},
        )
