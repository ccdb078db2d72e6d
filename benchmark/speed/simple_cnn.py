"""pfl-research's CIFAR-10 benchmark in this project: its network, and FedAvg with that network's dropout."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.backbones.client_layers import ClientConv2d, ClientConvolutions, ClientLinear
from benchmark.contract import Client, MiniBatch, Stage
from benchmark.federation import Values
from benchmark.seeds import keyed_initialization
from methods.fedavg import FedAvg
from methods.losses import cross_entropy


class SimpleCNN(nn.Module):
    """Two 3x3 convolutions, one pooling and a linear layer: pfl-research's ``simple_cnn`` up to its last linear layer.

    Source: Granqvist et al., "pfl-research: simulation framework for accelerating research in Private Federated
    Learning", 2024, and its code. Its initial values: Glorot's uniform ones for weights, torch's for biases.

    Attributes:
        num_features: 128.
        image_size: (32, 32).
        mean: of the three channels of CIFAR-10's training images, for pixels in [0, 1].
        std: standard deviation of the three channels.
        pretrained: False: the network starts from scratch.
        dropped: part of the numbers that dropout leaves out, after the pooling and after the linear layer.
    """

    num_features = 128
    image_size = (32, 32)
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    pretrained = False
    dropped: Mapping[str, tuple[float, tuple[int, ...]]] = {"pooled": (0.25, (64, 14, 14)), "hidden": (0.5, (128,))}

    def __init__(self) -> None:
        super().__init__()
        with keyed_initialization("backbone"):
            self.convolutions = ClientConvolutions(
                ClientConv2d(3, 32, 3),
                nn.ReLU(),
                ClientConv2d(32, 64, 3),
                nn.MaxPool2d(2),
                nn.ReLU(),  # the same values and gradients as before the pooling, on a quarter of the numbers
            )
            self.linear = ClientLinear(64 * 14 * 14, self.num_features)
            for layer in self.modules():
                if isinstance(layer, nn.Conv2d | nn.Linear):
                    nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor, kept: Values | None = None) -> Tensor:
        """Return features [B, 128] of images [B, 3, 32, 32].

        Args:
            x: the images.
            kept: bool, per name of ``dropped`` [B, ...]: what dropout leaves; all by default.
        """
        pooled = self._left(self.convolutions(x), "pooled", kept)
        return self._left(self.linear(pooled.flatten(1)).relu(), "hidden", kept)

    def _left(self, values: Tensor, name: str, kept: Values | None) -> Tensor:
        return values if kept is None else values * kept[name] / (1 - self.dropped[name][0])


class DropoutFedAvg(FedAvg):
    """FedAvg with the dropout of :class:`SimpleCNN`, whose masks are drawn for each client and step.

    Arguments are FedAvg's.
    """

    backbone: SimpleCNN

    def __init__(self, num_classes: int, num_clients: int, backbone: SimpleCNN, **settings: Any) -> None:
        super().__init__(num_classes, num_clients, backbone, **settings)
        with keyed_initialization("head"):
            nn.init.xavier_uniform_(self.head.weight)

    def draw_noise(self, generator: torch.Generator, batch_size: int, stage: Stage) -> dict[str, Tensor]:
        """Draw what dropout leaves of a mini-batch in training, bool [B, 64, 14, 14] and [B, 128]; and for a prompt."""
        drawn = super().draw_noise(generator, batch_size, stage)
        if stage is not Stage.TRAIN:
            return drawn
        return drawn | {
            name: torch.rand(batch_size, *shape, generator=generator, device=generator.device) >= part
            for name, (part, shape) in self.backbone.dropped.items()
        }

    def model_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy of the logits under dropout."""
        features = self.backbone(self.prompted(batch.x, batch.noise), batch.noise)
        return cross_entropy(self.head(features), batch.y, batch.mask)
