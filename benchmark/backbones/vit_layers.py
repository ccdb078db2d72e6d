"""Layers of a timm transformer, and the last one of which nothing is read but the class token."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.backbones.changes import NO_CHANGE, Changes, Steps
from benchmark.errors import ConfigurationError
from benchmark.internals import has_hooks

if TYPE_CHECKING:  # timm takes seconds to import, and reading the command line must not wait for it
    from timm.models.vision_transformer import VisionTransformer

# A CPU rounds a product of fewer rows in another way. With so many rows of each client, results do not depend
# on how many clients share a product.
FEWEST_ROWS = 4


def rows_kept(batch: int) -> int:
    """Count the tokens of an image to carry on: one, or in a small batch as many as make :data:`FEWEST_ROWS`.

    A graph that is exported has batches of any size, and carries on as many as the least needs.
    """
    return FEWEST_ROWS if torch.compiler.is_exporting() else math.ceil(FEWEST_ROWS / max(batch, 1))


def is_usual(block: nn.Module) -> bool:
    """Return whether a layer is timm's usual one, without dropout."""
    from timm.layers import Attention
    from timm.models.vision_transformer import Block

    return (
        type(block) is Block
        and type(block.attn) is Attention
        and not any(isinstance(part, nn.Dropout) and part.p for part in block.modules())
        and isinstance(block.drop_path1, nn.Identity)
    )


def reads_the_class_token_alone(vit: "VisionTransformer") -> bool:
    """Return whether the features are the class token's, and the last layer is a usual one."""
    from timm.models.vision_transformer import VisionTransformer

    plain = type(vit) is VisionTransformer and vit.global_pool == "token" and vit.attn_pool is None
    return plain and is_usual(vit.blocks[-1])


def hooked(module: Any) -> bool:
    """Return whether a call of a module does more than its class says: it has hooks, or a ``forward`` of its own."""
    return has_hooks(module) or "forward" in module.__dict__


def _must_be_called(block: Any) -> bool:
    """Return whether a layer, or a part of it that is not called here one by one, is :func:`hooked`."""
    attention, parts = block.attn, block._modules
    return (
        hooked(block)
        or hooked(attention)
        or hooked(attention._modules["attn_drop"])
        or hooked(attention._modules["proj_drop"])
        or hooked(parts["drop_path1"])
        or hooked(parts["drop_path2"])
    )


def after(block: Any, tokens: Tensor, changes: Changes = NO_CHANGE) -> Tensor:
    """All tokens after a layer that :func:`is_usual`, [B, T, d] to [B, T, d], as the tower's parts change it.

    As ``block(tokens)``; but the gradients of queries, keys and values come out in the order of the projection's
    output, so that they need not be copied into it. If the layer or its attention has hooks, ``block`` is called.

    Raises:
        ConfigurationError: parts change a layer that is hooked.
    """
    if _must_be_called(block):
        return _called(block, tokens, changes)
    return _after(block, tokens, None, changes)


def _called(block: nn.Module, tokens: Tensor, changes: Changes = NO_CHANGE) -> Tensor:
    """All tokens after a layer that is called for its hooks."""
    if changes:
        raise ConfigurationError(
            f"the blocks' hooks, or those of their attention, need a {type(block).__name__} to be called, which would "
            "leave out what the parts change in it; hook its mlp or its norms, or write the hook as a part"
        )
    called: Tensor = block(tokens)
    return called


def class_token_after(block: Any, tokens: Tensor, changes: Changes = NO_CHANGE) -> Tensor:
    """The class token after timm's ``Block``, without what the block makes of the other tokens.

    A third of the block's arithmetic is left, keys and values of all tokens. If the layer or its attention has hooks,
    ``block`` is called, with all tokens.

    Args:
        block: of a model that :func:`reads_the_class_token_alone`.
        tokens: [B, T, d], the class token first.
        changes: what the tower's parts do to the layer.

    Returns:
        [B, R, d] with R = :func:`rows_kept`: the class token, and those behind it in the smallest batches.
    """
    rows = rows_kept(tokens.shape[0])
    if _must_be_called(block):
        return _called(block, tokens, changes)[:, :rows]
    return _after(block, tokens, rows, changes)


