"""pFedBayesPT's encoder: perceptrons over an image's tokens that give its prompts' distribution."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.masked import at_least_float32
from benchmark.seeds import keyed_initialization

#: Standard deviation of the last weights of MLP^mu at the start.
SMALL = 1e-3


class MaskedTokenMLPs(nn.Module):
    """L perceptrons ``T -> hidden -> tokens`` with GELU along the token axis, one a layer, on LN(f m).

    A token that is left out is 0 before the normalisation and the shift after it, and the others do not notice, so
    ``LN(f m) = m s + shift`` with s the normalised and scaled features. The first weights mix tokens, so that the mask
    may as well stand on them: no masked copy of the features is made.

    Args:
        layers: L.
        length: T, tokens of an image.
        hidden: h, width of the hidden layer.
        tokens: nu, rows that come out.
        output_std: standard deviation of the last weights at the start; the last biases start at 0, and the first layer
            as torch's linear layers do.
    """

    def __init__(self, layers: int, length: int, hidden: int, tokens: int, output_std: float) -> None:
        super().__init__()
        bound = 1 / math.sqrt(length)
        self.weight1 = nn.Parameter(torch.empty(layers, 1, hidden, length).uniform_(-bound, bound))
        self.bias1 = nn.Parameter(torch.empty(layers, 1, hidden, 1).uniform_(-bound, bound))
        self.weight2 = nn.Parameter(output_std * torch.randn(layers, 1, tokens, hidden))
        self.bias2 = nn.Parameter(torch.zeros(layers, 1, tokens, 1))

    def forward(self, scaled: Tensor, masks: Tensor, shift: Tensor) -> Tensor:
        """Take all draws of the masks at once.

        Args:
            scaled: s, [B, L, T, d].
            masks: m, [R, B, L, T].
            shift: of LN, [L, 1, d].

        Returns:
            [R, B, L, nu, d].
        """
        weights = self.weight1 * masks.movedim(0, 2).unsqueeze(-2)  # [B, L, R, h, T]
        mixed = (weights.flatten(2, 3) @ scaled).unflatten(2, weights.shape[2:4])
        hidden = F.gelu(mixed + (self.weight1.sum(-1, keepdim=True) * shift.unsqueeze(1) + self.bias1))
        return (self.weight2 @ hidden + self.bias2).movedim(2, 0)


class PromptEncoder(nn.Module):
    """``G_1 ... G_L``: from the tokens of an image at the input of each layer to its instance prompts' distribution.

    ``mu_i = MLP^mu(LN(f_i m_i)^T)^T`` and ``Sigma_i = exp(MLP^Sigma(LN(f_i m_i)^T)^T / 2)``, a standard deviation. The
    last layer of MLP^mu starts small and that of MLP^Sigma at 0, so that Sigma is 1.

    Args:
        layers: L, layers with instance prompts.
        length: T, tokens of an image.
        width: d.
        hidden: h, width of the perceptrons' hidden layer.
        tokens: nu, instance prompts of a layer.
        variance: whether there is an MLP^Sigma.
    """

    def __init__(self, layers: int, length: int, width: int, hidden: int, tokens: int, variance: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(layers, 1, width))
        self.shift = nn.Parameter(torch.zeros(layers, 1, width))
        with keyed_initialization("prompt encoder"):
            self.mean = MaskedTokenMLPs(layers, length, hidden, tokens, SMALL)
            if variance:
                self.log_variance = MaskedTokenMLPs(layers, length, hidden, tokens, 0.0)

    def forward(self, features: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parameters psi of the distribution for each draw of the masks.

        Args:
            features: f, [B, L, T, d].
            masks: m, [R, B, L, T], False where a token is left out.

        Returns:
            mu and log Sigma, [R, B, L, nu, d] each, at least float32.
        """
        scaled = F.layer_norm(features, features.shape[-1:]) * self.scale
        log_variance = self.log_variance(scaled, masks, self.shift)
        mean = self.mean(scaled, masks, self.shift)
        return at_least_float32(mean), 0.5 * at_least_float32(log_variance)

    def means(self, features: Tensor, masks: Tensor) -> Tensor:
        """Return mu alone, as ``forward`` does."""
        scaled = F.layer_norm(features, features.shape[-1:]) * self.scale
        return at_least_float32(self.mean(scaled, masks, self.shift))
