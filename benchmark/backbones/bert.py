"""A frozen BERT (Devlin et al., NAACL 2019) that takes contexts among its words, and what text towers make of it."""

import re
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.backbones.class_prompts import ClassPrompts
from benchmark.backbones.parts import TowerPart
from benchmark.backbones.two_towers import TwoTowers
from benchmark.backbones.wordpiece import WordPiece
from benchmark.errors import ConfigurationError

#: Epsilon of the norms of all of BERT's sizes.
EPSILON = 1e-12
PARTS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "grow": "intermediate.dense",
    "shrink": "output.dense",
}
NORMS = {"norm1": "attention.output.LayerNorm", "norm2": "output.LayerNorm"}


class Bert(nn.Module):
    """Layers with the norm after each half, and GELU.

    Attention is written out, as ``nn.MultiheadAttention`` has no rule for ``vmap``.

    Args:
        weights: by the names of ``BertModel``.
        head_width: of an attention head: 32 for MiniLM, 64 for BERT's own sizes.

    Attributes:
        words: embeddings of the vocabulary, [V, w].
        positions: embeddings of positions, that of the one type of token added, [P, w].
        width: w.

    Raises:
        ConfigurationError: they are no BERT's.
    """

    words: Tensor
    positions: Tensor

    def __init__(self, weights: Mapping[str, Tensor], head_width: int) -> None:
        super().__init__()
        numbers = [int(found[1]) for name in weights if (found := re.match(r"encoder\.layer\.(\d+)\.", name))]
        try:
            words, place = (
                weights["embeddings.word_embeddings.weight"],
                weights["embeddings.position_embeddings.weight"],
            )
            self.words = nn.Parameter(words, requires_grad=False)
            kind = weights["embeddings.token_type_embeddings.weight"][0]
            self.positions = nn.Parameter(place + kind, requires_grad=False)
            self.width = words.shape[1]
            self.norm = _norm(weights, "embeddings.LayerNorm")
            of_layers = [f"encoder.layer.{n}." for n in range(1 + max(numbers))]
            self.layers = nn.ModuleList(_Layer(weights, prefix, head_width) for prefix in of_layers)
            if self.width % head_width:
                raise ValueError(f"a width of {self.width} has no heads of {head_width}")
        except (KeyError, ValueError, RuntimeError, IndexError) as error:
            raise ConfigurationError(f"the weights of the text tower are no BERT's ({error})") from error

    def forward(self, tokens: Tensor, there: Tensor) -> Tensor:
        """Tokens of the last layer.

        Args:
            tokens: embeddings of words and contexts, [..., T, w].
            there: where there is a token, bool [C, T], the last but one dimensions of ``tokens``.

        Returns:
            [..., T, w].
        """
        x: Tensor = self.norm(tokens + self.positions[: tokens.shape[-2]])
        # What is not there gets no attention; with -inf a row of padding alone would be NaN.
        unseen = torch.zeros_like(there, dtype=x.dtype).masked_fill(~there, torch.finfo(x.dtype).min)
        for layer in self.layers:
            x = layer(x, unseen[:, None, None, :])
        return x


def mean_of_tokens(tokens: Tensor, there: Tensor) -> Tensor:
    """Return the mean of tokens [..., C, T, w] over those that are there, bool [C, T]: [..., C, w]."""
    share = there.to(tokens.dtype) / there.sum(-1, keepdim=True)
    return (tokens * share.unsqueeze(-1)).sum(-2)


