"""Three ways to convolve the images of stacked clients, each with filters of its own: forward and backward."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, vmap

from benchmark.backbones.client_layers import ClientConv2d
from benchmark.speed.measure import Row, device, seconds

#: in channels, filters, kernel, side of the input: both convolutions of pFedPT's CNN
LAYERS = ((3, 64, 5, 32), (64, 64, 5, 14))
IMAGES = 16


def grouped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Torch's own rule for ``vmap``: one convolution with a group for each client."""
    return vmap(F.conv2d)(x, weight, bias)


def unfolded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Patches written out, then a batched matrix product.

    Args:
        x: [K, B, I, H, W].
        weight: [K, O, I, k, k].
        bias: [K, O].

    Returns:
        [K, B, O, H - k + 1, W - k + 1].
    """
    side = weight.shape[-1]
    patches = F.unfold(x.flatten(0, 1), side).unflatten(0, x.shape[:2])  # [K, B, I k k, P]
    out = weight.flatten(2).unsqueeze(1) @ patches + bias[:, None, :, None]
    return out.unflatten(-1, (x.shape[-2] - side + 1, x.shape[-1] - side + 1))


def as_in_the_networks(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What ``ClientConv2d`` does here: a convolution for each client on a CPU, the grouped one on a GPU."""
    layer = ClientConv2d(weight.shape[2], weight.shape[1], weight.shape[-1])

    def one(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        made: Tensor = functional_call(layer, {"weight": weight, "bias": bias}, (x,))
        return made

    return vmap(one)(x, weight, bias)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "grouped": grouped,
    "unfolded": unfolded,
    "ClientConv2d": as_in_the_networks,
}


def tensors(clients: int, layer: tuple[int, int, int, int]) -> list[Tensor]:
    """Images [K, B, I, H, W], filters [K, O, I, k, k] and biases [K, O], all with gradients."""
    channels, filters, kernel, side = layer
    torch.manual_seed(0)
    shapes = (clients, IMAGES, channels, side, side), (clients, filters, channels, kernel, kernel), (clients, filters)
    return [torch.randn(*shape, device=device()).requires_grad_() for shape in shapes]


def run(folder: Path) -> tuple[str, list[Row]]:
    """Both layers of pFedPT's CNN for 1, 8 and 32 clients."""
    rows = []
    for layer in LAYERS:
        for clients in (1, 8, 32):
            given = tensors(clients, layer)
            reference = 0.0
            for name, way in WAYS.items():

                def work(way: Callable[..., Tensor] = way, given: list[Tensor] = given) -> None:
                    torch.autograd.grad(way(*given).sum(), given)

                took = seconds(work, repetitions=10)
                reference = reference or took
                channels, filters, kernel, side = layer
                rows.append(
                    Row(
                        f"{name}, {clients} clients",
                        f"{channels} to {filters} channels, {kernel} x {kernel}, {IMAGES} images of {side} px each",
                        took,
                        took / reference,
                    )
                )
    return "Convolutions of stacked clients, forward and backward, against the grouped one", rows
