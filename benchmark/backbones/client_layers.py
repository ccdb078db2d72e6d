"""Layers that are as fast for a stack of clients as for one after another."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _left_to_torch(x: Tensor) -> bool:
    """A GPU keeps torch's own (not compared on one yet), and autocast knows those alone."""
    return x.is_cuda or torch.is_autocast_enabled("cpu")


class _Mapped(torch.autograd.Function):
    """A function of images, weights and bias, with rules of its own for gradients and for ``vmap``."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])


def _channels_last(weight: Tensor) -> Tensor:
    """``weight`` [O, I, H, W], channels innermost in memory; vmap has no rule for ``contiguous`` with a format."""
    return weight.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


class _Conv2d(_Mapped):
    """``F.conv2d`` with stride 1 and no padding, and a rule for ``vmap`` of its own.

    torch maps a convolution with stacked weights to a grouped one. Here each client has its own, with filters in
    channels-last order. On a CPU that alone gains little, but the whole network runs in that order then, pooling
    included, which makes it 1.4 to 1.7 times as fast with 8 and 32 clients (``python -m benchmark.speed convolution``).
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, _channels_last(weight), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        weight = _channels_last(weight)
        needed = list(ctx.needs_input_grad)
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, [len(weight)], (1, 1), (0, 0), (1, 1), False, (0, 0), 1, needed
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None, int | None], x: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, int]:
        if in_dims[1:] == (None, None):  # all clients have the same filters, as in the evaluation of a shared model
            images = x.movedim(in_dims[0] or 0, 0)
            output = F.conv2d(images.flatten(0, 1), _channels_last(weight), bias)
            return output.unflatten(0, images.shape[:2]), 0
        parts = [
            value.unbind(dim) if dim is not None else [value] * info.batch_size
            for value, dim in zip((x, weight, bias), in_dims, strict=True)
        ]
        outputs = [F.conv2d(x, _channels_last(weight), bias) for x, weight, bias in zip(*parts, strict=True)]
        if len(outputs) == 1:
            return outputs[0].unsqueeze(0), 0
        # Stacked so that each client's part stays in channels-last order.
        return torch.stack([output.permute(0, 2, 3, 1) for output in outputs]).permute(0, 1, 4, 2, 3), 0


class ClientConv2d(nn.Conv2d):
    """``nn.Conv2d`` with stride 1, no padding and a bias, for networks whose clients each have weights of their own.

    Args:
        in_channels: channels of the input [B, in_channels, H, W].
        out_channels: filters.
        kernel_size: side of the square kernel.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, out_channels, H - kernel_size + 1, W - kernel_size + 1]."""
        assert self.bias is not None
        if _left_to_torch(x):
            # Without the bias: torch wants it in the images' type, which an earlier layer's autocast may have changed.
            output = F.conv2d(x, self.weight)
            return output + self.bias.to(output.dtype).view(-1, 1, 1)
        return _Conv2d.apply(x, self.weight, self.bias)


class _StackedLinear(torch.autograd.Function):
    """``x @ weight^T + bias`` of K clients: x [K, B, I], weight [K, O, I], bias [K, O], output [K, B, O].

    torch's own gradient of the stacked weights comes out as [K, I, O] and is then copied into their order, which takes
    four times as long on a CPU as to compute it in that order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            torch.bmm(gradient, weight) if for_x else None,
            torch.bmm(gradient.transpose(1, 2), x) if for_weight else None,
            gradient.sum(1) if for_bias else None,
        )


class _Linear(_Mapped):
    """``F.linear`` of a batch [B, I], with a rule for ``vmap`` of its own."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            gradient @ weight if for_x else None,
            gradient.T @ x if for_weight else None,
            gradient.sum(0) if for_bias else None,
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None, int | None], x: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, int]:
        if in_dims[1:] == (None, None):  # all clients have the same weights, as in the evaluation of a shared model
            return F.linear(x.movedim(in_dims[0] or 0, 0), weight, bias), 0
        stacked = [
            value.movedim(dim, 0) if dim is not None else value.expand(info.batch_size, *value.shape)
            for value, dim in zip((x, weight, bias), in_dims, strict=True)
        ]
        return _StackedLinear.apply(*stacked), 0


class ClientLinear(nn.Linear):
    """``nn.Linear`` with a bias on a batch of vectors, for networks whose clients each have weights of their own.

    Args:
        in_features: I.
        out_features: O.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """[B, I] to [B, O]."""
        if _left_to_torch(x):
            return super().forward(x)
        return _Linear.apply(x, self.weight, self.bias)
