"""Learnable prompts on the pixels of an image: a frame, a patch in the corner, or a patch that wanders."""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.contract import LocalTraining
from benchmark.errors import ConfigurationError
from benchmark.ranges import Checked, Size
from benchmark.seeds import keyed_initialization


class PixelPrompt(Checked, nn.Module):
    """``x' = x + prompt``, with a prompt that is zero outside its region; added to normalised pixels, never clipped.

    Base of the three shapes of Bahng et al., "Exploring Visual Prompts for Adapting Large-Scale Models", 2022.

    Args:
        size: p, width of the frame or side of the patch, in pixels.
        image_size: H, side of the square images, in pixels.
        channels: 3, or 1 for one prompt that is added to all three colours.
        init: start of every entry: ``normal`` is N(0, 1), drawn for the seed of the run.
        training: of the prompt, in methods that train it in a phase of its own; lr 1.0 and 5 epochs are pFedPT's,
            momentum 0.5 is its code's.

    Raises:
        ConfigurationError: the prompt does not fit into the image, or an unknown number of channels or ``init``.
    """

    def __init__(
        self,
        size: Size = 4,
        image_size: Size = 32,
        channels: Literal[1, 3] = 3,
        init: Literal["normal", "zeros"] = "normal",
        training: LocalTraining = LocalTraining(lr=1.0, momentum=0.5),
    ) -> None:
        super().__init__()
        largest = self.largest(image_size)
        if size > largest:
            raise ConfigurationError(
                f"{type(self).__name__}: size={size} does not fit images of {image_size} pixels; give 1 to {largest}"
            )
        self.size = size
        self.image_size = image_size
        self.training_settings = training
        with keyed_initialization("pixel prompt"):
            for name, (height, width) in self.parts().items():
                start = torch.randn if init == "normal" else torch.zeros
                self.register_parameter(name, nn.Parameter(start(1, channels, height, width)))

    @staticmethod
    def largest(image_size: int) -> int:
        """Return the largest ``size`` for images of this side, in pixels."""
        return image_size

    def parts(self) -> dict[str, tuple[int, int]]:
        """Return height and width of each parameter, by name."""
        return {"patch": (self.size, self.size)}

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw the random tensors that one call of ``forward`` needs, by name; none by default."""
        return {}

    def padded(self, noise: Mapping[str, Tensor]) -> Tensor:
        """The prompt with zeros around it, [1, channels, H, H]."""
        raise NotImplementedError

    def forward(self, x: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
        """Images with the prompt on them.

        Args:
            x: [B, 3, H, H], normalised.
            noise: what ``draw`` returned.

        Raises:
            ConfigurationError: the images are not of the size that the prompt was made for.
        """
        if tuple(x.shape[-2:]) != (self.image_size, self.image_size):
            raise ConfigurationError(
                f"{type(self).__name__} is for images of {self.image_size} x {self.image_size} pixels, got "
                f"{x.shape[-2]} x {x.shape[-1]}; set its image_size to that of the data"
            )
        return x + self.padded(noise)


class PaddingPrompt(PixelPrompt):
    """A frame of width p: ``up`` and ``down`` [1, c, p, H], ``left`` and ``right`` [1, c, H - 2p, p].

    With three channels it has ``6 p (2H - 2p)`` numbers, 1,344 at 32 pixels and p = 4. Arguments as ``PixelPrompt``.
    """

    up: Tensor
    down: Tensor
    left: Tensor
    right: Tensor

    @staticmethod
    def largest(image_size: int) -> int:
        """Return the largest width of the frame that leaves at least one pixel free."""
        return (image_size - 1) // 2

    def parts(self) -> dict[str, tuple[int, int]]:
        """Return height and width of the frame's four sides, by name."""
        across, along = (self.size, self.image_size), (self.image_size - 2 * self.size, self.size)
        return {"up": across, "down": across, "left": along, "right": along}

    def padded(self, noise: Mapping[str, Tensor]) -> Tensor:
        """The frame around zeros."""
        between = self.image_size - 2 * self.size
        middle = torch.cat([F.pad(self.left, (0, between)), self.right], dim=3)
        return torch.cat([self.up, middle, self.down], dim=2)


class FixedPatchPrompt(PixelPrompt):
    """A p x p patch at the top left. Arguments as ``PixelPrompt``."""

    patch: Tensor

    def padded(self, noise: Mapping[str, Tensor]) -> Tensor:
        """The patch with zeros right of it and below."""
        rest = self.image_size - self.size
        return F.pad(self.patch, (0, rest, 0, rest))


class RandomPatchPrompt(PixelPrompt):
    """A p x p patch whose top left corner is drawn anew for every mini-batch, uniformly from {0, ..., H-p-1}^2.

    The last row and column of possible places are left out, as in the source's code. In evaluation it is drawn as well.
    Arguments as ``PixelPrompt``.
    """

    patch: Tensor

    @staticmethod
    def largest(image_size: int) -> int:
        """Return the largest side of a patch for which a place can be drawn."""
        return image_size - 1

    def draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw ``corner``: row and column of the patch's top left corner, int64 [2]."""
        places = self.image_size - self.size
        return {"corner": torch.randint(places, (2,), generator=generator, device=generator.device)}

    def padded(self, noise: Mapping[str, Tensor]) -> Tensor:
        """The patch at ``corner``.

        Raises:
            ConfigurationError: ``noise`` has no corner.
        """
        if "corner" not in noise:
            raise ConfigurationError("RandomPatchPrompt needs the corner that its draw() returns for every mini-batch")
        # By index arithmetic, since the corner differs between the clients that are mapped over.
        pixels = torch.arange(self.image_size, device=self.patch.device)
        rows, columns = pixels - noise["corner"][0], pixels - noise["corner"][1]
        inside = ((rows >= 0) & (rows < self.size))[:, None] & ((columns >= 0) & (columns < self.size))
        last = self.size - 1
        spread = self.patch[:, :, rows.clamp(0, last)[:, None], columns.clamp(0, last)]
        return torch.where(inside, spread, 0.0)
