"""The Dirichlet partition with the same proportions for train and test images."""

import numpy as np
from numpy.typing import NDArray

from benchmark.ranges import Concentration, NumClients, PositiveInt
from datamodules.partition.dirichlet import dirichlet_cuts
from datamodules.partition.members import members_by_class
from datamodules.partition.partition import Partition
from datamodules.partition.splits import ClientSplits, Indices
from datamodules.source import ImagePool


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

    title = "Dirichlet({alpha}), {clients}"
    paper_setting = "dir{alpha}"

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
