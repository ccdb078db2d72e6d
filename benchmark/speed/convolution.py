"""Ways to convolve the images of stacked clients, each with filters of its own: forward and backward.

One layer in three ways, and pFedPT's CNN with torch's layers and with ``ClientConv2d``, whose order of the numbers in
memory also makes what follows a convolution faster on a CPU.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from benchmark.backbones.client_layers import ClientConv2d
from benchmark.backbones.cnn import PaperCNN
from benchmark.speed.measure import Timing, device, seconds

#: in channels, filters, kernel, side of the input: both convolutions of pFedPT's CNN
LAYERS = ((3, 64, 5, 32), (64, 64, 5, 14))
IMAGES = 16


def grouped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One convolution with a group for each client: the rule for ``vmap`` that torch has."""
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
    """Convolve as ``ClientConv2d`` does on this device: client by client on a CPU, one grouped convolution on a GPU."""
    with torch.device("meta"):  # its own weights are not used
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
    """Inputs [K, B, I, H, W], filters [K, O, I, k, k] and biases [K, O]; images, of 3 channels, take no gradient."""
    channels, filters, kernel, side = layer
    torch.manual_seed(0)
    shapes = (clients, IMAGES, channels, side, side), (clients, filters, channels, kernel, kernel), (clients, filters)
    trained = (channels != 3, True, True)
    return [torch.randn(*s, device=device(), requires_grad=t) for s, t in zip(shapes, trained, strict=True)]


def layer_rows(clients: int, layer: tuple[int, int, int, int]) -> list[Timing]:
    """One layer in each way, against the grouped one."""
    given = tensors(clients, layer)
    trained = [part for part in given if part.requires_grad]
    channels, filters, kernel, side = layer
    rows: list[Timing] = []
    for name, way in WAYS.items():

        def work(way: Callable[..., Tensor] = way) -> None:
            torch.autograd.grad(way(*given).square().sum(), trained)

        took = seconds(work, repetitions=10)
        what = f"{channels} to {filters} channels, {kernel} x {kernel}, {IMAGES} images of {side} px each"
        rows.append(Timing(f"{name}, {clients} clients", what, took, took / (rows[0].seconds if rows else took)))
    return rows


def network(own_layers: bool) -> PaperCNN:
    """The CNN of pFedPT, as it is or with torch's convolutions instead of ``ClientConv2d``."""
    made = PaperCNN()
    if not own_layers:
        for position, layer in enumerate(made.convolutions):
            if isinstance(layer, ClientConv2d):
                made.convolutions[position] = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size[0])
    return made.to(device())


def network_rows(clients: int) -> list[Timing]:
    """The whole network with each kind of layers."""
    rows: list[Timing] = []
    x = torch.rand(clients, IMAGES, 3, 32, 32, device=device())
    for own_layers in (False, True):
        made = network(own_layers)
        stacked = {n: p.detach().expand(clients, *p.shape).clone().requires_grad_() for n, p in made.named_parameters()}

        def one(values: dict[str, Tensor], x: Tensor, made: PaperCNN = made) -> Tensor:
            result: Tensor = functional_call(made, values, (x,)).square().sum()
            return result

        def work(one: Callable[..., Tensor] = one, stacked: dict[str, Tensor] = stacked, x: Tensor = x) -> None:
            torch.autograd.grad(vmap(one)(stacked, x).sum(), list(stacked.values()))

        took = seconds(work, repetitions=5)
        name = "ClientConv2d" if own_layers else "grouped"
        what = f"pFedPT's CNN, {IMAGES} images each"
        rows.append(Timing(f"{name}, {clients} clients", what, took, took / (rows[0].seconds if rows else took)))
    return rows


def run(folder: Path) -> tuple[str, list[Timing]]:
    """Both layers of pFedPT's CNN for 1, 8 and 32 clients, and all of it."""
    rows = [row for layer in LAYERS for clients in (1, 8, 32) for row in layer_rows(clients, layer)]
    rows += [row for clients in (8, 32) for row in network_rows(clients)]
    return "Convolutions of stacked clients, forward and backward, against the grouped one", rows
