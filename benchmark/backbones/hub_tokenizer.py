"""Tokenizers of Hugging Face's, which open_clip takes for SigLIP, CLIPA and its multilingual models."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmark.errors import ConfigurationError


class HubTokenizer:
    """The part of open_clip's ``HFTokenizer`` that prompts need: a text's own tokens, and what stands around them.

    Args:
        tokenizer: called with texts it returns ids [N, T], padded; its ``tokenizer`` is that of Hugging Face, which
            takes a text that went through its ``clean_fn``.

    Attributes:
        lead: ids before the tokens of every text.
        tail: ids behind them.
        pad: id of the padding, which follows.

    Raises:
        ConfigurationError: it marks or pads a text in another way.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        sample = "a"
        with torch.device("cpu"):  # ids are read, also where a model is made without its numbers
            words, padded = self.encode(sample), tokenizer([sample])[0].tolist()
        marks = len(tokenizer.tokenizer(tokenizer.clean_fn(sample))["input_ids"]) - len(words)
        places = [at for at in range(marks + 1) if padded[at : at + len(words)] == words]
        self.lead = padded[: places[0]] if places else []
        self.tail = padded[len(self.lead) + len(words) : marks + len(words)]
        self.pad: int = padded[-1]
        text = [*self.lead, *words, *self.tail]
        if padded != text + [self.pad] * (len(padded) - len(text)) or not self.tail or len(text) >= len(padded):
            raise ConfigurationError(
                f"the tokenizer makes {padded} of the text {sample!r}: expected are the tokens of a text, a closing "
                "token and padding; take a model with another tokenizer"
            )

    def __call__(self, texts: Sequence[str], context_length: int | None = None) -> Tensor:
        """Return the ids of texts, padded, [N, T]."""
        ids: Tensor = self.tokenizer(texts, context_length)
        return ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text alone, without what stands around it."""
        cleaned = self.tokenizer.clean_fn(text)
        return list(self.tokenizer.tokenizer(cleaned, add_special_tokens=False)["input_ids"])
