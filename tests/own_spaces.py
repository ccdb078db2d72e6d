"""A federation whose clients tell different classes of the tiny images apart, and two testers."""

import numpy as np

from datamodules.partition import ClientSplits, Partition
from datamodules.source import ImagePool, ImageSource

FIRST, SECOND, THIRD = (0, 1, 2), (3, 4), (5, 6, 7)
SPACES = [FIRST, SECOND, FIRST, THIRD, FIRST, THIRD]
SIZES = (5, 4, 3, 6, 2, 3)


class OwnSpaces(Partition):
    """Six clients with three label spaces, and two testers: of five classes, and of the other three."""

    further_splits = ("whole", "apart")

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Consecutive images of each client's classes."""
        labels, test = pool.labels.numpy(), pool.test.numpy()

        def some(side: np.ndarray, classes: tuple[int, ...], start: int, count: int) -> np.ndarray:
            return np.flatnonzero(side & np.isin(labels, classes))[start : start + count]

        train = [some(~test, of, 6 * k, size) for k, (of, size) in enumerate(zip(SPACES, SIZES, strict=True))]
        tested = [some(test, of, k, 5) for k, of in enumerate(SPACES)]
        none = np.zeros(0, dtype=np.int64)
        whole, apart = some(test, (0, 1, 2, 3, 4), 0, 12), some(test, THIRD, 0, 7)
        return ClientSplits(
            [*train, none, none],
            [*tested, none, none],
            {"whole": [none] * 6 + [whole, none], "apart": [none] * 6 + [none, apart]},
            {
                "train": [*SPACES, (), ()],
                "test": [*SPACES, (), ()],
                "whole": [()] * 6 + [(0, 1, 2, 3, 4), ()],
                "apart": [()] * 7 + [THIRD],
            },
            testers=2,
        )

    def client_names(self, source: ImageSource) -> list[str]:
        """Numbered clients, then the testers."""
        return [*(f"client {number}" for number in range(6)), "whole", "apart"]

    def testers(self, source: ImageSource) -> int:
        """Two."""
        return 2
