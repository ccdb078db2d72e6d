"""Clients that disagree: what one calls class 3 another calls class 8."""

from collections.abc import Collection, Iterable

import numpy as np
import torch
from torch import Tensor

from benchmark.errors import ConfigurationError
from datamodules.partition import ClientSplits
from datamodules.partition.client_rows import Rows


def reordered(labels: Tensor, splits: ClientSplits, orders: int, num_classes: int) -> Tensor:
    """Count each client's classes in one of several orders, of which no two agree on any class.

    With G orders and C classes, client k's class c gets the label ``(c + (k mod G) floor(C / G)) mod C``, in training
    and in every test; so clients k and k + G agree, and others want opposite things of one model. Label permutations
    as a test of personalization are those of clustered federated learning (Sattler et al., "Clustered Federated
    Learning", IEEE TNNLS 2020; Ghosh et al., NeurIPS 2020), which draws them.

    Args:
        labels: int64 [n], of the pool.
        splits: which images are whose.
        orders: G.
        num_classes: C.

    Returns:
        int64 [n]; images of no client keep theirs.

    Raises:
        ConfigurationError: more orders than classes, a label space of a split's own, or an image that clients of
            different orders hold.
    """
    if orders > num_classes:
        raise ConfigurationError(f"data.label_orders={orders} is more than the {num_classes} classes of the data set")
    if splits.label_spaces:
        raise ConfigurationError(
            f"data.label_orders={orders} does not go with a partition whose splits have label spaces of their own"
        )
    order = torch.full_like(labels, -1)
    for held in (splits.train, splits.test, *splits.others.values()):
        for client, rows in enumerate(held):
            before = order[rows]
            if ((before >= 0) & (before != client % orders)).any():
                raise ConfigurationError(
                    f"data.label_orders={orders}: client {client} shares images with clients that count the classes "
                    "in another order; use a partition where every image is one client's"
                )
            order[rows] = client % orders
    return (labels + order.clamp(min=0) * (num_classes // orders)) % num_classes


def flipped(
    labels: Tensor,
    splits: ClientSplits,
    hostile: Collection[int],
    train: Rows,
    scored: Iterable[Iterable[np.ndarray]],
    num_classes: int,
) -> Tensor:
    """Flip the labels of hostile clients' training images, y to C - 1 - y, as an attack on what all learn.

    Source: the label flipping attack in Fang et al., "Local model poisoning attacks to Byzantine-robust federated
    learning" (USENIX Security 2020).

    Args:
        labels: int64 [n], of the pool.
        splits: which images are whose.
        hostile: whose training images.
        train: training rows by client, without those held out.
        scored: lists of rows by client, whose labels stay.
        num_classes: C.

    Raises:
        ConfigurationError: a label space of a split's own, or a hostile client's training image that an honest client
            trains on, or anybody is scored on.
    """
    if splits.label_spaces:
        raise ConfigurationError(
            "data.label_flipping does not go with a partition whose splits have label spaces of their own"
        )
    others = [
        *(train[client] for client in train if client not in hostile),
        *(rows for held in scored for rows in held),
    ]
    kept = np.zeros(len(labels), dtype=bool)
    kept[np.concatenate(others)] = True
    for client in sorted(hostile):
        if kept[train[client]].any():
            raise ConfigurationError(
                f"data.label_flipping: hostile client {client} shares training images with honest clients or with "
                "tests; use a partition where every image is one client's"
            )
    changed = torch.from_numpy(np.unique(np.concatenate([train[client] for client in hostile])))
    made = labels.clone()
    made[changed] = num_classes - 1 - labels[changed]
    return made
