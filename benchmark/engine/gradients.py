"""Gradients of stacked clients."""

import gc
from collections.abc import Iterable

import torch
from torch import Tensor

from benchmark.internals import gradient_shape


def clip_each_client(gradients: Iterable[Tensor | None], limit: float) -> None:
    """Scale every client's own gradient, a row of each tensor, to at most ``limit``; that of the stack couples them."""
    given = [gradient for gradient in gradients if gradient is not None]
    squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in given]).sum(0)
    scale = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in given:
        gradient.mul_(scale.view(-1, *(1,) * (gradient.ndim - 1)))


def refuse_held_graph(method: str, name: str, slot: Tensor) -> None:
    """Raise if a graph of an earlier cohort still lives: torch would sum gradients to that cohort's shape, silently.

    What refers to itself is garbage, which is searched for here.
    """
    if gradient_shape(slot) == tuple(slot.shape):
        return
    gc.collect()
    if gradient_shape(slot) != tuple(slot.shape):
        raise RuntimeError(
            f"{method} holds a tensor of an earlier cohort with the graph that made it, which spoils the gradient of "
            f"{name!r}; detach what is kept from a step"
        )