class _Layer(nn.Module):
    """Attention and a perceptron, each followed by its norm."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    grow: nn.Linear
    shrink: nn.Linear
    norm1: nn.LayerNorm
    norm2: nn.LayerNorm

    def __init__(self, weights: Mapping[str, Tensor], prefix: str, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        for name, part in PARTS.items():
            weight, bias = (weights[f"{prefix}{part}.{kind}"] for kind in ("weight", "bias"))
            linear = nn.Linear(weight.shape[1], weight.shape[0])
            linear.load_state_dict({"weight": weight, "bias": bias})
            setattr(self, name, linear)
        for name, part in NORMS.items():
            setattr(self, name, _norm(weights, prefix + part))

    def forward(self, x: Tensor, unseen: Tensor) -> Tensor:
        """Return [..., T, w] of tokens [..., T, w]; ``unseen`` is added to the attention, [C, 1, 1, T]."""
        size = self.head_width
        q, k, v = (each(x).unflatten(-1, (-1, size)).transpose(-2, -3) for each in (self.query, self.key, self.value))
        weights = (q @ k.mT / size**0.5 + unseen).softmax(-1)
        x = self.norm1(x + self.out((weights @ v).transpose(-2, -3).flatten(-2)))
        made: Tensor = self.norm2(x + self.shrink(F.gelu(self.grow(x))))
        return made


def _norm(weights: Mapping[str, Tensor], name: str) -> nn.LayerNorm:
    made = nn.LayerNorm(len(weights[f"{name}.weight"]), eps=EPSILON)
    made.load_state_dict({kind: weights[f"{name}.{kind}"] for kind in ("weight", "bias")})
    return made


class BertPrompts(ClassPrompts):
    """Prompts ``[start, context, words, end]`` of classes, padded to one length.

    Attributes:
        own_tokens: ids of the words and the end, [C, T]; what follows is padding.
        there: where there is a token, bool [C, 1 + L + T], start and context counted.
    """

    own_tokens: Tensor
    there: Tensor

    def __init__(self, words: Sequence[Sequence[int]], end: int, num_context: int) -> None:
        super().__init__(len(words), num_context)
        longest = 1 + max(map(len, words))
        padded = [[*ids, end] + [0] * (longest - len(ids) - 1) for ids in words]
        self.register_buffer("own_tokens", torch.tensor(padded))
        lengths = torch.tensor([1 + num_context + len(ids) + 1 for ids in words])
        self.register_buffer("there", torch.arange(1 + num_context + longest) < lengths[:, None])


class BertTowers(TwoTowers):
    """Base of the models whose text tower is a BERT. Its attention is not causal, so that all positions are computed.

    Attributes:
        text: the BERT.
    """

    text: Bert
    tokenizer: WordPiece

    @property
    def word_embeddings(self) -> Tensor:
        """Return the embeddings of the vocabulary, [V, w]."""
        return self.text.words

    def prompts_of(self, texts: Sequence[str], num_context: int) -> BertPrompts:
        """Return prompts of a context followed by these texts."""
        if not texts:
            raise ConfigurationError("prompts need at least one class name, got none")
        words = [self.tokenizer.encode(text) for text in texts]
        for text, ids in zip(texts, words, strict=True):
            if (length := 2 + num_context + len(ids)) > self.context_length:
                raise ConfigurationError(
                    f"the prompt of {text!r} has {length} tokens ({num_context} of them context), the text tower takes "
                    f"{self.context_length}; shorten the name or the context"
                )
        return BertPrompts(words, self.tokenizer.end, num_context)

    def text_features(
        self,
        prompts: ClassPrompts,
        context: Tensor | None = None,
        *parts: TowerPart,
        length: Tensor | None = None,
        normalize: bool = True,
    ) -> Tensor:
        """Features of all classes under a context.

        Args:
            prompts: of ``class_prompts``.
            context: [L, w], the same for all classes; [B, L, w], one for each image; or [B, C, L, w]. None only where L
                is 0.
            parts: refused.
            length: refused.
            normalize: whether features have length 1.

        Returns:
            [C, e]; [B, C, e] for a context for each image.

        Raises:
            ConfigurationError: a context of another shape, or what this tower does not take.
        """
        if parts or length is not None:
            raise self._lacks("parts in its text tower, and no contexts of other lengths")
        assert isinstance(prompts, BertPrompts)
        features = self.pooled(self.text_tokens(prompts, context), prompts.there)
        return F.normalize(features, dim=-1) if normalize else features

    def text_tokens(self, prompts: BertPrompts, context: Tensor | None) -> Tensor:
        """Return the last layer's tokens of all classes under a context, [C, T, w] or [B, C, T, w]."""
        words, context = self.text.words, self.context_for(prompts, context)
        own = F.embedding(prompts.own_tokens, words)
        context = context.expand(*context.shape[:-3], prompts.num_classes, -1, -1)
        start = words[self.tokenizer.start].expand(*context.shape[:-2], 1, -1)
        tokens = torch.cat([start, context, own.expand(*context.shape[:-2], -1, -1)], dim=-2)
        made: Tensor = self.text(tokens, prompts.there)
        return made

    def image_features(self, x: Tensor, *parts: TowerPart | Tensor, normalize: bool = True) -> Tensor:
        """Features of a batch of images.

        Args:
            x: images, [B, 3, H, W], normalised with ``mean`` and ``std``.
            parts: refused.
            normalize: whether features have length 1.

        Returns:
            [B, e].

        Raises:
            ConfigurationError: images of another shape, or parts.
        """
        if parts:
            raise self._lacks("prompts or other parts in its image tower")
        features = self.encoded(x)
        return F.normalize(features, dim=-1) if normalize else features

    def encoded(self, x: Tensor) -> Tensor:
        """Return features [B, e] of images [B, 3, H, W], not normalised."""
        raise NotImplementedError

    def pooled(self, tokens: Tensor, there: Tensor) -> Tensor:
        """Return features [..., C, e] of tokens [..., C, T, w], not normalised; ``there`` is bool [C, T]."""
        raise NotImplementedError
