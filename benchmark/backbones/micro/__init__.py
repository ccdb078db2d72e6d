"""The micro backbones: a small ViT and a small CLIP whose weights are committed beside this file.

Both were pre-trained on letters and digits rendered with fonts (``glyphs``), by ``pretrain``; neither has
seen a handwritten digit. Importing this package makes ``micro_vit`` known to timm, so that
``timm.create_model("micro_vit", checkpoint_path=micro_vit_path())`` works as for any other architecture.
Results with them are a demonstration, not a benchmark.
"""

from pathlib import Path
from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

__all__ = ["expand_token_rows", "micro_clip_config_path", "micro_clip_path", "micro_vit", "micro_vit_path"]

HERE = Path(__file__).parent

ROWS_KEY = "token_embedding.rows"
IDS_KEY = "token_embedding.ids"
TABLE_KEY = "token_embedding.weight"
VOCABULARY = 49408  # of open_clip's own tokenizer

# The name that timm's register_model looks for in this module.
default_cfgs = generate_default_cfgs(
    {
        "micro_vit": {
            "num_classes": 0,
            "input_size": (3, 32, 32),
            "crop_pct": 1.0,
            "interpolation": "bicubic",
            "fixed_input_size": True,
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
            "license": "apache-2.0",
        }
    }
)


def micro_vit_path() -> Path:
    """The committed weights of ``micro_vit`` (float16 safetensors, without a classifier)."""
    return HERE / "micro_vit.safetensors"


def micro_clip_path() -> Path:
    """The committed weights of ``micro_clip`` (float16 safetensors, with the token rows of ``expand_token_rows``)."""
    return HERE / "micro_clip.safetensors"


def micro_clip_config_path() -> Path:
    """The open_clip model configuration of ``micro_clip``."""
    return HERE / "micro_clip.json"


@register_model
def micro_vit(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Entry point for timm: images [B, 3, 32, 32], patches of 8 pixels, width 96, 4 layers, 0.47 M parameters."""
    model_args = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3}
    return build_model_with_cfg(VisionTransformer, "micro_vit", pretrained, **{**model_args, **kwargs})


def expand_token_rows(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The full state of ``micro_clip`` from the committed one; any other state is returned as it is.

    A whole token table would be most of the file, so only the rows of tokens that pre-training used are
    stored, with those of single bytes. All other rows become the mean of the stored ones.

    Args:
        state: tensors of a file; ``token_embedding.rows`` [n, width] and ``token_embedding.ids`` [n] are replaced
            by ``token_embedding.weight`` [49408, width].
    """
    if ROWS_KEY not in state or IDS_KEY not in state:
        return state
    rows, ids = state[ROWS_KEY].float(), state[IDS_KEY].long()
    table = rows.mean(dim=0).repeat(VOCABULARY, 1)
    table[ids] = rows
    return {TABLE_KEY: table, **{key: value for key, value in state.items() if key not in (ROWS_KEY, IDS_KEY)}}


def stored_token_rows(state: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """The reverse of ``expand_token_rows``: keep the rows ``ids`` [n] of the token table only."""
    rest = {key: value for key, value in state.items() if key != TABLE_KEY}
    return {ROWS_KEY: state[TABLE_KEY][ids], IDS_KEY: ids.to(torch.int32), **rest}
