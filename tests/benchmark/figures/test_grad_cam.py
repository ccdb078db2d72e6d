import pytest
import torch
from torch import Tensor, nn

from benchmark.backbones.cnn import PaperCNN
from benchmark.backbones.vit import TimmViT
from benchmark.errors import ConfigurationError
from benchmark.figures.grad_cam import grad_cam

pytest.importorskip("captum")


def by_hand(maps: Tensor, logits: Tensor, classes: Tensor) -> Tensor:
    """ReLU of the maps [B, d, h, w] weighted with the mean gradient of each image's logit."""
    (gradient,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), maps)
    return torch.stack(
        [
            sum((g.mean() * m for g, m in zip(own, ours, strict=True)), torch.zeros(maps.shape[2:])).clamp(min=0)
            for own, ours in zip(gradient, maps, strict=True)
        ]
    ).detach()


def test_a_cnns_maps_by_hand() -> None:
    backbone, head = PaperCNN(image_size=20), nn.Linear(192, 5)
    x, classes = torch.randn(3, 3, 20, 20, generator=torch.manual_seed(0)), torch.tensor([0, 4, 2])
    maps = backbone.convolutions[:4](x)
    found = grad_cam(backbone, head, x, classes)
    assert found.shape == (3, 4, 4)
    expected = by_hand(maps, head(backbone.linear(backbone.convolutions[4:](maps).flatten(1))), classes)
    torch.testing.assert_close(found, expected)
    assert not backbone.convolutions[3]._forward_hooks


def test_a_vits_maps_by_hand_of_frozen_weights() -> None:
    backbone, head = TimmViT("micro_vit", "embedded").requires_grad_(False), nn.Linear(96, 5)
    x, classes = torch.randn(2, 3, 32, 32, generator=torch.manual_seed(0)), torch.tensor([1, 3])
    tokens = backbone.token_features(x)[:, -1].detach().requires_grad_()
    logits = head(backbone.vit.norm(backbone.vit.blocks[-1](tokens))[:, 0])
    torch.testing.assert_close(logits, head(backbone(x)))
    side = int(backbone.num_patches**0.5)
    (gradient,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), tokens)
    weights = gradient[:, 1:].mean(dim=1, keepdim=True)
    expected = (weights * tokens[:, 1:]).sum(2).clamp(min=0).reshape(2, side, side).detach()
    torch.testing.assert_close(grad_cam(backbone, head, x, classes), expected)


def test_a_network_without_places_is_refused() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    with pytest.raises(ConfigurationError, match="needs a convolution or a ViT, Sequential is neither"):
        grad_cam(flat, nn.Linear(4, 2), torch.zeros(1, 3, 2, 2), torch.tensor([0]))
