"""Means over the rows of a padded mini-batch that hold an image."""

import torch.nn.functional as F
from torch import Tensor


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
    return masked_mean(F.cross_entropy(logits.float(), y.clamp(min=0), reduction="none"), mask)
