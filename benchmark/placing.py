"""Copies from the host to a device for which nobody waits."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
