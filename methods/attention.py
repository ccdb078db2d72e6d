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
