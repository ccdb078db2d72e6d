"""The Dirichlet partition of train and test images together."""

import numpy as np

from benchmark.ranges import Concentration, InsideUnit, NumClients, PositiveInt
from datamodules.partition.dirichlet import dirichlet_cuts
from datamodules.partition.members import members_by_class
from datamodules.partition.partition import Partition
from datamodules.partition.splits import ClientSplits, Indices
from datamodules.partition.units import split_units, units_of
from datamodules.source import ImagePool


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


class DirichletMerged(Partition):
    """PFLlib's and pFedPT's Dirichlet form: train and test merged, then each client split at random.

    For every class p ~ Dir(alpha) over clients, where clients that already hold the mean number of images
    get nothing more; drawn again until every client holds ``min_size``. Then every client's own images are
    split into train and test, not stratified: they share proportions only in expectation.
    pFedPT: alpha 0.3, 50 clients, min_size 8. Images of one group go to one client and one side; those of a group
    with several classes, such as a patient's, go to one client class by class, and all of them train, with a warning.

    Args:
        alpha: concentration; smaller is more skewed.
        num_clients: N.
        min_size: images, train and test together, that every client must hold.
        test_fraction: share of a client's images that it is tested on.
        max_retries: draws before giving up.
    """

    title = "Dirichlet({alpha}), {clients}"
    paper_setting = "dir{alpha}"

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
