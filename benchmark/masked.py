"""Means over the rows of a padded mini-batch that hold an image."""

import torch
import torch.nn.functional as F
from torch import Tensor

#: The label of a row without an image.
IGNORE = -100


def at_least_float32(values: Tensor) -> Tensor:
    """The same numbers in a type that sums and logarithms can be taken in: float32, or the wider one they are of."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` [B] over the rows where ``mask`` [B] is True; 0 if there are none."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Mean cross-entropy over the rows of a mini-batch that hold an image.

    Args:
        logits: [B, C].
        y: labels, [B]; any value where ``mask`` is False.
        mask: bool, [B].
    """
    return masked_mean(F.cross_entropy(at_least_float32(logits), y.clamp(min=0), reduction="none"), mask)
