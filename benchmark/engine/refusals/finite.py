"""Check tensors for NaN and infinity, client by client: clients diverge, and images are damaged."""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmark.federation import Values
from benchmark.placing import fetched_together


def finite_rows(tensors: Sequence[Tensor], count: int) -> list[bool]:
    """For each row, whether all its numbers are finite in all of the tensors; waits for the device once.

    Args:
        tensors: [count, ...] each, on one device.
        count: number of rows.
    """
    return finite_rows_and(tensors, count, {})[0]


def finite_rows_and(tensors: Sequence[Tensor], count: int, numbers: Values) -> tuple[list[bool], Values]:
    """The same, and with it other numbers in host memory, for the same wait.

    Args:
        tensors: [count, ...] each, on one device.
        count: number of rows.
        numbers: float64, on the same device.

    Returns:
        Whether the rows are finite, and the numbers.
    """
    rows = [t.detach().reshape(count, -1) for t in tensors if t.is_floating_point() and t.numel()]
    # A sum is finite only if all its terms are, and ten times as fast; that of huge terms may not be, so then look.
    sums = [torch.stack([row.sum(1) for row in rows]).double()] if rows else []
    fetched = fetched_together([*numbers.values(), *sums])
    given = dict(zip(numbers, fetched, strict=False))
    if not rows or fetched[-1].isfinite().all():
        return [True] * count, given
    return torch.stack([row.isfinite().all(1) for row in rows]).all(0).tolist(), given
