"""The last layer of a transformer of which nothing is read but the class token."""

import math
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:  # timm takes seconds to import, and reading the command line must not wait for it
    from timm.models.vision_transformer import VisionTransformer

# A CPU rounds a product of fewer rows in another way. With so many rows of each client, results do not depend
# on how many clients share a product.
FEWEST_ROWS = 4


def rows_kept(batch: int) -> int:
    """How many tokens of an image to carry on for :data:`FEWEST_ROWS` of them in a batch; one for all but the least."""
    return math.ceil(FEWEST_ROWS / max(batch, 1))


def reads_the_class_token_alone(vit: "VisionTransformer") -> bool:
    """Whether the features are the class token's, and the last layer is timm's usual one, without dropout."""
    from timm.layers import Attention
    from timm.models.vision_transformer import Block, VisionTransformer

    last = vit.blocks[-1]
    return (
        type(vit) is VisionTransformer
        and vit.global_pool == "token"
        and vit.attn_pool is None
        and type(last) is Block
        and type(last.attn) is Attention
        and not any(isinstance(part, nn.Dropout) and part.p for part in last.modules())
        and isinstance(last.drop_path1, nn.Identity)
    )


def class_token_after(block: Any, tokens: Tensor) -> Tensor:
    """The class token after timm's ``Block``, without what the block makes of the other tokens.

    A third of the block's arithmetic is left, keys and values of all tokens.

    Args:
        block: of a model that :func:`reads_the_class_token_alone`.
        tokens: [B, T, d], the class token first.

    Returns:
        [B, R, d] with R = :func:`rows_kept`: the class token, and those behind it in the smallest batches.
    """
    attention, rows = block.attn, rows_kept(len(tokens))
    normed = block.norm1(tokens)
    q, k, v = attention.qkv(normed).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = attention.q_norm(q[:, :, :rows]), attention.k_norm(k)  # [B, heads, R or T, d / heads]
    if attention.fused_attn:
        attended = F.scaled_dot_product_attention(q, k, v)
    else:
        attended = ((q * attention.scale) @ k.transpose(-2, -1)).softmax(dim=-1) @ v
    attended = attention.norm(attended.transpose(1, 2).flatten(2))
    if attention.gate is not None:
        attended = attended * attention.gate(normed[:, :rows]).sigmoid()
    kept: Tensor = tokens[:, :rows] + block.ls1(attention.proj(attended))
    made: Tensor = kept + block.ls2(block.mlp(block.norm2(kept)))
    return made
