"""The Dirichlet partition as PFLlib's and pFedPT's codes draw it, number for number."""

import numpy as np

from benchmark.errors import ConfigurationError
from benchmark.ranges import Concentration, InsideUnit, NumClients, PositiveInt, Seed
from datamodules.partition.members import members_by_class
from datamodules.partition.partition import Partition
from datamodules.partition.splits import ClientSplits, Indices
from datamodules.partition.units import Units, split_units, units_of
from datamodules.source import ImagePool


class DirichletPFLlib(Partition):
    """``DirichletMerged`` with the random numbers of the published code: each client has as many images of each class.

    The code takes all of them from NumPy's first generator, seeded once: per class a shuffle of its images, then the
    proportions; per client a shuffle of what it holds, of which the first part is tested. Since how much a client has
    of each class makes up for points of accuracy, a published number is repeated on this draw. Clients have the very
    images of the code where the pool has the official order, as torchvision's files do; with images in folders, as
    many of each class on each side. Source: github.com/hkgdifyu/pFedPT, ``dataset/utils/dataset_utils.py``, with
    scikit-learn's ``train_test_split``.

    Args:
        alpha: concentration; smaller is more skewed.
        num_clients: N.
        numpy_seed: of the generator; 1 in the code. The data's ``partition_seed`` changes nothing.
        min_size: images, train and test together, that every client must hold.
        test_fraction: share of a client's images that it is tested on.
        max_retries: draws before giving up.
    """

    title = "Dirichlet({alpha}) as published, {clients}"
    paper_setting = "dir{alpha}"

    def __init__(
        self,
        alpha: Concentration,
        num_clients: NumClients,
        numpy_seed: Seed = 1,
        min_size: PositiveInt = 8,
        test_fraction: InsideUnit = 0.25,
        max_retries: PositiveInt = 1_000,
    ) -> None:
        self.alpha = alpha
        self.num_clients: int = num_clients
        self.numpy_seed = numpy_seed
        self.min_size = min_size
        self.test_fraction = test_fraction
        self.max_retries = max_retries

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Draw the clients' images, then their sides, from ``numpy_seed``.

        Raises:
            ConfigurationError: no draw gave every client enough images.
        """
        units = units_of(pool.labels.numpy(), pool.group.numpy())
        stream = np.random.RandomState(self.numpy_seed)
        best = 0
        for _ in range(self.max_retries):
            held = self._draw(units, stream)
            smallest = min(units.sizes[mine].sum() for mine in held)
            if smallest >= self.min_size:
                return split_units(units, held, self.test_fraction, stream)
            best = max(best, smallest)
        raise ConfigurationError(
            f"no client may have fewer than min_size={self.min_size} images; in the best of {self.max_retries} draws "
            f"one had {best}; raise alpha, use fewer clients or lower min_size"
        )

    def _draw(self, units: Units, stream: np.random.RandomState) -> list[Indices]:
        """Return each client's units, class after class."""
        sizes = np.zeros(self.num_clients)
        parts = []
        for members in members_by_class(units.labels):
            stream.shuffle(members)
            # A client that has the mean number of images gets nothing more.
            p = stream.dirichlet(np.repeat(self.alpha, self.num_clients)) * (sizes < units.sizes.sum() / len(sizes))
            share = p / p.sum() if p.sum() > 0 else np.full_like(p, 1 / len(p))  # where the code would stop
            ends = (np.cumsum(share) * units.sizes[members].sum()).astype(np.int64)
            parts.append(units.cut(members, np.array([0, *ends[:-1], units.sizes[members].sum()])))
            sizes += [units.sizes[mine].sum() for mine in parts[-1]]
        return [np.concatenate(mine) for mine in zip(*parts, strict=True)]