def _after(block: Any, tokens: Tensor, rows: int | None, changes: Changes) -> Tensor:
    """The first so many tokens after a layer, or all."""
    attention, normed = block.attn, changes.norm("norm1", tokens, block.norm1)
    projected = changes.linear("qkv", normed, attention.qkv(normed))
    packed = projected.unflatten(-1, (3, attention.num_heads, -1))  # [B, T, 3, heads, d / heads]
    q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
    if rows is not None:
        q, normed, tokens = q[:, :, :rows], normed[:, :rows], tokens[:, :rows]
    q, k = attention.q_norm(q), attention.k_norm(k)  # [B, heads, R or T, d / heads]
    if attention.fused_attn:
        attended = F.scaled_dot_product_attention(q, k, v)
    else:
        attended = ((q * attention.scale) @ k.transpose(-2, -1)).softmax(dim=-1) @ v
    attended = attention.norm(attended.transpose(1, 2).flatten(2))
    if attention.gate is not None:
        attended = attended * attention.gate(normed).sigmoid()
    kept: Tensor = tokens + block.ls1(changes.linear("proj", attended, attention.proj(attended)))
    between = changes.norm("norm2", kept, block.norm2)
    made: Tensor = kept + block.ls2(changes.mlp(between, block.mlp, lambda: _mlp_steps(block.mlp)))
    return changes.add_beside(made, lambda: normed)


def _mlp_steps(mlp: Any) -> Steps:
    """Return the first projection of timm's ``Mlp``, what lies between, and the second projection.

    Raises:
        ConfigurationError: it is of another kind, or hooked.
    """
    from timm.layers import Mlp

    if type(mlp) is not Mlp or hooked(mlp):
        raise ConfigurationError(
            f"parts change the projections fc1 and fc2 of timm's Mlp without hooks, and this backbone has a "
            f"{type(mlp).__name__}{' with one' if hooked(mlp) else ''}; choose other projections"
        )
    return mlp.fc1, lambda hidden: mlp.norm(mlp.drop1(mlp.act(hidden))), mlp.fc2


def hidden_width(vit: "VisionTransformer") -> int:
    """Return the width between the two projections of a ViT's MLPs; 0 of an unusual kind."""
    first = getattr(vit.blocks[0].mlp, "fc1", None)
    return first.out_features if isinstance(first, nn.Linear) else 0


def only_convolves(patch_embed: nn.Module) -> bool:
    """Return whether timm's ``PatchEmbed`` is its convolution and nothing else."""
    from timm.layers import PatchEmbed

    return (
        type(patch_embed) is PatchEmbed
        and isinstance(patch_embed.norm, nn.Identity)
        and patch_embed.flatten
        and not patch_embed.dynamic_img_pad
    )


def embedded(patch_embed: Any, x: Tensor) -> Tensor:
    """Patches [B, M, d] of images [B, 3, H, W], as a ``PatchEmbed`` that :func:`only_convolves` makes them.

    On a GPU its convolution, whose stride is its filters' size, is computed as a matrix product. If it has hooks, it is
    called itself.
    """
    if not x.is_cuda or hooked(patch_embed) or hooked(patch_embed.proj) or hooked(patch_embed.norm):
        made: Tensor = patch_embed(x)
        return made
    convolution = patch_embed.proj
    rows, columns = convolution.kernel_size
    patches = x.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)).permute(0, 2, 4, 1, 3, 5)  # [B, h, w, 3, p, p]
    return F.linear(patches.flatten(3).flatten(1, 2), convolution.weight.flatten(1), convolution.bias)


def refuse_hooks(modules: Iterable[tuple[str, nn.Module]], instead: str) -> None:
    """Refuse hooks that would never be called, since a tower calls the parts of these modules and not them.

    Args:
        modules: with their names.
        instead: what to hook.

    Raises:
        ConfigurationError: one of the modules is :func:`hooked`.
    """
    for name, module in modules:
        if hooked(module):
            raise ConfigurationError(
                f"a hook, or another forward, of the backbone's {name} ({type(module).__name__}) would never be "
                f"called: {instead}"
            )
