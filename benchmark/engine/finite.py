"""Whether numbers are numbers: what a client that diverged, or whose images are damaged, leaves behind is not."""

from collections.abc import Sequence

import torch
from torch import Tensor


def finite_rows(tensors: Sequence[Tensor], count: int) -> list[bool]:
    """For each row, whether all its numbers are finite in all of the tensors; waits for the device once.

    Args:
        tensors: [count, ...] each, on one device.
        count: number of rows.
    """
    rows = [t.detach().reshape(count, -1) for t in tensors if t.is_floating_point() and t.numel()]
    if not rows:
        return [True] * count
    # A sum is finite only if all its terms are, and ten times as fast; that of huge terms may not be, so then look.
    if torch.stack([row.sum(1).double() for row in rows]).isfinite().all():
        return [True] * count
    return torch.stack([row.isfinite().all(1) for row in rows]).all(0).tolist()
