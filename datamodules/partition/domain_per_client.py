"""One domain, one client."""

import numpy as np

from datamodules.partition.partition import Partition
from datamodules.partition.splits import ClientSplits
from datamodules.source import ImagePool


class DomainPerClient(Partition):
    """One domain, one client (pFedPG; FedPGP's source clients), in the data set's order of domains."""

    title = "one domain a client"
    paper_setting = "avg over domains"

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Take every domain's official train and test images; nothing is drawn."""
        domains, test = pool.domains.numpy(), pool.test.numpy()
        mine = [domains == domain for domain in range(int(domains.max()) + 1)]
        return ClientSplits([np.flatnonzero(m & ~test) for m in mine], [np.flatnonzero(m & test) for m in mine])
