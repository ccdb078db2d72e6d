"""Attention and the gated network behind it, of networks that make prompts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
