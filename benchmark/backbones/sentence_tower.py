"""A frozen BERT with mean pooling (Sentence-BERT, Reimers and Gurevych, 2019) that takes contexts among its words."""

import re
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.errors import ConfigurationError

#: Width of an attention head, and the norms' epsilon, of all of BERT's sizes.
HEAD, EPSILON = 32, 1e-12
PARTS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "grow": "intermediate.dense",
    "shrink": "output.dense",
}
NORMS = {"norm1": "attention.output.LayerNorm", "norm2": "output.LayerNorm"}


class SentenceTower(nn.Module):
    """Layers with the norm after each half, GELU, and the mean over all tokens.

    Attention is written out, as ``nn.MultiheadAttention`` has no rule for ``vmap``. Heads have a width of 32, as
    MiniLM's.

    Args:
        weights: by the names of ``BertModel``.

    Attributes:
        words: embeddings of the vocabulary, [V, w].
        positions: embeddings of positions, that of the one type of token added, [P, w].
        width: w.

    Raises:
        ConfigurationError: they are no BERT's.
    """

    words: Tensor
    positions: Tensor

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
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
            self.layers = nn.ModuleList(_Layer(weights, f"encoder.layer.{n}.") for n in range(1 + max(numbers)))
        except (KeyError, ValueError, RuntimeError, IndexError) as error:
            raise ConfigurationError(f"the weights of the text tower are no BERT's ({error})") from error

    def forward(self, tokens: Tensor, there: Tensor) -> Tensor:
        """Features of texts.

        Args:
            tokens: embeddings of words and contexts, [..., T, w].
            there: where there is a token, bool [C, T], the last but one dimensions of ``tokens``.

        Returns:
            [..., w], the mean over the tokens that are there.
        """
        x = self.norm(tokens + self.positions[: tokens.shape[-2]])
        # What is not there gets no attention; with -inf a row of padding alone would be NaN.
        unseen = torch.zeros_like(there, dtype=x.dtype).masked_fill(~there, torch.finfo(x.dtype).min)
        for layer in self.layers:
            x = layer(x, unseen[:, None, None, :])
        share = there.to(x.dtype) / there.sum(-1, keepdim=True)
        return (x * share.unsqueeze(-1)).sum(-2)


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

    def __init__(self, weights: Mapping[str, Tensor], prefix: str) -> None:
        super().__init__()
        for name, part in PARTS.items():
            weight, bias = (weights[f"{prefix}{part}.{kind}"] for kind in ("weight", "bias"))
            linear = nn.Linear(weight.shape[1], weight.shape[0])
            linear.load_state_dict({"weight": weight, "bias": bias})
            setattr(self, name, linear)
        for name, part in NORMS.items():
            setattr(self, name, _norm(weights, prefix + part))

    def forward(self, x: Tensor, unseen: Tensor) -> Tensor:
        """Return [..., T, w] of tokens [..., T, w]; ``unseen`` is added to the attention, [C, 1, 1, T]."""
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)).transpose(-2, -3) for each in (self.query, self.key, self.value))
        weights = (q @ k.mT / HEAD**0.5 + unseen).softmax(-1)
        x = self.norm1(x + self.out((weights @ v).transpose(-2, -3).flatten(-2)))
        made: Tensor = self.norm2(x + self.shrink(F.gelu(self.grow(x))))
        return made


def _norm(weights: Mapping[str, Tensor], name: str) -> nn.LayerNorm:
    made = nn.LayerNorm(len(weights[f"{name}.weight"]), eps=EPSILON)
    made.load_state_dict({kind: weights[f"{name}.{kind}"] for kind in ("weight", "bias")})
    return made
