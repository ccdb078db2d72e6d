"""Layers that are as fast for a stack of clients as for one after another."""

import logging
import os
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.internals import has_hooks, is_batchedtensor, is_gradtrackingtensor

log = logging.getLogger(__name__)


def _left_to_torch(x: Tensor) -> bool:
    """Autocast knows torch's own layers alone."""
    return torch.is_autocast_enabled(x.device.type)


class _Mapped(torch.autograd.Function):
    """A function of images, weights and bias, with rules of its own for gradients and for ``vmap``."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])


def _channels_last(weight: Tensor) -> Tensor:
    """``weight`` [O, I, H, W], channels innermost in memory; vmap has no rule for ``contiguous`` with a format."""
    return weight.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


#: Channels of an input for whose gradient a CPU's convolution would mostly multiply zeros: it takes sixteen at a time.
FEW_CHANNELS = 8


def _for_images(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of ``F.conv2d``'s images [B, I, H, W] with few channels I.

    The rows are convolved, with the filters' columns as further channels, which are then added up where they belong:
    a third of the time of torch's own, which pads I with zeros.

    Args:
        gradient: of its output, [B, O, H - k + 1, W - k + 1].
        weight: [O, I, k, k].
    """
    filters, channels, rows, columns = weight.shape
    by_row = _channels_last(weight.flip(2).permute(3, 1, 0, 2).reshape(columns * channels, filters, rows, 1))
    parts = F.conv2d(gradient, by_row, padding=(rows - 1, 0)).permute(0, 2, 3, 1)  # [B, H, W - k + 1, k I]
    made = [
        F.pad(part, (0, 0, column, columns - 1 - column)) for column, part in enumerate(parts.split(channels, dim=-1))
    ]
    return sum(made[1:], start=made[0]).permute(0, 3, 1, 2)


def _gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of ``F.conv2d``'s images, weights and bias, those that are needed."""
    for_x, *others = needed
    own = for_x and weight.shape[1] <= FEW_CHANNELS
    made_x = _for_images(gradient, weight) if own else None
    if any(others) or (for_x and not own):
        asked = [for_x and not own, *others]
        made = torch.ops.aten.convolution_backward(
            gradient, x, _channels_last(weight), [len(weight)], (1, 1), (0, 0), (1, 1), False, (0, 0), 1, asked
        )
        return (made_x if own else made[0], made[1], made[2])
    return made_x, None, None


