"""Batch normalisation that always uses its stored statistics."""

import torch.nn.functional as F
from torch import Tensor, nn


class FixedBatchNorm2d(nn.Module):
    """A batch normalisation that always uses its stored statistics: no batch, and so no client, changes them.

    Args:
        source: the normalisation whose values it takes over, under the same names.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, source: nn.BatchNorm2d) -> None:
        super().__init__()
        assert source.running_mean is not None
        assert source.running_var is not None
        self.eps = source.eps
        self.weight = source.weight
        self.bias = source.bias
        self.register_buffer("running_mean", source.running_mean)
        self.register_buffer("running_var", source.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W], normalised."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def fix_batch_norms(module: nn.Module) -> None:
    """Replace every batch normalisation in a module by a ``FixedBatchNorm2d``."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, FixedBatchNorm2d(child))
        else:
            fix_batch_norms(child)
