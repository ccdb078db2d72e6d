"""Copies: of a table's rows; to the device, without waiting; from it, for which the host waits once."""

from collections.abc import Sequence

import torch
from torch import Tensor


def picked(table: Tensor, index: Tensor) -> Tensor:
    """Return the rows of a table at an index of any shape, whole: indexing on a CPU copies number by number.

    Args:
        table: [n, ...].
        index: int64, where the table lies.
    """
    return table.index_select(0, index.reshape(-1)).view((*index.shape, *table.shape[1:]))


def placed(value: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a GPU fetches it when it comes to it, and the host goes on."""
    if device.type == "cpu":
        return value.to(device)  # whoever reads it must have it
    if value.device.type == "cpu" and torch.cuda.is_initialized():
        value = value.pin_memory()  # a copy from other memory of the host waits
    return value.to(device, non_blocking=True)


def placed_together(values: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of one type on a device, by one copy."""
    if not values or values[0].device == device:
        return list(values)
    together = placed(torch.cat([value.reshape(-1) for value in values]), device)
    pieces = together.split([value.numel() for value in values])
    return [piece.view(value.shape) for piece, value in zip(pieces, values, strict=True)]


def fetched_together(values: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in host memory, by one copy for each type of numbers; those that lie there stay as they are."""
    fetched = [value.detach() for value in values]
    for kind in dict.fromkeys(value.dtype for value in values):
        there = [n for n, value in enumerate(fetched) if value.dtype == kind and value.device.type != "cpu"]
        if there:
            together = torch.cat([fetched[n].reshape(-1) for n in there]).cpu()
            pieces = together.split([fetched[n].numel() for n in there])
            for n, piece in zip(there, pieces, strict=True):
                fetched[n] = piece.view(fetched[n].shape)
    return fetched
