"""Learnable prompt tokens for a vision transformer."""

import math

import torch
from torch import Tensor, nn

from benchmark.errors import ConfigurationError
from benchmark.seeds import keyed_initialization


class VisualPromptTokens(nn.Module):
    """Prompt tokens of VPT (Jia et al., ECCV 2022), shallow or deep.

    Every entry is drawn from Uniform(-v, v) with ``v = sqrt(6 / (3 * patch_size**2 + dim))``, as in VPT's
    code: 0.0625 for patches of 16 and width 768.

    Args:
        num_tokens: tokens K of a layer; 0 gives an empty prompt.
        dim: width d of a token.
        depth: layers L that have prompts of their own; None for shallow prompts.
        patch_size: side of the backbone's patches, in pixels.

    Attributes:
        tokens: the parameter, [K, d] or [L, K, d].

    Raises:
        ConfigurationError: a size is out of range.
    """

    def __init__(self, num_tokens: int, dim: int, depth: int | None = None, patch_size: int = 16) -> None:
        super().__init__()
        if num_tokens < 0 or dim < 1 or patch_size < 1 or (depth is not None and depth < 1):
            raise ConfigurationError(
                "prompts need num_tokens >= 0, dim >= 1, patch_size >= 1 and depth >= 1 or null, "
                f"got num_tokens={num_tokens}, dim={dim}, patch_size={patch_size}, depth={depth}"
            )
        bound = math.sqrt(6 / (3 * patch_size**2 + dim))
        with keyed_initialization("prompt tokens"):
            tokens = torch.empty((num_tokens, dim) if depth is None else (depth, num_tokens, dim))
            self.tokens = nn.Parameter(tokens.uniform_(-bound, bound))

    def forward(self) -> Tensor:
        """The tokens, [K, d] or [L, K, d]."""
        return self.tokens
