"""Images held out of the training images, to tune on."""

import numpy as np

from benchmark.errors import ConfigurationError
from benchmark.seeds import derived_seed
from datamodules.source import ImagePool


def cut_validation(
    train: dict[int, np.ndarray], pool: ImagePool, fraction: float, seed: int
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Cut the training rows of each client in two, the second of about a fraction.

    Images that show the same thing are on one side, also where several clients hold them: that on which the first of
    these clients has them.

    Args:
        train: per client its rows of the pool.
        pool: of all images.
        fraction: of a client's images that are held out; at least one is.
        seed: of the draw.

    Raises:
        ConfigurationError: a client would train on no image, or hold none out.
    """
    group = np.unique(pool.group.numpy(), return_inverse=True)[1]
    sides = np.zeros(group.max() + 1, dtype=np.int8)  # of each group: not drawn yet, trains (1), held out (2)
    cut = {}
    for client, rows in train.items():
        groups, first = np.unique(group[rows], return_index=True)
        title = f"data.val_fraction={fraction}"
        if len(groups) < 2:
            raise ConfigurationError(f"{title}: client {client} has too few training images to hold any out")
        _draw_sides(
            sides, groups, pool.labels.numpy()[rows][first], fraction, derived_seed(seed, "val", client) % 2**32
        )
        held = sides[group[rows]] == 2
        if held.all():
            raise ConfigurationError(
                f"{title} leaves client {client} none of its {len(rows)} images to train on; lower it"
            )
        if not held.any():
            raise ConfigurationError(
                f"{title} holds none of client {client}'s images out, as what they show trains at other clients; raise "
                "it, or take another data.partition_seed"
            )
        cut[client] = rows[~held], rows[held]
    return cut


def _draw_sides(sides: np.ndarray, groups: np.ndarray, labels: np.ndarray, fraction: float, seed: int) -> None:
    """Draw sides for those of a client's groups that have none.

    Args:
        sides: of all groups, written to.
        groups: the client's, at least two.
        labels: of each of them.
        fraction: of the client's groups that are held out.
        seed: of the draw.
    """
    held = max(1, round(fraction * len(groups)))
    open_ = sides[groups] == 0
    missing = min(held - int((sides[groups] == 2).sum()), int(open_.sum()))
    new, of_new = groups[open_], labels[open_]
    sides[new] = 1
    if 0 < missing < len(new):
        counts = np.unique(of_new, return_counts=True)[1]
        allowed = counts.min() >= 2 and missing >= len(counts) and len(new) - missing >= len(counts)
        from sklearn.model_selection import train_test_split  # slow to import

        _, drawn = train_test_split(
            np.arange(len(new)), test_size=missing, stratify=of_new if allowed else None, random_state=seed
        )
        sides[new[drawn]] = 2
    elif missing > 0:
        sides[new] = 2
