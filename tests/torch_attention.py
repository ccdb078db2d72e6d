"""Torch's own attention with the projections of a module that has ``query``, ``key``, ``value`` and ``out``."""

from typing import Any

import torch
from torch import nn

from benchmark.seeds import torch_generator


def drawn(*shape: int, key: str) -> torch.Tensor:
    """Normal numbers by a key."""
    return torch.randn(shape, generator=torch_generator(key))


def attention_of(module: Any, width: int, heads: int) -> nn.MultiheadAttention:
    """Give a module biases that are not 0, and torch's attention its projections."""
    attention = nn.MultiheadAttention(width, heads, batch_first=True)
    projections = (module.query, module.key, module.value)
    with torch.no_grad():
        for each in (*projections, module.out):
            each.bias.copy_(drawn(width, key="bias"))
        attention.in_proj_weight.copy_(torch.cat([each.weight for each in projections]))
        attention.in_proj_bias.copy_(torch.cat([each.bias for each in projections]))
        attention.out_proj.load_state_dict(module.out.state_dict())
    return attention
