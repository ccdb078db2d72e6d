"""Clients of very different sizes, with the same classes."""

import numpy as np

from benchmark.ranges import Concentration, NumClients, PositiveInt
from datamodules.partition.dirichlet_shared import dirichlet_shared
from datamodules.partition.partition import Partition
from datamodules.partition.splits import ClientSplits
from datamodules.source import ImagePool


class QuantitySkew(Partition):
    """Quantity skew (Li et al., ICDE 2022): sizes by ``p ~ Dir(alpha 1_N)``, images at random whatever their class.

    ``DirichletShared`` of one class that all images are of: one draw of p cuts the shuffled train images and the
    shuffled test images, which stay apart.

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
        one_class = np.zeros(len(pool.labels), dtype=np.int64)
        return dirichlet_shared(
            one_class, pool.test.numpy(), self.num_clients, self.alpha, self.min_size, self.max_retries, rng
        )
