"""Grad-CAM maps (Selvaraju et al., ICCV 2017) of a network, through captum."""

from typing import cast

import torch
from torch import Tensor, nn

from benchmark.backbones.vit import PromptedViT
from benchmark.errors import ConfigurationError

INSTALL = "Grad-CAM needs captum: pip install 'federated-prompt-benchmark[figures]'"


class _LastBlockMap(nn.Module):
    """A ViT whose patch tokens enter its last block as a map [B, d, h, w], through a layer that can be looked at."""

    def __init__(self, vit: PromptedViT) -> None:
        super().__init__()
        self.backbone = vit
        self.map = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        vit = self.backbone
        tokens = vit.token_features(x)[:, -1]
        first, width = vit.num_prefix_tokens, vit.image_size[1] // vit.patch_size
        patches = self.map(tokens[:, first:].transpose(1, 2).unflatten(2, (-1, width)))
        tokens = vit.vit.blocks[-1](torch.cat([tokens[:, :first], patches.flatten(2).transpose(1, 2)], dim=1))
        features: Tensor = vit.vit.forward_head(vit.vit.norm(tokens), pre_logits=True)
        return features


def grad_cam(backbone: nn.Module, head: nn.Module, x: Tensor, classes: Tensor) -> Tensor:
    """``ReLU(sum_c a_c A_c)`` with ``a_c`` the mean over places of the gradient of a class's logit by the map ``A_c``.

    The maps are the output of the last convolution, or the patch tokens that enter a vision transformer's last block
    (its output is of no use: the classifier reads the class token alone).

    Args:
        backbone: images to features [B, d].
        head: features to logits [B, C].
        x: images, [B, 3, H, W], normalised.
        classes: whose logit, [B].

    Returns:
        [B, h, w], at the size of the maps, 0 or larger.

    Raises:
        ConfigurationError: captum is not installed, or the backbone has no convolution.
    """
    try:
        from captum.attr import LayerGradCam
    except ImportError as error:
        raise ConfigurationError(INSTALL) from error
    if isinstance(backbone, PromptedViT):
        looked_at = _LastBlockMap(backbone)
        network, layer = nn.Sequential(looked_at, head), cast(nn.Module, looked_at.map)
    else:
        convolutions = [module for module in backbone.modules() if isinstance(module, nn.Conv2d)]
        if not convolutions:
            raise ConfigurationError(f"Grad-CAM needs a convolution or a ViT, {type(backbone).__name__} is neither")
        network, layer = nn.Sequential(backbone, head), convolutions[-1]
    maps = LayerGradCam(network, layer).attribute(x.detach().requires_grad_(), target=classes, relu_attributions=True)
    return maps.detach().squeeze(1)
