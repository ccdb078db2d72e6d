"""The pathological form as the papers' text has it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.ranges import NumClients, PositiveInt
from datamodules.partition.members import check_class_count, members_by_side
from datamodules.partition.partition import Partition
from datamodules.partition.splits import ClientSplits, Indices
from datamodules.source import ImagePool

DRAWS_AT_ONCE = 64


def draw_class_sets(
    num_classes: int, num_clients: int, classes_per_client: int, max_retries: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Each client draws its classes without replacement, until every class has a holder.

    Returns:
        bool, [N, C], True where the client holds the class.

    Raises:
        ConfigurationError: no draw of ``max_retries`` gave every class a holder.
    """
    if num_clients * classes_per_client < num_classes:
        raise ConfigurationError(
            f"{num_clients} clients with {classes_per_client} classes each cannot hold all {num_classes} classes; "
            "use more clients or more classes per client"
        )
    for start in range(0, max_retries, DRAWS_AT_ONCE):
        draws = min(DRAWS_AT_ONCE, max_retries - start)
        ranks = rng.random((draws, num_clients, num_classes)).argsort(axis=2).argsort(axis=2)
        holds = ranks < classes_per_client
        covered = np.flatnonzero(np.all(np.any(holds, axis=1), axis=1))
        if len(covered):
            return holds[covered[0]]
    raise ConfigurationError(
        f"no draw of {max_retries} gave each of {num_classes} classes a holder among {num_clients} clients with "
        f"{classes_per_client} classes each; use more clients, more classes per client, or DisjointClasses"
    )


def share_evenly(members: Sequence[Indices], holds: NDArray[np.bool_], rng: np.random.Generator) -> list[Indices]:
    """Shuffle each class's images and split them evenly among its holders. ``holds``: [N, C]."""
    held: list[list[Indices]] = [[np.zeros(0, dtype=np.int64)] for _ in holds]
    for images, column in zip(members, holds.T, strict=True):
        holders = np.flatnonzero(column)
        for client, part in zip(holders, np.array_split(rng.permutation(images), len(holders)), strict=True):
            held[client].append(part)
    return [np.concatenate(mine) for mine in held]


class PathologicalRandom(Partition):
    """The pathological form as the papers' text has it: each client draws its classes at random.

    Drawn without replacement, until every class has a holder; a class's train images and its test images
    are split evenly among its holders. The official train and test sets stay apart.

    Args:
        classes_per_client: classes of each client.
        num_clients: N.
    """

    paper_setting = "pathological*"

    def __init__(self, classes_per_client: PositiveInt, num_clients: NumClients) -> None:
        self.classes_per_client = classes_per_client
        self.num_clients: int = num_clients

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Draw the clients' classes, then share out the images."""
        train, test = members_by_side(pool)
        check_class_count("classes_per_client", self.classes_per_client, len(train))
        holds = draw_class_sets(len(train), self.num_clients, self.classes_per_client, 10_000, rng)
        return ClientSplits(share_evenly(train, holds, rng), share_evenly(test, holds, rng))
