"""Partitions by domain: several domains a client, and a domain that nobody trains on."""

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.ranges import Concentration, NonNegativeInt, PositiveInt
from datamodules.partition import ClientSplits, Indices, Partition
from datamodules.partition.dirichlet_shared import dirichlet_shared
from datamodules.partition.members import deal_stratified, draw_shots, members_by_class
from datamodules.source import ImagePool, ImageSource


class DomainsPerClient(Partition):
    """A partition with as many clients as domains, each client holding m domains (pFedBayesPT's setting).

    The paper gives no algorithm. Client i holds the domains i, i+1, ..., i+m-1, counted around. A domain's training
    images are dealt evenly to its m holders, stratified by class, and so are its test images. A client gets part j of
    its j-th domain, so that all clients have equally many images for every m if the domains have equally many. With
    m = 1 each client has one domain; with m the number of domains the clients are alike.

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


class SkewedDomains(Partition):
    """Several clients a domain, each with a share of the domain's classes and, where asked, few images of each.

    Two kinds of heterogeneity at once, in amounts to choose: clients ``G d, ..., G d + G - 1`` hold domain d. Without
    ``alpha`` they are alike: the domain is dealt out, stratified by class. With it they differ as in
    ``DirichletShared``: one draw for each class of the domain cuts its training and its test images. No published
    paper's setting; pFedPG's is the one with one client a domain and neither.

    Args:
        clients_per_domain: G.
        alpha: concentration of the classes within a domain; None for clients that are alike.
        shots: training images of each class that a client keeps, drawn at random; None for all.
        min_size: training and test images that every client must hold before ``shots``, with ``alpha``.
        max_retries: draws for each domain before giving up, with ``alpha``.
    """

    def __init__(
        self,
        clients_per_domain: PositiveInt = 1,
        alpha: Concentration | None = None,
        shots: PositiveInt | None = None,
        min_size: PositiveInt = 5,
        max_retries: PositiveInt = 10_000,
    ) -> None:
        self.clients_per_domain = clients_per_domain
        self.alpha = alpha
        self.shots = shots
        self.min_size = min_size
        self.max_retries = max_retries

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Divide domain after domain, then draw the few training images."""
        labels, test, domain_of = pool.labels.numpy(), pool.test.numpy(), pool.domains.numpy()
        train: list[Indices] = []
        tested: list[Indices] = []
        for domain in range(int(domain_of.max()) + 1):
            inside = np.flatnonzero(domain_of == domain)
            parts = self._divided(labels[inside], test[inside], rng)
            train += [inside[rows] for rows in parts.train]
            tested += [inside[rows] for rows in parts.test]
        if self.shots is not None:
            few = [draw_shots(members_by_class(labels[rows]), self.shots, rng) for rows in train]
            train = [rows[np.concatenate(kept)] for rows, kept in zip(train, few, strict=True)]
        return ClientSplits(train, tested)

    def _divided(self, labels: Indices, test: NDArray[np.bool_], rng: np.random.Generator) -> ClientSplits:
        """Divide one domain over its clients."""
        if self.alpha is not None:
            if set(labels[test]) != set(labels[~test]):
                raise ConfigurationError("SkewedDomains with alpha needs every class of a domain on both sides of it")
            count, least = self.clients_per_domain, self.min_size
            return dirichlet_shared(labels, test, count, self.alpha, least, self.max_retries, rng)
        trained, tested = (
            deal_stratified(members_by_class(labels, side), self.clients_per_domain, rng) for side in (~test, test)
        )
        return ClientSplits(trained, tested)

    def client_names(self, source: ImageSource) -> list[str]:
        """The domains' names, numbered where a domain has several clients."""
        each = range(self.clients_per_domain)
        return [name if len(each) == 1 else f"{name} {place}" for name in source.domain_names for place in each]


class LeaveOneDomainOut(Partition):
    """One domain is unseen: the others are the clients, and each is tested on all of the unseen one (FedPGP).

    A client trains on its domain's own training images, or a few of them. All clients are tested on the same images,
    the target domain's train and test images together. A training image that is in one group with a target image is
    left out. The clients' own test images are not used.

    Args:
        target: number of the unseen domain in the data set's order, from 0.
        source_shots: training images of each class that a client keeps, drawn at random; None for all, as in the
            paper. Named apart from the others' ``shots``, which a file that is read before may hold.
    """

    paper_setting = "LODO*"
    later_arguments = ("source_shots",)

    def __init__(self, target: NonNegativeInt, source_shots: PositiveInt | None = None) -> None:
        self.target = target
        self.source_shots = source_shots

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Take the domains, and draw the few training images."""
        labels, domain_of, group = pool.labels.numpy(), pool.domains.numpy(), pool.group.numpy()
        count = int(domain_of.max()) + 1
        self._check([str(domain) for domain in range(count)])
        unseen = domain_of == self.target
        trains = ~pool.test.numpy() & ~np.isin(group, group[unseen])
        held = [trains & (domain_of == domain) for domain in range(count) if domain != self.target]
        train = [np.concatenate(draw_shots(members_by_class(labels, mine), self.source_shots, rng)) for mine in held]
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
