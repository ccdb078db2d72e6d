"""open_clip's text towers: what is read of them, and the pass of those that see their padding."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.backbones.changes import Changes, Places
from benchmark.backbones.class_prompts import CausalPrompts, PaddedPrompts
from benchmark.backbones.clip_attention import attend, finish, query_key_value
from benchmark.backbones.hub_tokenizer import HubTokenizer
from benchmark.backbones.parts import TowerPart
from benchmark.errors import ConfigurationError

if TYPE_CHECKING:  # open_clip takes seconds to import, and reading the command line must not wait for it
    from open_clip import SimpleTokenizer


def text_of(model: nn.Module) -> Any:
    """Return the module of an open_clip model that holds its text tower: the model itself for ``open_clip.CLIP``."""
    return model if hasattr(model, "token_embedding") else model.text


def class_token_of(text: Any) -> Tensor | None:
    """Return the token that CoCa's text tower appends to every text and reads, [w]; None for other towers."""
    token: Tensor | None = getattr(text, "cls_emb", None)
    return token


def differing_text(text: Any, tokenizer: "SimpleTokenizer | HubTokenizer") -> str | None:
    """Name what a text tower has that is not stepped here; None if there is nothing."""
    from open_clip.transformer import ResidualAttentionBlock

    if any(type(block) is not ResidualAttentionBlock for block in text.transformer.resblocks):
        return "its text tower's attention blocks are of another kind"
    if class_token_of(text) is None and not (_read_last(text) or _read_at_end(text, tokenizer)):
        return "its text features are pooled in another way than at the last position or at the end of the text"
    return None


def text_prompts(
    text: Any, tokenizer: "SimpleTokenizer | HubTokenizer", texts: Sequence[str], num_context: int
) -> CausalPrompts | PaddedPrompts:
    """Return prompts of a context followed by these texts, as a text tower takes them.

    Raises:
        ConfigurationError: no text, or one that is too long with the context.
    """
    if not texts:
        raise ConfigurationError("prompts need at least one class name, got none")
    lead, tail, pad = _marks(tokenizer)
    words = [[*tokenizer.encode(text), *tail] for text in texts]
    for of, ids in zip(texts, words, strict=True):
        if (length := len(lead) + num_context + len(ids)) > text.context_length:
            raise ConfigurationError(
                f"the prompt of {of!r} has {length} tokens ({num_context} of them context), the text tower takes "
                f"{text.context_length}; shorten the name or the context"
            )
    ends = class_token_of(text) is None and _read_at_end(text, tokenizer)
    if text.attn_mask is not None and ends and len(lead) == 1:
        return CausalPrompts(words, lead[0], num_context)
    return PaddedPrompts(words, lead, pad, text.context_length, num_context)


