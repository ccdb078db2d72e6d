"""Bottleneck adapters beside the blocks of a tower (MMA, Yang et al., CVPR 2024)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.backbones.parts import TowerPart


class Linears(nn.Module):
    """Linear maps of several layers.

    Args:
        layers: L.
        into: numbers that go in.
        out_of: numbers that come out; weights start from N(0, 2 / out_of), Kaiming's with the fan out, biases at 0.

    Attributes:
        weight: [L, out_of, into].
        bias: [L, out_of].
    """

    def __init__(self, layers: int, into: int, out_of: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((2 / out_of) ** 0.5 * torch.randn(layers, out_of, into))
        self.bias = nn.Parameter(torch.zeros(layers, out_of))


class Bottleneck(TowerPart):
    """``scale up(relu(middle(relu(down(x)))))`` beside each block of one tower.

    Args:
        down: into the bottleneck.
        middle: in it, the same for both towers.
        up: out of it.
        first_layer: of its first block.
        scale: of what is added.
        true_gradient: whether the maps receive the gradient of what they do; else that of scale 1.
    """

    in_parallel = True

    def __init__(
        self, down: Linears, middle: Linears, up: Linears, first_layer: int, scale: float, true_gradient: bool
    ) -> None:
        self.maps, self.first_layer = (down, middle, up), first_layer
        self.scale, self.true_gradient = scale, true_gradient

    def beside(self, layer: int, x: Tensor) -> Tensor | None:
        """Return what is added to a block's output."""
        if layer >= self.first_layer + len(self.maps[0].weight):  # the other tower has no such block
            return None
        for place, maps in enumerate(self.maps):
            weight, bias = (self._seen(value[layer - self.first_layer]) for value in (maps.weight, maps.bias))
            x = (x if place == 0 else F.relu(x)) @ weight.mT + bias
        return self.scale * x

    def _seen(self, value: Tensor) -> Tensor:
        """Return a parameter whose gradient is 1 / scale times the true one."""
        return value if self.true_gradient else value + (1 / self.scale - 1) * (value - value.detach())
