"""Partitions by domain: several domains a client, and a domain that nobody trains on."""

import numpy as np

from benchmark.errors import ConfigurationError
from benchmark.ranges import NonNegativeInt, PositiveInt
from datamodules.partition import ClientSplits, Indices, Partition
from datamodules.partition.members import deal_stratified, members_by_class
from datamodules.source import ImagePool, ImageSource


class DomainsPerClient(Partition):
    """As many clients as domains, each holding m of them (pFedBayesPT's setting; its paper gives no algorithm).

    Client i holds the domains i, i+1, ..., i+m-1, counted around. A domain's training images are dealt evenly to its
    m holders, stratified by class, and so are its test images. A client gets part j of its j-th domain, so that all
    clients have equally many images for every m where the domains have equally many. With m = 1 each client has one
    domain, with all domains the clients are alike.

    Args:
        domains: m.
        random: go around the domains in a random order, so that each client's domains are drawn at random and
            each domain still has m holders.
    """

    paper_setting = "m={domains}"

    def __init__(self, domains: PositiveInt, random: bool = False) -> None:
        self.domains = domains
        self.random = random

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Deal every domain's train images and test images."""
        labels, test, domain_of = pool.labels.numpy(), pool.test.numpy(), pool.domains.numpy()
        count = int(domain_of.max()) + 1
        self._check(count)
        order = rng.permutation(count) if self.random else np.arange(count)
        train: list[list[Indices]] = [[] for _ in range(count)]
        tested: list[list[Indices]] = [[] for _ in range(count)]
        for place, domain in enumerate(order):
            for side, held in ((~test, train), (test, tested)):
                members = members_by_class(labels, side & (domain_of == domain))
                for part, images in enumerate(deal_stratified(members, self.domains, rng)):
                    held[(place - part) % count].append(images)
        return ClientSplits([np.concatenate(mine) for mine in train], [np.concatenate(mine) for mine in tested])

    def client_names(self, source: ImageSource) -> list[str]:
        """The domains' names where each client holds the one of its number."""
        names = list(source.domain_names)
        self._check(len(names))
        if self.domains == 1 and not self.random:
            return names
        return [f"client {client}" for client in range(len(names))]

    def _check(self, count: int) -> None:
        if self.domains > count:
            raise ConfigurationError(f"domains={self.domains} is more than the {count} domains of the data set")


class LeaveOneDomainOut(Partition):
    """One domain is unseen: the others are the clients, and each is tested on all of the unseen one (FedPGP).

    A client trains on its domain's own training images. All clients are tested on the same images, the target
    domain's train and test images together. A training image that is in one group with a target image is left out.
    The clients' own test images are not used.

    Args:
        target: number of the unseen domain in the data set's order, from 0.
    """

    paper_setting = "LODO*"

    def __init__(self, target: NonNegativeInt) -> None:
        self.target = target

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Take the domains; nothing is drawn."""
        domain_of, group = pool.domains.numpy(), pool.group.numpy()
        count = int(domain_of.max()) + 1
        self._check([str(domain) for domain in range(count)])
        unseen = domain_of == self.target
        trains = ~pool.test.numpy() & ~np.isin(group, group[unseen])
        train = [np.flatnonzero(trains & (domain_of == domain)) for domain in range(count) if domain != self.target]
        return ClientSplits(train, [np.flatnonzero(unseen)] * len(train))

    def client_names(self, source: ImageSource) -> list[str]:
        """The names of the domains that train."""
        names = list(source.domain_names)
        self._check(names)
        return [name for domain, name in enumerate(names) if domain != self.target]

    def _check(self, names: list[str]) -> None:
        if len(names) < 2:
            raise ConfigurationError("LeaveOneDomainOut needs a data set of at least two domains, this one has one")
        if self.target >= len(names):
            known = ", ".join(f"{domain} {name}" for domain, name in enumerate(names))
            raise ConfigurationError(f"target={self.target} is no domain of the data set, which has {known}")
