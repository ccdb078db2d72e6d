"""Products with frozen weights on a CPU, by oneDNN where torch's usual library leaves half of the processor unused.

For float32 torch takes MKL, whose kernels on AMD's processors know registers of 256 bits. oneDNN is a part of torch,
too, and takes all 512 bits where there are as many. Both sum in float32, in another order.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from benchmark.internals import has_onednn, onednn_linear
from benchmark.processor import described

#: Least inputs, and outputs, of a layer. Time of smaller ones is in calls; those of the shipped demos are smaller.
LEAST = 128


@functools.cache
def faster_by_onednn() -> bool:
    """Return whether oneDNN is the faster one on this machine: its processor is one of AMD's, with AVX-512."""
    return (
        has_onednn()
        and torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AuthenticAMD" in described("vendor_id")
    )


def large(weight: Tensor) -> bool:
    """Return whether a parameter is a layer's weight of which products are worthwhile."""
    return weight.ndim == 2 and min(weight.shape) >= LEAST


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether :func:`linear` takes this input [..., d], this weight [m, d] and this bias [m]."""
    return (
        large(weight)
        and _plain(x)
        and _plain(weight)
        and x.numel() > 0
        and x.shape[-1] == weight.shape[1]
        and (bias is None or _taken(bias, len(weight)))
    )


def _plain(value: Tensor) -> bool:
    return value.dtype == torch.float32 and value.device.type == "cpu"


def _taken(bias: Tensor, outputs: int) -> bool:
    """Return whether a bias is one of a layer, without a gradient, as it lies in memory."""
    trained = torch.is_grad_enabled() and bias.requires_grad
    return _plain(bias) and bias.shape == (outputs,) and bias.is_contiguous() and not trained


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a layer by oneDNN: ``F.linear`` with gradients of ``x``, of any order, and none of the weight and the bias.

    Args:
        x: [..., d].
        weight: [m, d].
        bias: [m], or None.

    Returns:
        [..., m].
    """
    made: Tensor = _Linear.apply(x, weight, bias)
    return made


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return onednn_linear(x.contiguous(), weight.contiguous(), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        return linear(x.movedim(in_dims[0], 0), weight, bias), 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return linear(gradient, weight.t(), None), None, None
