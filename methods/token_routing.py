"""Mixing weights that need no training: an image's tokens in clusters of bounded size, matched to fixed keys."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.seeds import keyed_initialization, numpy_generator

#: Of the clustering: at most so many assignments, the step of a cluster's penalty for each token that it is too large,
#: and the mean move of centres at which it stops.
MOST, PENALTY_STEP, STANDS_STILL = 100, 1e-4, 1e-4


def capacities(tokens: int, clusters: int, factor: int) -> list[int]:
    """Return how many tokens each cluster takes: ``factor floor(N / K)``, and one more of the first ``N mod K``."""
    each, left = divmod(tokens, clusters)
    return [factor * each + (cluster < left) for cluster in range(clusters)]


def orthonormal_keys(clusters: int, width: int) -> Tensor:
    """Draw K orthonormal rows, [K, v], the same for all clients of a run."""
    with keyed_initialization("routing keys"):
        return torch.linalg.qr(torch.randn(width, clusters))[0].T.contiguous()


def start_tokens(images: Tensor, tokens: int, clusters: int, seed: int) -> Tensor:
    """Draw which tokens an image's clusters start from, int64 [B, K].

    The key of a draw is the image's mean in thousandths. So it depends on no other image, and next to never on how
    pixels were rounded; images with the same key start from the same places.

    Args:
        images: [B, 3, H, W].
        tokens: N, of an image.
        clusters: K, at most N.
        seed: of the run.
    """
    keys = (1000 * images.double().mean((1, 2, 3))).round().long().tolist()
    drawn = [numpy_generator(seed, "start tokens", key).choice(tokens, clusters, replace=False) for key in keys]
    return torch.from_numpy(np.stack(drawn)).to(images.device)


def take_in_turn(costs: Tensor, room: Tensor) -> Tensor:
    """Return which cluster each token goes to, bool [B, N, K]; none where that is full.

    Every token prefers the cluster of its smallest cost. The tokens of smallest cost come first.

    Args:
        costs: [B, N, K].
        room: capacities, [K].
    """
    lowest, preferred = costs.min(2)
    order = lowest.argsort(dim=1, stable=True).unsqueeze(2).expand_as(costs)
    wants = F.one_hot(preferred, costs.shape[2]).gather(1, order)
    goes = (wants > 0) & (wants.cumsum(1) <= room)
    return torch.zeros_like(goes).scatter(1, order, goes)


def bounded_clusters(tokens: Tensor, start: Tensor, room: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Cluster each image's tokens by k-means, with at most so many in each cluster.

    A token's cost of a cluster is its distance to the centre plus the cluster's penalty, which moves by ``PENALTY_STEP
    (size - capacity)`` after each assignment (``take_in_turn``). A centre is the mean of its tokens. Empty clusters
    start anew, without penalty, at the tokens that are farthest from their nearest centre. Once centres stand still,
    those before the last move are taken.

    Args:
        tokens: [B, N, v].
        start: tokens that the centres start from, int64 [B, K].
        room: capacities, K of them.

    Returns:
        Centres [B, K, v] and sizes [B, K], in float64: what is rounded would else decide where a token goes.
    """
    tokens = tokens.double()
    limit = torch.tensor(room, device=tokens.device)
    centres = _picked(tokens, start)
    penalties = torch.zeros_like(centres[..., 0])
    sizes, ended = penalties, torch.zeros_like(penalties[:, 0], dtype=torch.bool)
    for _ in range(MOST):
        distances = torch.cdist(tokens, centres, compute_mode="donot_use_mm_for_euclid_dist")
        goes = take_in_turn(distances + penalties.unsqueeze(1), limit).to(tokens)
        made = goes.sum(1)
        sizes = torch.where(ended.unsqueeze(1), sizes, made)
        empty = made == 0
        farthest = distances.min(2)[0].argsort(dim=1, descending=True, stable=True)
        anew = _picked(tokens, farthest.gather(1, (empty.cumsum(1) - 1).clamp(min=0)))
        means = goes.mT @ tokens / made.clamp(min=1).unsqueeze(2)
        moved = torch.where(empty.unsqueeze(2), anew, means)
        penalties = torch.where(empty, 0.0, penalties + PENALTY_STEP * (made - limit))
        ended = ended | ((moved - centres).norm(dim=2).mean(1) < STANDS_STILL)
        centres = torch.where(ended[:, None, None], centres, moved)
        if ended.all():
            break
    return centres, sizes


def matched_clusters(centres: Tensor, keys: Tensor) -> Tensor:
    """Return the cluster of each key, int64 [B, K]: one to one, of the greatest sum of cosines.

    Args:
        centres: [B, K, v].
        keys: [K, v], of length 1.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import

    cosines = (keys.to(centres) @ F.normalize(centres, dim=2).mT).cpu().numpy()
    matched = [linear_sum_assignment(of_image, maximize=True)[1] for of_image in cosines]
    return torch.from_numpy(np.stack(matched)).to(centres.device)


def routing_weights(tokens: Tensor, start: Tensor, keys: Tensor, factor: int) -> Tensor:
    """Return omega, float32 [B, K]: of the tokens that a cluster took, the share in that of each key.

    Args:
        tokens: [B, N, v].
        start: tokens that the clusters start from, int64 [B, K].
        keys: [K, v], of length 1.
        factor: how many times the tokens the clusters have room for.
    """
    centres, sizes = bounded_clusters(tokens, start, capacities(tokens.shape[1], len(keys), factor))
    sizes = sizes.gather(1, matched_clusters(centres, keys))
    return (sizes / sizes.sum(1, keepdim=True)).float()


def _picked(tokens: Tensor, index: Tensor) -> Tensor:
    """Return tokens [B, K, v] at index [B, K]."""
    return tokens.gather(1, index.unsqueeze(2).expand(-1, -1, tokens.shape[2]))
