"""Means over the rows of a padded mini-batch that hold an image."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

#: The label of a row without an image.
IGNORE = -100


T = TypeVar("T")


def in_float32(function: Callable[..., T]) -> Callable[..., T]:
    """Have a function work on its tensors, given by position, in float32 at least, whatever autocast says.

    bfloat16 keeps eight bits: too few for cosines, which CLIP multiplies by 100.
    """

    @wraps(function)
    def exact(*arguments: Any, **settings: Any) -> T:
        given = [at_least_float32(value) if isinstance(value, Tensor) else value for value in arguments]
        kind = next(value.device.type for value in given if isinstance(value, Tensor))
        with torch.autocast(kind, enabled=False):
            return function(*given, **settings)

    return exact


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
