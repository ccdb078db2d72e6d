"""Copies between the host and a device: to the device nobody waits for them, from it once for all."""

from collections.abc import Mapping, Sequence

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


def fetched_together(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in host memory, by one copy for each type of numbers; those that lie there stay as they are."""
    fetched: dict[str, Tensor] = {}
    for kind in dict.fromkeys(value.dtype for value in values.values()):
        alike = {name: value.detach() for name, value in values.items() if value.dtype == kind}
        there = {name: value for name, value in alike.items() if value.device.type != "cpu"}
        together = torch.cat([value.reshape(-1) for value in there.values()]).cpu() if there else torch.empty(0)
        pieces = together.split([value.numel() for value in there.values()]) if there else ()
        fetched |= alike | {n: piece.view(there[n].shape) for n, piece in zip(there, pieces, strict=True)}
    return fetched