def padded_features(
    text: Any,
    prompts: PaddedPrompts,
    context: Tensor,
    given: Sequence[TowerPart],
    prompted: Sequence[TowerPart],
    length: Tensor | None,
) -> Tensor:
    """Features of all classes under a context, with all positions of every class, as open_clip has them.

    Args:
        text: of ``text_of``.
        prompts: of ``text_prompts``.
        context: [..., 1 or C, L, w].
        given: what is put into the tower.
        prompted: those of them whose prompts take the context's place in deeper layers.
        length: only so many of the L tokens, the first, are there, and so much more padding stands at the end. None for
            a tower with a class token.

    Returns:
        [..., C, e], not normalised.
    """
    L, K, T = prompts.num_context, len(prompts.lead_tokens), text.context_length
    context = context.expand(*context.shape[:-3], prompts.num_classes, -1, -1)
    own = prompts.own_tokens if length is not None else prompts.own_tokens[:, : T - K - L]
    words = [text.token_embedding(ids).expand(*context.shape[:-2], -1, -1) for ids in (prompts.lead_tokens, own)]
    tokens = torch.cat([words[0], context, words[1]], dim=-2)
    if (class_token := class_token_of(text)) is not None:
        assert length is None
        tokens = torch.cat([tokens, class_token.expand(*context.shape[:-2], 1, -1)], dim=-2)
    place = torch.arange(tokens.shape[-2], device=tokens.device)
    absent = 0 if length is None else L - length
    positions = (place - absent * (place >= K + L)).clamp(max=len(text.positional_embedding) - 1)
    tokens = tokens + F.embedding(positions, text.positional_embedding)
    mask = _mask(text, prompts, place)
    if length is not None:
        missing = ((place >= K + length) & (place < K + L)) | (place >= T + absent)
        others = place != place[:, None]  # a place that attends to nothing would be NaN
        unseen = torch.zeros(others.shape, device=place.device).masked_fill(missing & others, float("-inf"))
        mask = unseen if mask is None else mask + unseen
    places = Places(prompted, K, [L])
    for layer, block in enumerate(text.transformer.resblocks):
        changes = Changes(given, layer)
        tokens = places.fill(layer, tokens)
        tokens = finish(block, tokens, attend(*query_key_value(block, tokens, changes), mask), changes)
    if class_token is not None:
        read = place == T
    else:
        read = place == T - 1 + absent if _read_last(text) else place == prompts.ends[:, None]
    # A sum, since the gradient of a choice by index adds in any order on a GPU.
    tokens = torch.where(read[..., None], tokens, 0).sum(dim=-2)
    normed = Changes(given, len(text.transformer.resblocks)).norm("final", tokens, text.ln_final)
    return project_text(text, normed)


def project_text(text: Any, tokens: Tensor) -> Tensor:
    """Return features of normed tokens, [..., w] to [..., e]."""
    projection = text.text_projection
    if projection is None:
        return tokens
    features: Tensor = projection(tokens) if isinstance(projection, nn.Linear) else tokens @ projection
    return features


def _marks(tokenizer: "SimpleTokenizer | HubTokenizer") -> tuple[list[int], list[int], int]:
    """Return the ids before and behind a text's own, and that of the padding."""
    if isinstance(tokenizer, HubTokenizer):
        return tokenizer.lead, tokenizer.tail, tokenizer.pad
    return [tokenizer.sot_token_id], [tokenizer.eot_token_id], 0


def _pooling(text: Any) -> str:
    return text.text_pool_type if hasattr(text, "text_pool_type") else text.pool_type


def _read_last(text: Any) -> bool:
    """Return whether features are those of the last position."""
    return _pooling(text) == "last"


def _read_at_end(text: Any, tokenizer: "SimpleTokenizer | HubTokenizer") -> bool:
    """Return whether features are those of the token that ends a text."""
    if _pooling(text) == "argmax":  # the end of the text has the highest id of open_clip's own tokenizer
        return not isinstance(tokenizer, HubTokenizer)
    eos = text.text_eos_id if hasattr(text, "text_eos_id") else text.eos_id
    return _pooling(text) == "eos" and _marks(tokenizer)[1][0] == eos


def _mask(text: Any, prompts: PaddedPrompts, place: Tensor) -> Tensor | None:
    """Return what is added to the attention at these places, [n, n] or [C, n, n]; None for nothing."""
    causal = None
    if text.attn_mask is not None:
        later = place > place[:, None]
        causal = torch.zeros(later.shape, device=place.device).masked_fill(later, float("-inf"))
    if class_token_of(text) is None:
        return causal
    # open_clip hides padding here, and is one position late, as CoCa's weights were trained: ask it.
    K, L, own = len(prompts.lead_tokens), prompts.num_context, prompts.own_tokens
    shown = own.new_full((len(own), K + L), text.pad_id + 1)
    ids = torch.cat([shown, own], dim=1)[:, : text.context_length]
    hidden = text._build_additive_mask(ids, len(place), text.positional_embedding.dtype)[:: text.heads]
    return hidden if causal is None else causal + hidden
