"""Even shares of every class."""

import numpy as np

from benchmark.ranges import NumClients
from datamodules.partition.members import deal_stratified, members_by_side
from datamodules.partition.partition import Partition
from datamodules.partition.splits import ClientSplits
from datamodules.source import ImagePool


class IID(Partition):
    """Every client gets the same share of every class, of the train set and of the test set.

    The official train and test sets stay apart.
    """

    paper_setting = "iid"

    def __init__(self, num_clients: NumClients) -> None:
        self.num_clients: int = num_clients

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Deal the train images, then the test images."""
        train, test = members_by_side(pool)
        return ClientSplits(deal_stratified(train, self.num_clients, rng), deal_stratified(test, self.num_clients, rng))
