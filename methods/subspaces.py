"""Products of low-rank factors, the subspaces that they span, and clusters of clients by these."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

#: Clusters that are looked for, where their number is not given.
FEWEST, MOST = 2, 10


def mean_product(a: Tensor, b: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors of rank r of the nearest matrix to ``sum_k w_k B_k A_k`` (FlexLoRA): B has orthonormal columns.

    The sum is never formed: its factors are stacked, and an S r x S r matrix is decomposed. The largest entry of each
    column of B is positive.

    Args:
        a: A_k, [S, ..., r, in].
        b: B_k, [S, ..., out, r].
        weights: w_k, [S], which sum up to 1.

    Returns:
        A [..., r, in] and B [..., out, r], float64 in host memory.
    """
    a, b, weights = a.double().cpu(), b.double().cpu(), weights.double().cpu()
    rank = a.shape[-2]
    shares = weights.view(-1, *[1] * (b.ndim - 1))
    left = torch.cat([*(shares * b)], dim=-1)  # [..., out, S r]
    right = torch.cat([*a], dim=-2)  # [..., S r, in]
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.mT)
    u, sizes, v = torch.linalg.svd(r_left @ r_right.mT)
    made_b, made_a = q_left @ u[..., :rank], sizes[..., :rank, None] * (q_right @ v.mT[..., :rank]).mT
    largest = made_b.gather(-2, made_b.abs().argmax(-2, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(made_b)
    return signs.mT * made_a, signs * made_b


def basis(b: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of B, [..., out, r], in double precision."""
    return torch.linalg.svd(b.double(), full_matrices=False).U


def distances(one: Tensor, other: Tensor) -> Tensor:
    """Return ``1 - ||U^T V||_F^2 / r`` of subspaces, the mean over all but the last two dimensions; in [0, 1].

    Args:
        one: bases U, [N, ..., out, r].
        other: bases V, [M, ..., out, r].

    Returns:
        [N, M].
    """
    near = (one.unsqueeze(1).mT @ other).square().sum((-2, -1)) / one.shape[-1]
    return 1 - near.flatten(2).mean(2) if near.ndim > 2 else 1 - near


def gaps(affinity: Tensor) -> Tensor:
    """Return ``lambda_{K+1} - lambda_K`` of the normalised Laplacian for K = 1 to N - 1, eigenvalues ascending."""
    scale = affinity.sum(1).rsqrt()
    laplacian = torch.eye(len(affinity), dtype=affinity.dtype) - scale[:, None] * affinity * scale
    return torch.linalg.eigvalsh(laplacian).diff()


def spectral_clusters(apart: Tensor, count: int | None, seed: int) -> Tensor:
    """Cluster by distances, with the affinity ``exp(-d^2 / (2 sigma^2))``, sigma their median (of an even number of
    pairs, the lower of the two in the middle).

    Args:
        apart: d, [N, N].
        count: K; None takes the largest gap between 2 and 10.
        seed: of the clustering's own draws.

    Returns:
        int64 [N], numbered by their first members; one cluster where all are alike.
    """
    members = len(apart)
    others = apart[~torch.eye(members, dtype=torch.bool)]
    sigma = others.median() if len(others) else apart.new_zeros(())
    if members < 2 or sigma <= 0 or count == 1:
        return torch.zeros(members, dtype=torch.int64)
    affinity = torch.exp(-apart.square() / (2 * sigma**2))
    if count is None:
        found = gaps(affinity)[FEWEST - 1 : MOST]
        count = FEWEST + int(found.argmax()) if len(found) else members
    from sklearn.cluster import SpectralClustering  # slow to import

    made = SpectralClustering(
        min(count, members), affinity="precomputed", random_state=seed % 2**32, assign_labels="cluster_qr"
    ).fit_predict(affinity.numpy())
    return torch.from_numpy(_renumbered(made.tolist()))


def _renumbered(labels: Sequence[int]) -> np.ndarray:
    """Number labels by their first occurrence."""
    order = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return np.array([order[label] for label in labels], dtype=np.int64)