class _OwnConv2d(torch.autograd.Function):
    """``F.conv2d`` of one client among several, with stride 1 and no padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, _channels_last(weight), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return _gradients(gradient, x, weight, ctx.needs_input_grad)


def _patches(x: Tensor, side: int) -> Tensor:
    """Write out what each filter sees: [K, B, I, H, W] to [K, B (H - k + 1) (W - k + 1), k k I]."""
    seen = x.permute(0, 1, 3, 4, 2).contiguous().unfold(2, side, 1).unfold(3, side, 1)  # [K, B, P, Q, I, k, k]
    return seen.permute(0, 1, 2, 3, 5, 6, 4).reshape(len(x), -1, side * side * x.shape[2])


class _StackedConv2d(torch.autograd.Function):
    """``F.conv2d`` of K clients with stride 1 and no padding, as one product a client, for a GPU.

    x [K, B, I, H, W], weight [K, O, I, k, k], bias [K, O], output [K, B, O, H - k + 1, W - k + 1], channels innermost.
    cuDNN takes a small kernel for each client and step where it does not know the shape of a grouped convolution. Where
    factors may be rounded to TF32, :mod:`convolution_kernels` are faster.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        side = weight.shape[-1]
        rows, filters = _patches(x, side), weight.permute(0, 1, 3, 4, 2).flatten(2)  # [K, O, k k I]
        ctx.save_for_backward(rows, filters)
        ctx.shapes = x.shape, weight.shape
        made = torch.baddbmm(bias.unsqueeze(1), rows, filters.transpose(1, 2))
        outer = *x.shape[:2], x.shape[-2] - side + 1, x.shape[-1] - side + 1, weight.shape[1]
        return made.view(outer).permute(0, 1, 4, 2, 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, filters = ctx.saved_tensors
        (clients, batch, channels, height, width), (_, _, _, side, _) = ctx.shapes
        for_x, for_weight, for_bias = ctx.needs_input_grad
        by_place = gradient.permute(0, 1, 3, 4, 2)  # [K, B, P, Q, O]
        down, across = by_place.shape[2:4]
        by_row = by_place.reshape(*rows.shape[:2], -1)
        made_x = made_weight = None
        if for_weight:
            product = torch.bmm(by_row.transpose(1, 2), rows)
            made_weight = product.unflatten(2, (side, side, channels)).permute(0, 1, 4, 2, 3).contiguous()
        if for_x:
            parts = torch.bmm(by_row, filters).view(clients, batch, down, across, side, side, channels)
            made_x = parts.new_zeros(clients, batch, height, width, channels)
            for row in range(side):
                for column in range(side):
                    made_x[:, :, row : row + down, column : column + across] += parts[..., row, column, :]
            made_x = made_x.permute(0, 1, 4, 2, 3)
        return made_x, made_weight, by_row.sum(1) if for_bias else None


class _Conv2d(_Mapped):
    """``F.conv2d`` with stride 1 and no padding, then the layers that follow it, with a rule for ``vmap`` of its own.

    torch maps a convolution with stacked weights to a grouped one. Here each client has its own, with filters in
    channels-last order. On a CPU that alone gains little, but the whole network runs in that order then, pooling
    included. What follows the convolution is done client by client, too, while its output lies in the cache. Together
    that makes the network 1.3 and 2 times as fast with 8 and 32 clients (``python -m benchmark.speed convolution``).
    On a GPU all of them are one kernel, or one product.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, then: Sequence[nn.Module]) -> Tensor:
        return _through(F.conv2d(x, _channels_last(weight), bias), then)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return *_gradients(gradient, x, weight, ctx.needs_input_grad[:3]), None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, int | None, int | None, None],
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        then: Sequence[nn.Module],
    ) -> tuple[Tensor, int]:
        if _mapped_again(x, weight, bias):
            mapped = torch.vmap(lambda *own: _through(F.conv2d(*own), then), in_dims[:3])
            return mapped(x, weight, bias), 0
        if x.is_cuda:
            return _of_all_clients(x, weight, bias, in_dims, info.batch_size, then), 0
        parts = [
            value.unbind(dim) if dim is not None else [value] * info.batch_size
            for value, dim in zip((x, weight, bias), in_dims, strict=False)
        ]
        outputs = [_through(_OwnConv2d.apply(*own), then) for own in zip(*parts, strict=True)]
        if len(outputs) == 1:
            return outputs[0].unsqueeze(0), 0
        # Stacked so that each client's part stays in channels-last order.
        return torch.stack([output.permute(0, 2, 3, 1) for output in outputs]).permute(0, 1, 4, 2, 3), 0


def tf32_is_allowed() -> bool:
    """Return whether a GPU's convolutions may round their factors to TF32: it is torch's default."""
    own = getattr(torch.backends.cudnn, "conv", None)  # from torch 2.9 on convolutions may differ from other kernels
    allowed = torch.backends.cudnn.allow_tf32 if own is None else own.fp32_precision == "tf32"
    return allowed and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


@cache
def _kernels(device: torch.device) -> Any:
    """Return ``KernelConv2d`` where it runs: the GPU has TF32, and Triton finds what it needs; else None."""
    try:
        if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
            return None
        from benchmark.backbones.convolution_kernels import KernelConv2d

        with torch.inference_mode(False), torch.enable_grad():
            # In sizes that take the largest blocks of all kernels.
            shapes = (1, 1, 64, 12, 12), (1, 64, 64, 3, 3)
            given = [torch.zeros(shape, device=device, requires_grad=True) for shape in shapes]
            KernelConv2d.apply(*given, torch.zeros(1, 64, device=device), "tf32").sum().backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no Triton, no C compiler, a folder that cannot be written, a GPU that it does not know
        said = str(error).strip().splitlines()
        log.warning("convolutions of stacked clients are products in float32: %s", said[0] if said else repr(error))
        return None
    return KernelConv2d


def _of_all_clients(
    x: Tensor, weight: Tensor, bias: Tensor, in_dims: Sequence[int | None], clients: int, then: Sequence[nn.Module]
) -> Tensor:
    """Return [K, B, O, P, Q] of clients with weights of their own, or with the same."""
    stacked = [
        value.movedim(dim, 0) if dim is not None else value.expand(clients, *value.shape)
        for value, dim in zip((x, weight, bias), in_dims, strict=False)
    ]
    if in_dims[1:3] == (None, None):
        made = F.conv2d(stacked[0].flatten(0, 1), weight, bias)
    elif x.dtype == torch.float32 and tf32_is_allowed() and (kernels := _kernels(x.device)) is not None:
        made = kernels.apply(*stacked, "tf32").flatten(0, 1)
    else:
        made = _StackedConv2d.apply(*stacked).flatten(0, 1)
    return _through(made, then).unflatten(0, (clients, -1))


def _through(x: Tensor, layers: Iterable[nn.Module]) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


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
        on_gpu = x.is_cuda and not _mapped(x, self.weight, self.bias)
        if on_gpu or _left_to_torch(x):
            # Without the bias: torch wants it in the images' type, which an earlier layer's autocast may have changed.
            output = F.conv2d(x, self.weight)
            return output + self.bias.to(output.dtype).view(-1, 1, 1)
        made: Tensor = _Conv2d.apply(x, self.weight, self.bias, ())
        return made


class ClientConvolutions(nn.Sequential):
    """``nn.Sequential`` that takes a :class:`ClientConv2d` and the pooling and ReLU after it in one, for each client.

    The next client's convolution comes after this one's pooling, whose input is still in the processor's cache.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return what ``nn.Sequential`` does."""
        layers = list(self)
        while layers:
            layer, *layers = layers
            then = list(takewhile(lambda other: isinstance(other, nn.MaxPool2d | nn.ReLU), layers))
            if isinstance(layer, ClientConv2d) and _in_one(x, layer, then):
                x, layers = _Conv2d.apply(x, layer.weight, layer.bias, tuple(then)), layers[len(then) :]
            else:
                x = layer(x)
        return x


def _in_one(x: Tensor, convolution: ClientConv2d, then: Sequence[nn.Module]) -> bool:
    """Return whether clients are mapped over here, outside of any gradient, and no layer has a hook."""
    if _left_to_torch(x) or not _mapped(x, convolution.weight, convolution.bias):
        return False
    return not any(map(has_hooks, (convolution, *then)))


def _mapped(*given: Tensor | None) -> bool:
    """Return whether clients are mapped over here, outside of any gradient, which goes by a rule of its own."""
    held = [value for value in given if value is not None]
    return any(map(is_batchedtensor, held)) and not any(map(is_gradtrackingtensor, held))


def _mapped_again(*given: Tensor) -> bool:
    """Return whether images are mapped over here, of clients that are mapped over: each image has its gradient then."""
    return any(map(is_batchedtensor, given))


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
        if _mapped_again(x, weight, bias):
            return torch.vmap(F.linear, in_dims)(x, weight, bias), 0
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
