"""pFedPG's generators: networks that make a client's prompts of a descriptor of it."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CrossAttentionGenerator(nn.Module):
    """``P_n = P_base + softmax((d_n W_Q)(P_base W_K)^T / sqrt(l_k)) (P_base W_V) W_O`` (pFedPG, Eq. 3).

    Read literally, a descriptor is one row, so all K rows of a client are shifted by one vector
    (``descriptor_tokens=1``); with ``descriptor_tokens=K`` every row has a shift of its own.
    One head, l_k = l_v = d, no biases; the paper gives neither these sizes nor the initial values: P_base and d_n start
    as VPT's prompts, the matrices Xavier-uniform.

    Args:
        prompt: P_base at the start, [K, d].
        descriptors: d_n at the start, [N, descriptor_tokens, d].
        wo_init: ``zero`` makes P_n = P_base at the start, and lets only W_O learn in the first step.
    """

    def __init__(self, prompt: Tensor, descriptors: Tensor, wo_init: Literal["xavier", "zero"]) -> None:
        super().__init__()
        width = prompt.shape[1]
        self.base = nn.Parameter(prompt)
        self.descriptors = nn.Parameter(descriptors)
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Parameter(torch.empty(width, width)) for _ in range(4))
        for matrix in (self.w_q, self.w_k, self.w_v, self.w_o):
            nn.init.xavier_uniform_(matrix)
        if wo_init == "zero":
            nn.init.zeros_(self.w_o)

    def forward(self, client: int) -> Tensor:
        """Return the prompts of one client, [K, d]."""
        query, key = self.descriptors[client] @ self.w_q, self.base @ self.w_k
        weights = F.softmax(query @ key.T / key.shape[1] ** 0.5, dim=-1)
        return self.base + weights @ (self.base @ self.w_v) @ self.w_o


class AdaINGenerator(nn.Module):
    """``P_n = s(d_n) (P_base - m(P_base)) / s(P_base) + m(d_n)``, the AdaIN ablation of pFedPG's Table 4.

    Mean m and standard deviation s are taken over the d features of each row, since one style vector has no statistics
    per channel; the descriptor is one row. Arguments as ``CrossAttentionGenerator``.
    """

    def __init__(self, prompt: Tensor, descriptors: Tensor) -> None:
        super().__init__()
        self.base = nn.Parameter(prompt)
        self.descriptors = nn.Parameter(descriptors)

    def forward(self, client: int) -> Tensor:
        """Return the prompts of one client, [K, d]."""
        style = self.descriptors[client]
        mean, std = style.mean(-1, keepdim=True), style.std(-1, keepdim=True, correction=0)
        return std * F.layer_norm(self.base, self.base.shape[-1:], eps=1e-5) + mean


class MLPGenerator(nn.Module):
    """``d_n -> MLP -> K linear layers, one a prompt token``, the MLP ablation of pFedPG's Table 4.

    It has no P_base. As in pFedHN (Shamsian et al., ICML 2021) the MLP has one input and three hidden layers of 100
    with ReLU.

    Args:
        num_prompts: K.
        descriptors: d_n at the start, [N, 1, d].
        hidden: width of the hidden layers.
    """

    def __init__(self, num_prompts: int, descriptors: Tensor, hidden: int = 100) -> None:
        super().__init__()
        width = descriptors.shape[-1]
        self.descriptors = nn.Parameter(descriptors)
        layers: list[nn.Module] = [nn.Linear(width, hidden), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Linear(hidden, hidden), nn.ReLU()]
        self.mlp = nn.Sequential(*layers)
        self.tokens = nn.ModuleList(nn.Linear(hidden, width) for _ in range(num_prompts))

    def forward(self, client: int) -> Tensor:
        """Return the prompts of one client, [K, d]."""
        hidden = self.mlp(self.descriptors[client])
        return torch.cat([token(hidden) for token in self.tokens])
