"""Learnable prompt tokens for a vision transformer."""

import math

import torch
from torch import Tensor, nn

from benchmark.backbones.parts import Prompts, TowerPart
from benchmark.ranges import Checked, Few, FewOrNone, Size
from benchmark.seeds import keyed_initialization


class VisualPromptTokens(TowerPart, Checked, nn.Module):
    """Prompt tokens of VPT (Jia et al., ECCV 2022), shallow or deep.

    Every entry is drawn from Uniform(-v, v) with ``v = sqrt(6 / (3 * patch_size**2 + dim))``, as in VPT's
    code: 0.0625 for patches of 16 and width 768.

    Args:
        num_tokens: tokens K of a layer; 0 gives an empty prompt.
        dim: width d of a token.
        depth: layers L that have prompts of their own; None for shallow prompts.
        patch_size: side of the backbone's patches, in pixels.
        first_block: the block, counted from 1, before which the first of them stand.

    Attributes:
        tokens: the parameter, [K, d] or [L, K, d].

    Raises:
        ConfigurationError: a size is out of range.
    """

    def __init__(
        self,
        num_tokens: FewOrNone,
        dim: Size,
        depth: Few | None = None,
        patch_size: Size = 16,
        first_block: Few = 1,
    ) -> None:
        super().__init__()
        self.first_layer = first_block - 1
        bound = math.sqrt(6 / (3 * patch_size**2 + dim))
        with keyed_initialization("prompt tokens"):
            tokens = torch.empty((num_tokens, dim) if depth is None else (depth, num_tokens, dim))
            self.tokens = nn.Parameter(tokens.uniform_(-bound, bound))

    def forward(self) -> Tensor:
        """The tokens, [K, d] or [L, K, d]."""
        return self.tokens

    def prompts(self, layer: int) -> Tensor | None:
        """Return the tokens of a layer, [K, d]."""
        return Prompts(self.tokens, self.first_layer).prompts(layer)
