"""Clients of very different sizes, with the same classes."""

import numpy as np

from benchmark.ranges import Concentration, NumClients, PositiveInt
from datamodules.partition.dirichlet import dirichlet_cuts
from datamodules.partition.partition import Partition
from datamodules.partition.splits import ClientSplits
from datamodules.source import ImagePool


class QuantitySkew(Partition):
    """Quantity skew (Li et al., ICDE 2022): sizes by ``p ~ Dir(alpha 1_N)``, images at random whatever their class.

    One draw of p cuts the shuffled train images and the shuffled test images, which stay apart.

    Args:
        alpha: concentration; smaller is more skewed.
        num_clients: N.
        min_size: train images and test images that every client must hold.
        max_retries: draws before giving up.
    """

    title = "Quantity skew({alpha}), {clients}"

    def __init__(
        self,
        alpha: Concentration,
        num_clients: NumClients,
        min_size: PositiveInt = 1,
        max_retries: PositiveInt = 10_000,
    ) -> None:
        self.alpha = alpha
        self.num_clients: int = num_clients
        self.min_size = min_size
        self.max_retries = max_retries

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Draw the shares and cut both sides by them."""
        test = pool.test.numpy()
        sides = [np.flatnonzero(~test), np.flatnonzero(test)]
        sizes = np.array([[len(side)] for side in sides])  # as if all images were of one class
        cuts = next(dirichlet_cuts(sizes, self.num_clients, self.alpha, self.min_size, self.max_retries, rng))
        train, tested = (np.split(rng.permutation(side), ends[0, 1:-1]) for side, ends in zip(sides, cuts, strict=True))
        return ClientSplits(train, tested)
