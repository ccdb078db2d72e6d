"""Clients that share no class."""

import numpy as np

from benchmark.errors import ConfigurationError
from benchmark.ranges import NumClients, PositiveInt
from datamodules.partition.members import check_class_count
from datamodules.partition.partition import Partition
from datamodules.partition.splits import ClientSplits
from datamodules.source import ImagePool, ImageSource


class DisjointClasses(Partition):
    """Clients share no class (pFedPG's disjoint label space, after ViT-FL).

    Classes are shuffled and cut into consecutive groups; a client gets all train and all test images of
    its group. CIFAR-10 with 2 classes per client has 5 clients, CIFAR-100 with 10 has 10.

    Args:
        classes_per_client: size of a group; must divide the number of classes.
        num_clients: number of groups; None takes what follows from the data, a number is checked.
    """

    paper_setting = "disjoint c={classes_per_client}"

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
