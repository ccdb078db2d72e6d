"""Attention and the gated network behind it, of networks that make prompts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.masked import in_float32


def attend(queries: Tensor, keys: Tensor, values: Tensor, heads: int, is_there: Tensor) -> Tensor:
    """Return what queries take of values, by heads of equal width: ``softmax(q k^T / sqrt(w / heads)) v``.

    Args:
        queries: [..., M, w].
        keys: [D, w].
        values: [D, w].
        heads: of them, divides w.
        is_there: which keys count, bool [D].

    Returns:
        [..., M, w].
    """
    q, k, v = (each.unflatten(-1, (heads, -1)) for each in (queries, keys, values))
    scores = torch.einsum("...mhi,dhi->...hmd", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~is_there, -torch.inf).softmax(-1)
    return torch.einsum("...hmd,dhi->...mhi", weights, v).flatten(-2)


def gated(inner: nn.Linear, outer: nn.Linear, x: Tensor) -> Tensor:
    """Return ``outer(a * gelu(b))``, a and b the halves of ``inner(x)``; [..., w] of [..., w]."""
    value, gate = inner(x).chunk(2, dim=-1)
    made: Tensor = outer(value * F.gelu(gate))
    return made


def begin_together(query: nn.Linear, key: nn.Linear, value: nn.Linear, out: nn.Linear) -> None:
    """Draw projections as torch's attention does: Xavier's bound of one matrix of the first three, biases 0."""
    for projection in (query, key, value):
        bound = (6 / (3 * projection.out_features + projection.in_features)) ** 0.5
        nn.init.uniform_(projection.weight, -bound, bound)
    for projection in (query, key, value, out):
        nn.init.zeros_(projection.bias)


@in_float32
def memory_attention(images: Tensor, keys: Tensor, values: Tensor, beta: float) -> Tensor:
    """Return ``exp(-beta (1 - f K^T)) V``, a vote of the remembered images, the nearer the stronger (Tip-Adapter).

    Args:
        images: f, L2-normalised [B, e].
        keys: K, L2-normalised [n, e].
        values: V, one-hot labels [n, C]; rows of zeros do not vote.
        beta: sharpness.

    Returns:
        [B, C].
    """
    return torch.exp(-beta * (1 - images @ keys.T)) @ values


@in_float32
def spatial_attention(images: Tensor, positions: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Compare image and classes by cosines, after each has attended to the other (CALIP, Guo et al., AAAI 2023).

    With ``A = 2 F_s W^T`` of the positions' features F_s [M, e] and the classes' W [C, e]: ``W_a`` is the mean of F_s
    weighted with A's softmax over positions; ``f_a`` is the mean plus the maximum over positions of the mean of W
    weighted with A's softmax over classes.

    Args:
        images: f, [B, e].
        positions: F_s, [B, M, e].
        classes: W, [C, e].

    Returns:
        ``f W_a^T`` and ``f_a W^T``, [B, C] each.
    """
    affinity = 2 * positions @ classes.T
    attended_classes = affinity.softmax(dim=1).transpose(1, 2) @ positions
    attended_positions = affinity.softmax(dim=2) @ classes
    attended_images = attended_positions.mean(dim=1) + attended_positions.amax(dim=1)
    return torch.einsum("be,bce->bc", images, attended_classes), attended_images @ classes.T
