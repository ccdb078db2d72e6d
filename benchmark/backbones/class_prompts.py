"""The fixed part of text prompts: what all classes have in common, and what is a class's own."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ClassPrompts(nn.Module):
    """The prompts of a list of classes, without their learnable context.

    Args:
        num_classes: C.
        num_context: positions L that the context takes.

    Attributes:
        own_tokens: ids of what is a class's own, [C, S].
    """

    own_tokens: Tensor

    def __init__(self, num_classes: int, num_context: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_context = num_context


class CausalPrompts(ClassPrompts):
    """The prompts of a causal text tower, without their learnable context.

    A prompt is ``[start, context, words in common, own words, end]``. What is the same for all classes has P
    positions (start, context and words in common), what is a class's own has S. Own tokens are aligned at
    their end: the end-of-text token is the last, and shorter names have padding before them, which nothing attends to.

    Args:
        words: token ids of each class after the context, the end-of-text token last; none may be empty.
        start_token: id of the start-of-text token.
        num_context: positions L that the context takes.

    Attributes:
        num_classes: C.
        num_context: L.
        shared_tokens: ids [P]; those of the context's positions mean nothing.
        own_tokens: ids [C, S].
        own_positions: the position of every own token in its prompt, [C, S].
        own_mask: added to the attention of own tokens to own tokens, [C, S, S]: 0 or -inf.
    """

    shared_tokens: Tensor
    own_positions: Tensor
    own_mask: Tensor

    def __init__(self, words: Sequence[Sequence[int]], start_token: int, num_context: int) -> None:
        super().__init__(len(words), num_context)
        common = 0
        while common < min(map(len, words)) - 1 and len({ids[common] for ids in words}) == 1:
            common += 1
        shared = [start_token] + [start_token] * num_context + list(words[0][:common])
        longest = max(map(len, words)) - common
        padding = torch.tensor([longest - (len(ids) - common) for ids in words])[:, None]
        place = torch.arange(longest)
        self.register_buffer("shared_tokens", torch.tensor(shared))
        self.register_buffer(
            "own_tokens",
            torch.tensor([[ids[-1]] * (longest - len(ids) + common) + list(ids[common:]) for ids in words]),
        )
        self.register_buffer("own_positions", len(shared) + (place - padding).clamp(min=0))
        unseen = (place[None, :] > place[:, None]) | (place < padding)[:, None, :]
        self.register_buffer("own_mask", torch.zeros(unseen.shape).masked_fill(unseen, float("-inf")))


class PaddedPrompts(ClassPrompts):
    """The prompts of a text tower that sees its padding: ``[lead, context, words, end, padding]``, all of one length.

    A tower whose attention is not causal, or that is read at its last position, makes other features of a text when
    other tokens follow. So every class has all T positions of its own.

    Args:
        words: token ids of each class after the context, what ends a text last; none may be empty.
        lead: ids of what stands before the context.
        pad: id of the padding.
        context_length: T, positions of the text tower.
        num_context: positions L that the context takes.

    Attributes:
        num_classes: C.
        num_context: L.
        lead_tokens: ids [K].
        own_tokens: ids [C, T - K]; the first T - K - L stand behind a context of L tokens, the rest are padding.
        ends: the position of the last token of every class that is no padding, behind a context of L tokens, [C].
    """

    lead_tokens: Tensor
    ends: Tensor

    def __init__(
        self, words: Sequence[Sequence[int]], lead: Sequence[int], pad: int, context_length: int, num_context: int
    ) -> None:
        super().__init__(len(words), num_context)
        room = context_length - len(lead)
        self.register_buffer("lead_tokens", torch.tensor(lead, dtype=torch.long))
        self.register_buffer("own_tokens", torch.tensor([[*ids] + [pad] * (room - len(ids)) for ids in words]))
        self.register_buffer("ends", torch.tensor([len(lead) + num_context + len(ids) - 1 for ids in words]))
