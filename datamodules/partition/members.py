"""Images of every class, and how they are dealt out."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from datamodules.partition.client_rows import ClientRows, Indices
from datamodules.source import ImagePool


def members_by_class(labels: Indices, within: NDArray[np.bool_] | None = None) -> list[Indices]:
    """Indices of each class that occurs in ``labels``, by ascending class; only those where ``within`` is True."""
    kept = np.ones(len(labels), dtype=bool) if within is None else within
    return [np.flatnonzero((labels == c) & kept) for c in np.unique(labels)]


def members_by_side(pool: ImagePool) -> tuple[list[Indices], list[Indices]]:
    """Indices by class, of the official train set and of the official test set."""
    labels, test = pool.labels.numpy(), pool.test.numpy()
    return members_by_class(labels, ~test), members_by_class(labels, test)


def check_class_count(name: str, wanted: int, classes: int) -> None:
    """Refuse more classes per client than the data have."""
    if wanted > classes:
        raise ConfigurationError(f"{name}={wanted} is more than the {classes} classes of the data set")


def deal_stratified(members: Sequence[Indices], num_clients: int, rng: np.random.Generator) -> ClientRows:
    """Deal every class's shuffled images round and round over the clients.

    Client sizes differ by at most one image, and so does what two clients hold of a class.
    """
    dealt = np.concatenate([rng.permutation(images) for images in members])
    owners = np.arange(len(dealt)) % num_clients
    return ClientRows(dealt[np.argsort(owners, kind="stable")], np.bincount(owners, minlength=num_clients))


def draw_shots(members: Sequence[Indices], shots: int | None, rng: np.random.Generator) -> list[Indices]:
    """Draw ``shots`` images of each class without replacement; all of a class that has fewer, all if None."""
    return [images if shots is None else rng.permutation(images)[:shots] for images in members]
