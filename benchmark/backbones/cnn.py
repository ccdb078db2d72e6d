"""The small convolutional networks of the pFedPT paper, trained from scratch."""

from typing import Literal

from torch import Tensor, nn

from benchmark.backbones.client_layers import ClientConv2d, ClientConvolutions, ClientLinear
from benchmark.errors import ConfigurationError
from benchmark.ranges import Checked, Size
from benchmark.seeds import keyed_initialization


class PaperCNN(Checked, nn.Module):
    """Two 5x5 convolutions, each with ReLU and 2x2 max-pooling, then linear layers with ReLU; no classifier.

    Source: Li et al., "Visual Prompt Based Personalized Federated Learning". ``paper`` is the network of its
    text: 64 and 64 filters, linear layers of 394 and 192 (kernel, padding and pooling are not stated there).
    ``pflib`` is the network of its code: 32 and 64 filters, one linear layer of 512. With a classifier of 10
    classes they have 815,892 and 878,538 parameters at 32 pixels.

    Args:
        variant: ``paper`` or ``pflib``.
        image_size: side of the square input in pixels, at least 16.

    Attributes:
        num_features: width of the features, 192 or 512.
        image_size: (H, W) of an input, in pixels.
        mean: mean of the three channels that inputs are normalised with, for pixels in [0, 1].
        std: standard deviation of the three channels.
        pretrained: False: the network starts from scratch.

    Raises:
        ConfigurationError: an unknown variant, or an image too small for the two convolutions.
    """

    mean = std = (0.5, 0.5, 0.5)
    pretrained = False

    def __init__(self, variant: Literal["paper", "pflib"] = "paper", image_size: Size = 32) -> None:
        super().__init__()
        side = ((image_size - 4) // 2 - 4) // 2
        if side < 1:
            raise ConfigurationError(f"image_size={image_size} is too small for {variant!r}; at least 16 is needed")
        filters = 64 if variant == "paper" else 32
        widths = (394, 192) if variant == "paper" else (512,)
        self.image_size = (image_size, image_size)
        self.num_features = widths[-1]
        with keyed_initialization("backbone"):
            # ReLU after the pooling: the same values and gradients as before it, on a quarter of the numbers.
            self.convolutions = ClientConvolutions(
                ClientConv2d(3, filters, kernel_size=5),
                nn.MaxPool2d(2),
                nn.ReLU(),
                ClientConv2d(filters, 64, kernel_size=5),
                nn.MaxPool2d(2),
                nn.ReLU(),
            )
            linear: list[nn.Module] = []
            for inputs, outputs in zip((64 * side * side, *widths), widths, strict=False):
                linear += [ClientLinear(inputs, outputs), nn.ReLU()]
            self.linear = nn.Sequential(*linear)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, num_features] of images [B, 3, image_size, image_size].

        Raises:
            ConfigurationError: the images are not of the size that the network was built for.
        """
        if x.ndim != 4 or tuple(x.shape[-2:]) != self.image_size:
            raise ConfigurationError(
                f"the backbone takes images [B, 3, {self.image_size[0]}, {self.image_size[1]}], got {list(x.shape)}; "
                "set the data's image size or the backbone's image_size"
            )
        return self.linear(self.convolutions(x).flatten(1))
