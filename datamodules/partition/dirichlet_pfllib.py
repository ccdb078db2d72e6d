"""The Dirichlet partition as PFLlib's and pFedPT's codes draw it, number for number."""

from itertools import starmap

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.ranges import Concentration, InsideUnit, NumClients, PositiveInt, Seed
from datamodules.partition.dirichlet import hopeless
from datamodules.partition.members import members_by_class
from datamodules.partition.partition import Partition
from datamodules.partition.splits import ClientSplits, Indices
from datamodules.partition.units import Units, split_units, units_of
from datamodules.source import ImagePool

#: Units of a class in their order, and where they are cut.
Cut = tuple[Indices, Indices]


class DirichletPFLlib(Partition):
    """``DirichletMerged`` with the random numbers of the published code: each client has as many images of each class.

    The code takes all of them from NumPy's first generator, seeded once: per class a shuffle of its images, then the
    proportions; per client a shuffle of what it holds, of which the first part is tested. Since how much a client has
    of each class makes up for points of accuracy, a published number is repeated on this draw. Clients have the very
    images of the code where the pool has the official order, as torchvision's files do; with images in folders, as
    many of each class on each side. Source: github.com/hkgdifyu/pFedPT, ``dataset/utils/dataset_utils.py``, with
    scikit-learn's ``train_test_split``.

    With an alpha below about 0.001 NumPy's draw is no number, or nothing is left for the clients that are not full
    yet, which the code does not foresee. The proportions among those clients are then drawn by their logarithms, with
    further numbers of the same generator: they are Dirichlet's, and in the limit one client takes the class.

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
        total, needed = int(units.sizes.sum()), self.min_size * self.num_clients
        advice = "raise alpha, use fewer clients or lower min_size"
        if total < needed:
            raise ConfigurationError(
                f"{self.num_clients} clients with at least min_size={self.min_size} images each need {needed} images, "
                f"the data set has {total}; use fewer clients or lower min_size"
            )
        stream = np.random.RandomState(self.numpy_seed)
        best = short = 0
        for draw in range(1, self.max_retries + 1):
            parts, sizes = self._draw(units, stream)
            if sizes.min() >= self.min_size:
                held = [np.concatenate(mine) for mine in zip(*starmap(np.split, parts), strict=True)]
                return split_units(units, held, self.test_fraction, stream)
            best, short = max(best, int(sizes.min())), short + int((sizes < self.min_size).sum())
            if hopeless(short, draw, self.max_retries):
                raise ConfigurationError(
                    f"no draw with alpha={self.alpha:g} will give all {self.num_clients} clients min_size="
                    f"{self.min_size} images: in {draw} draws {short / draw:.0f} clients got fewer on average; {advice}"
                )
        raise ConfigurationError(
            f"no client may have fewer than min_size={self.min_size} images; in the best of {self.max_retries} draws "
            f"one had {best}; {advice}"
        )

    def _draw(self, units: Units, stream: np.random.RandomState) -> tuple[list[Cut], NDArray[np.int64]]:
        """Return each class's units with the places where they are cut for the clients, and the clients' images."""
        sizes = np.zeros(self.num_clients, dtype=np.int64)
        mean = units.sizes.sum() / self.num_clients
        parts = []
        for members in members_by_class(units.labels):
            stream.shuffle(members)
            share = self._shares(sizes < mean, stream)
            before = np.concatenate([[0], np.cumsum(units.sizes[members])])
            ends = (np.cumsum(share) * before[-1]).astype(np.int64)
            at = np.searchsorted(before[1:], np.array([0, *ends[:-1], before[-1]]), side="right")
            parts.append((members, at[1:-1]))
            sizes += np.diff(before[at])
        return parts, sizes

    def _shares(self, open_: NDArray[np.bool_], stream: np.random.RandomState) -> NDArray[np.float64]:
        """Draw each client's share of a class, 0 of those that have the mean number of images already."""
        p = stream.dirichlet(np.repeat(self.alpha, self.num_clients)) * open_
        if 0 < p.sum() < np.inf:
            return p / p.sum()
        # Gamma(alpha) is Gamma(alpha + 1) U^(1 / alpha). These are alpha times the logarithms; of open clients alone.
        gamma, uniform = stream.standard_gamma(self.alpha + 1, size=len(p)), 1 - stream.random_sample(len(p))
        logs = np.where(open_, self.alpha * np.log(gamma) + np.log(uniform), -np.inf)
        with np.errstate(over="ignore"):  # of the smallest alpha, whose shares are 0 and 1
            weights = np.exp((logs - logs.max()) / self.alpha)
        return weights / weights.sum()
