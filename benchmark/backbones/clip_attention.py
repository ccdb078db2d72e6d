"""Attention of CLIP's blocks without ``nn.MultiheadAttention``, which has no rule for ``vmap``."""

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.backbones.changes import Changes, Steps
from benchmark.errors import ConfigurationError
from benchmark.internals import has_hooks

if TYPE_CHECKING:  # open_clip takes seconds to import, and reading the command line must not wait for it
    from open_clip.transformer import ResidualAttentionBlock


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[..., C, T, w] to [..., h, C, T, w / h]."""
    # Contiguous, so that a product sees the same layout whatever the number of clients: its rounding depends on it.
    return x.unflatten(-1, (heads, -1)).movedim(-2, -4).contiguous()


def query_key_value(block: "ResidualAttentionBlock", x: Tensor, changes: Changes) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [..., C, T, w] to the queries, keys and values of a block's attention, each [..., h, C, T, w / h]."""
    attention, normed = block.attn, changes.norm("norm1", x, block.ln_1)
    projected = F.linear(normed, cast(Tensor, attention.in_proj_weight), attention.in_proj_bias)
    projected = changes.linear("qkv", normed, projected)
    q, k, v = (split_heads(part, attention.num_heads) for part in projected.chunk(3, dim=-1))
    return q, k, v


def finish(block: "ResidualAttentionBlock", x: Tensor, attended: Tensor, changes: Changes) -> Tensor:
    """The rest of a block after its attention: [..., C, T, w] and [..., C, T, w] to [..., C, T, w]."""
    kept = x + block.ls_1(changes.linear("proj", attended, block.attn.out_proj(attended)))
    between = changes.norm("norm2", kept, block.ln_2)
    made = kept + block.ls_2(changes.mlp(between, block.mlp, lambda: _mlp_steps(block.mlp)))
    return changes.add_beside(made, lambda: changes.norm("norm1", x, block.ln_1))


def _mlp_steps(mlp: nn.Sequential) -> Steps:
    """Return the first projection of a block's MLP, what lies between, and the second projection."""
    if has_hooks(mlp):
        raise ConfigurationError(
            "parts change the projections fc1 and fc2 of an MLP that is hooked, whose hook would not be called; choose "
            "other projections, or hook ln_1 or ln_2"
        )
    return mlp.c_fc, mlp.gelu, mlp.c_proj  # type: ignore[return-value]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of [..., h, C, Q, d] to [..., h, C, T, d]; ``mask`` [Q, T] is added. Returns [..., C, Q, h * d]."""
    if q.is_cuda and mask is None:
        attended = F.scaled_dot_product_attention(q, k, v)
    else:  # elsewhere fused attention, or that of its gradients, has no rule for vmap, which would warn and loop
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores + mask
        attended = scores.softmax(dim=-1) @ v
    return attended.movedim(-4, -2).flatten(-2)


def attend_after(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, own_mask: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attention of each class's own tokens to what all classes share and to themselves.

    Args:
        q: [..., h, C, Q, d].
        k: keys of the shared positions, [..., h, 1 or C, P, d].
        v: values of the shared positions.
        own_k: keys of the own tokens, [..., h, C, S, d].
        own_v: values of the own tokens.
        own_mask: added for the own tokens, [C, Q, S].
        mask: added for the shared positions, [P]; None for nothing.

    Returns:
        [..., C, Q, h * d].
    """
    q = q * q.shape[-1] ** -0.5
    # Where the shared positions have one row, einsum makes one product of all classes.
    scores = torch.einsum("...cqd,...ckd->...cqk", q, k)
    if mask is not None:
        scores = scores + mask
    own_scores = q @ own_k.transpose(-2, -1) + own_mask
    # In the first layer the own tokens are the same for all images of the batch.
    own_scores = own_scores.expand(*scores.shape[:-1], -1)
    weights = torch.cat([scores, own_scores], dim=-1).softmax(dim=-1)
    to_shared, to_own = weights.split([scores.shape[-1], own_scores.shape[-1]], dim=-1)
    attended = torch.einsum("...cqk,...ckd->...cqd", to_shared, v) + to_own @ own_v
    return attended.movedim(-4, -2).flatten(-2)
