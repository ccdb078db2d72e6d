"""The tiny vision transformer of the pFedPT paper, trained from scratch."""

from functools import partial

from torch import nn

from benchmark.backbones.vit import PromptedViT
from benchmark.errors import ConfigurationError
from benchmark.ranges import Size
from benchmark.seeds import keyed_initialization

PATCH_SIZE = 4


class TinyViT(PromptedViT):
    """8 layers, 8 heads, patches of 4, width 128 (Li et al., "Visual Prompt Based Personalized Federated Learning").

    From the paper's code: MLP ratio 2, bias in the attention's projections, GELU, LayerNorm with eps 1e-6, no
    dropout; class token and position embeddings start at zero, linear layers at torch's default. With a
    classifier of 10 classes it has 1,076,106 parameters at 32 pixels.

    Args:
        image_size: side of the square input in pixels.

    Raises:
        ConfigurationError: the image size is not a multiple of 4.
    """

    def __init__(self, image_size: Size = 32) -> None:
        if image_size < PATCH_SIZE or image_size % PATCH_SIZE:
            raise ConfigurationError(f"image_size={image_size} is not a multiple of TinyViT's patch size {PATCH_SIZE}")
        from timm.models.vision_transformer import VisionTransformer

        with keyed_initialization("backbone"):
            vit = VisionTransformer(
                img_size=image_size,
                patch_size=PATCH_SIZE,
                num_classes=0,
                embed_dim=128,
                depth=8,
                num_heads=8,
                mlp_ratio=2.0,
                qkv_bias=True,
                norm_layer=partial(nn.LayerNorm, eps=1e-6),
                weight_init="skip",  # leaves torch's default in linear layers
            )
        for start in (vit.cls_token, vit.pos_embed):
            assert start is not None  # this transformer has both
            nn.init.zeros_(start)
        super().__init__(vit)
