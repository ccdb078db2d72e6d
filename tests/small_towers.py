"""Small models of open_clip, one of every kind of tower, for tests; their tokenizers need no package and no network."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.seeds import torch_generator

NAMES = ["cat", "great_white shark", "7", "boat with a long name"]
TEXTS = [f"{name.replace('_', ' ')}." for name in NAMES]
TEXT = {"context_length": 20, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 3}
VIT = {"image_size": 16, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8}
HUB = {"vocab_size": 300, "hf_tokenizer_name": "somebody/tokenizer"}
SIGLIP = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last", "tokenizer_kwargs": {"clean": "canonicalize"}}


def timm(name: str, pool: str, proj: str | None, size: int = 224) -> dict[str, Any]:
    """An image tower of timm's."""
    return {"timm_model_name": name, "timm_pool": pool, "timm_proj": proj, "image_size": size}


#: One small model of every kind of tower that open_clip has configurations for.
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny_eva": {"vision_cfg": timm("eva02_tiny_patch14_224", "token", None), "custom_text": True},
    "tiny_mobile": {
        "vision_cfg": timm("fastvit_t8", "avg", None, 32),
        "text_cfg": {"no_causal_mask": True},
        "custom_text": True,
    },
    "tiny_convnext": {"vision_cfg": timm("test_convnext", "", "linear", 64)},
    "tiny_siglip": {
        "embed_dim": 64,
        "vision_cfg": timm("test_vit", "map", "none", 160),
        "text_cfg": HUB | SIGLIP | {"norm_kwargs": {"eps": 1e-6}},
        "custom_text": True,
        "init_logit_bias": -10,
    },
    "tiny_clipa": {
        "vision_cfg": VIT | {"no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True},
        "text_cfg": HUB | {"pool_type": "last", "no_causal_mask": True, "tokenizer_kwargs": {"strip_sep_token": True}},
    },
    "tiny_worldwide": {"vision_cfg": VIT, "text_cfg": HUB | {"pool_type": "eos", "eos_id": 2}},
    "tiny_mt5": {"vision_cfg": VIT, "text_cfg": HUB | {"pool_type": "eos", "eos_id": 2}},
    "tiny_coca": {
        "vision_cfg": VIT | {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
        "text_cfg": {"embed_cls": True, "output_tokens": True},
        "multimodal_cfg": TEXT | {"attn_pooler_heads": 2},
        "custom_text": True,
    },
    "tiny_custom": {"vision_cfg": VIT, "text_cfg": {"proj_bias": True}, "custom_text": True},
}
#: Sides of their images, where they are not their own.
SIZES = {"tiny_eva": 28, "tiny_siglip": 32}
#: What stands around the tokens of a text.
MARKS = {"tiny_clipa": ([101], [102], 0), "tiny_worldwide": ([0], [2], 1), "tiny_mt5": ([], [2], 0)}


class Encoding(dict):
    """The answer of a tokenizer of Hugging Face's."""

    @property
    def input_ids(self) -> Any:
        """The ids."""
        return self["input_ids"]


class Letters:
    """A tokenizer as Hugging Face's, with a token a letter."""

    def __init__(self, lead: list[int], tail: list[int], pad: int) -> None:
        self.lead, self.tail, self.pad, self.sep_token_id = lead, tail, pad, 102

    def __call__(self, texts: Any, max_length: int = 0, add_special_tokens: bool = True, **_: Any) -> Encoding:
        """Ids of a text, or of texts padded to a length."""
        if isinstance(texts, str):
            letters = [110 + ord(letter) for letter in texts]
            return Encoding(input_ids=[*self.lead, *letters, *self.tail] if add_special_tokens else letters)
        rows = [self(text)["input_ids"] for text in texts]
        return Encoding(input_ids=torch.tensor([row + [self.pad] * (max_length - len(row)) for row in rows]))


@contextmanager
def known_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the models known, with a stand-in for the tokenizers' package. Mapping over clients in a loop fails."""
    if not set(CONFIGS) <= set(open_clip.list_models()):
        folder.mkdir()
        for name, config in CONFIGS.items():
            text = TEXT | config.get("text_cfg", {})
            length = {"context_length": 40} if "hf_tokenizer_name" in text else {}
            whole = {"embed_dim": 16} | config | {"text_cfg": text | length}
            (folder / f"{name}.json").write_text(json.dumps(whole))
        open_clip.add_model_config(folder)
    given: list[str] = []
    get_tokenizer = open_clip.get_tokenizer

    def of(name: str) -> Any:
        given[:] = [name]
        return get_tokenizer(name)

    def from_pretrained(source: str, **_: Any) -> Letters:
        end = open_clip.get_model_config(given[0])["text_cfg"].get("eos_id", 1)
        return Letters(*MARKS.get(given[0], ([], [end], 1)))

    monkeypatch.setattr(open_clip, "get_tokenizer", of)
    auto = SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=auto))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule.*")
        yield


def tiny(name: str) -> PromptedCLIP:
    """A small model whose every tensor is random."""
    clip, generator = PromptedCLIP(name, "random", image_size=SIZES.get(name)), torch_generator("tiny", name)
    for module in clip.modules():
        for value in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if value.is_floating_point() and value.isfinite().all():
                fan_in = value[0].numel() if value.ndim > 1 else value.numel()
                drawn = torch.randn(value.shape, generator=generator) / fan_in**0.5
                value.copy_(drawn + isinstance(module, nn.LayerNorm | _BatchNorm))
        if isinstance(module, _BatchNorm):
            module.running_var.abs_().add_(0.5)  # type: ignore[union-attr]
    return clip


def normal(*shape: int, key: str = "x") -> Tensor:
    return torch.randn(shape, generator=torch_generator(key))


def ids_of(clip: PromptedCLIP, name: str, num_context: int) -> tuple[int, Tensor]:
    """Return how many tokens stand before a context, and ids of all prompts with others in the context's place."""
    if "hf_tokenizer_name" in open_clip.get_model_config(name)["text_cfg"]:
        lead, tail, pad = MARKS.get(name, ([], [1], 1))
        tail = [0] if name == "tiny_clipa" else tail  # it strips its closing token
        encode = Letters([], [], 0)
        words = [encode(clip.tokenizer.tokenizer.clean_fn(text))["input_ids"] for text in TEXTS]  # type: ignore[union-attr]
    else:
        lead, tail, pad = [49406], [49407], 0
        words = [clip.tokenizer.encode(text) for text in TEXTS]
    rows = [[*lead, *[5] * num_context, *ids, *tail] for ids in words]
    return len(lead), torch.tensor([row + [pad] * (clip.context_length - len(row)) for row in rows])
