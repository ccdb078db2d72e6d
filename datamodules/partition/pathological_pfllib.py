"""PFLlib's pathological form as published, and what its code makes of "iid"."""

import numpy as np

from benchmark.errors import ConfigurationError
from benchmark.ranges import NumClients, PositiveInt, Seed
from datamodules.partition.members import check_class_count, members_by_class
from datamodules.partition.partition import Partition
from datamodules.partition.splits import ClientSplits, Indices
from datamodules.partition.units import Units, split_units, units_of
from datamodules.source import ImagePool

Draws = np.random.Generator | np.random.RandomState


def pathological_pfllib(
    units: Units, num_clients: int, classes_per_client: int, min_size: int, rng: Draws
) -> list[Indices]:
    """The units of each client in PFLlib's pathological form. See ``PathologicalPFLlib``.

    With NumPy's first generator they are the published code's, which takes the images of a class as they are stored.

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
        if isinstance(rng, np.random.RandomState):
            order, sizes = members, rng.randint(low, high, size=len(clients) - 1)
        else:
            sizes = rng.integers(low, high, size=len(clients) - 1)
            order = rng.permutation(members)
        parts = units.cut(order, np.concatenate([[0], np.cumsum(sizes), [n]]))
        for client, part in zip(clients, parts, strict=True):
            held[client].append(part)
        wanted[clients] -= 1
    return [np.concatenate(mine) if mine else np.zeros(0, dtype=np.int64) for mine in held]


def pathological_split(
    labels: Indices,
    group: Indices,
    num_clients: int,
    classes_per_client: int,
    numpy_seed: int | None,
    own: np.random.Generator,
) -> ClientSplits:
    """PFLlib's pathological form with pFedPT's constants: at least 8 images per client, 75 % of them train."""
    rng = own if numpy_seed is None else np.random.RandomState(numpy_seed)
    units = units_of(labels, group)
    return split_units(units, pathological_pfllib(units, num_clients, classes_per_client, 8, rng), 0.25, rng)


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
        numpy_seed: with 1 the published code's draw: a client has as many images of each class on each side, and those
            very images where the pool has the official order, as with ``DirichletPFLlib``; ``partition_seed`` changes
            nothing then. None: a draw by ``partition_seed``.
    """

    paper_setting = "pathological*"

    def __init__(
        self, classes_per_client: PositiveInt, num_clients: NumClients, numpy_seed: Seed | None = None
    ) -> None:
        self.classes_per_client = classes_per_client
        self.num_clients: int = num_clients
        self.numpy_seed = numpy_seed

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Hand out the classes in order, then split every client."""
        labels = pool.labels.numpy()
        check_class_count("classes_per_client", self.classes_per_client, len(np.unique(labels)))
        return pathological_split(
            labels, pool.group.numpy(), self.num_clients, self.classes_per_client, self.numpy_seed, rng
        )


class IIDPFLlib(Partition):
    """PFLlib's split "iid", as its code makes it: ``PathologicalPFLlib`` with every class at every client.

    Every client holds all classes, but the last client holds about half of all images.

    Args:
        num_clients: N.
        numpy_seed: as for ``PathologicalPFLlib``.
    """

    paper_setting = "iid"

    def __init__(self, num_clients: NumClients, numpy_seed: Seed | None = None) -> None:
        self.num_clients: int = num_clients
        self.numpy_seed = numpy_seed

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Hand out every class to every client, then split every client."""
        labels = pool.labels.numpy()
        classes = len(np.unique(labels))
        return pathological_split(labels, pool.group.numpy(), self.num_clients, classes, self.numpy_seed, rng)
