"""The networks of the pFedPT paper: parameter counts, features, one pass for many clients."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import conv2d

from benchmark.backbones.client_layers import ClientConv2d, ClientConvolutions, ClientLinear
from benchmark.backbones.cnn import PaperCNN
from benchmark.errors import ConfigurationError


def count(module: nn.Module, classes: int) -> int:
    """Parameters with a linear classifier."""
    assert isinstance(module.num_features, int)
    return sum(p.numel() for p in module.parameters()) + (module.num_features + 1) * classes


def test_parameter_counts_of_the_paper_and_its_code() -> None:
    assert count(PaperCNN("paper"), 10) == 815_892
    assert count(PaperCNN("pflib"), 10) == 878_538
    assert count(PaperCNN("pflib"), 100) == 924_708
    # 64 pixels: 13 x 13 x 64 = 10,816 inputs of the first linear layer instead of 5 x 5 x 64 = 1,600
    assert count(PaperCNN("pflib", image_size=64), 10) == 878_538 + (10_816 - 1_600) * 512


@pytest.mark.parametrize(("variant", "width"), [("paper", 192), ("pflib", 512)])
@pytest.mark.parametrize("size", [16, 32, 33])
def test_features(variant: Literal["paper", "pflib"], width: int, size: int) -> None:
    model = PaperCNN(variant, image_size=size)
    features = model(torch.randn(2, 3, size, size))
    assert model.num_features == width
    assert features.shape == (2, width)
    assert features.min() >= 0  # the last layer has a ReLU


def test_initial_values_depend_on_the_seed_only() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = PaperCNN().state_dict()
        torch.rand(3)
        again = PaperCNN().state_dict()
        torch.manual_seed(2)
        other = PaperCNN().state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("variant", ["paper", "pflib"])
def test_stacked_clients_equal_a_loop_over_clients(variant: Literal["paper", "pflib"]) -> None:
    models = []
    with torch.random.fork_rng(devices=[]):
        for seed in range(3):
            torch.manual_seed(seed)
            models.append(PaperCNN(variant))
        x = torch.randn(3, 4, 3, 32, 32)
    stacked, _ = stack_module_state(models)

    def one(weights: dict[str, Tensor], images: Tensor) -> Tensor:
        return functional_call(models[0], weights, (images,))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        features = vmap(one)(stacked, x)
        gradients = torch.autograd.grad(features.square().sum(), list(stacked.values()))
    for k, model in enumerate(models):
        expected = model(x[k])
        torch.testing.assert_close(features[k], expected)
        own = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
        for stack, gradient in zip(gradients, own, strict=True):
            torch.testing.assert_close(stack[k], gradient, rtol=1e-4, atol=1e-4)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="image_size=15 is too small for 'paper'; at least 16"):
        PaperCNN(image_size=15)
    with pytest.raises(ConfigurationError, match="variant: expected paper or pflib, got big"):
        PaperCNN("big")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"takes images \[B, 3, 32, 32\], got \[2, 3, 28, 28\]"):
        PaperCNN()(torch.zeros(2, 3, 28, 28))


@pytest.mark.parametrize("shared", [True, False])
def test_stacked_convolutions_are_those_of_each_client(shared: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 2, 9, 9, generator=generator, dtype=torch.float64)
    layer = ClientConv2d(2, 5, 3).double()
    weight, bias = layer.weight.detach(), layer.bias.detach()
    if shared:
        made = vmap(layer)(x)
        weights, biases = [weight] * 3, [bias] * 3
    else:
        weights = [torch.randn(weight.shape, generator=generator, dtype=torch.float64) for _ in range(3)]
        biases = [torch.randn(bias.shape, generator=generator, dtype=torch.float64) for _ in range(3)]
        values = {"weight": torch.stack(weights), "bias": torch.stack(biases)}
        made = vmap(lambda values, images: functional_call(layer, values, images))(values, x)
    for client in range(3):
        torch.testing.assert_close(made[client], conv2d(x[client], weights[client], biases[client]))


@pytest.mark.parametrize("channels", [1, 3, 9])
def test_gradients_of_a_convolutions_images(channels: int) -> None:
    # up to eight channels in a way of our own, alone, for stacked clients, and inside of a gradient per client
    generator = torch.Generator().manual_seed(0)
    layer = ClientConv2d(channels, 4, 3).double()
    weights = torch.randn(2, *layer.weight.shape, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 3, channels, 7, 6, generator=generator, dtype=torch.float64)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return functional_call(layer, {"weight": weight}, x).square().sum()

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        return conv2d(x, weight, layer.bias).square().sum()

    for of in (0, (0, 1)):
        expected = vmap(grad(theirs, of))(x, weights)
        torch.testing.assert_close(vmap(grad(ours, of))(x, weights), expected)
        alone = [grad(ours, of)(*own) for own in zip(x, weights, strict=True)]
        torch.testing.assert_close(alone, [grad(theirs, of)(*own) for own in zip(x, weights, strict=True)])
    images = x.clone().requires_grad_()
    (stacked,) = torch.autograd.grad(vmap(ours)(images, weights).sum(), images)
    torch.testing.assert_close(stacked, vmap(grad(theirs))(x, weights))
    twice = vmap(grad(lambda x, w: grad(ours)(x, w).square().sum()))(x, weights)
    torch.testing.assert_close(twice, vmap(grad(lambda x, w: grad(theirs)(x, w).square().sum()))(x, weights))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("watched", [True, False])
def test_convolutions_with_what_follows_them(shared: bool, watched: bool) -> None:
    layers = ClientConvolutions(
        ClientConv2d(3, 4, 3), nn.ReLU(), ClientConv2d(4, 5, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Sigmoid()
    ).double()
    seen: list[tuple[int, ...]] = []
    if watched:  # as Grad-CAM does
        layers[2].register_forward_hook(lambda layer, given, made: seen.append(tuple(made.shape)))
    values = {name: value.detach() for name, value in layers.named_parameters()}
    if not shared:
        values = {name: torch.stack([value, 2 * value]) for name, value in values.items()}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 3, 8, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    made = vmap(lambda v, x: functional_call(layers, v, x), (None if shared else 0, 0))(values, x)
    assert seen == ([(3, 5, 4, 4)] if watched else [])
    expected = torch.stack(
        [
            functional_call(nn.Sequential(*layers), {name: v if shared else v[k] for name, v in values.items()}, x[k])
            for k in range(2)
        ]
    )
    torch.testing.assert_close(made, expected)
    ours, theirs = (torch.autograd.grad(out.square().sum(), x)[0] for out in (made, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("of", [0, 1])
def test_convolutions_under_a_gradient_for_each_client(of: int) -> None:
    # of the weights, or of the images: in a step whose loss takes gradients itself
    layers = ClientConvolutions(ClientConv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU()).double()
    generator = torch.Generator().manual_seed(0)
    values = {
        name: torch.randn(2, *value.shape, generator=generator, dtype=torch.float64)
        for name, value in layers.named_parameters()
    }
    x = torch.randn(2, 3, 3, 8, 8, generator=generator, dtype=torch.float64)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU()).double()

    def loss(network: nn.Module, values: dict[str, Tensor], x: Tensor) -> Tensor:
        made: Tensor = functional_call(network, values, x).square().sum()
        return made

    def gradient(network: nn.Module, v: dict[str, Tensor], x: Tensor) -> Any:
        # What is not differentiated comes from outside: it is no tensor of the gradient's.
        return grad(lambda x: loss(network, v, x))(x) if of else grad(lambda v: loss(network, v, x))(v)

    made = [vmap(partial(gradient, network))(values, x) for network in (layers, plain)]
    torch.testing.assert_close(*made)


@pytest.mark.parametrize("mapped", [(0, 0, 0), (None, 0, 0), (0, None, None), (1, 1, 1)])
def test_stacked_linear_layers_are_those_of_each_client(mapped: tuple[int | None, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = ClientLinear(5, 4).double()
    shapes = ((6, 5), (4, 5), (4,))
    x, weight, bias = (
        torch.randn(
            shape if dim is None else (*shape[:dim], 3, *shape[dim:]), generator=generator, dtype=torch.float64
        ).requires_grad_()
        for shape, dim in zip(shapes, mapped, strict=True)
    )

    def made(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional_call(layer, {"weight": weight, "bias": bias}, x)

    output = vmap(made, mapped)(x, weight, bias)
    parts = [
        value.unbind(dim) if dim is not None else [value] * 3
        for value, dim in zip((x, weight, bias), mapped, strict=True)
    ]
    expected = torch.stack([x @ w.T + b for x, w, b in zip(*parts, strict=True)])
    torch.testing.assert_close(output, expected)
    ours = torch.autograd.grad(output.square().sum(), (x, weight, bias))
    theirs = torch.autograd.grad(expected.square().sum(), (x, weight, bias))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_stacked_weight_gradient_comes_in_the_weights_order() -> None:
    layer = ClientLinear(5, 4)
    weight = torch.randn(3, 4, 5, requires_grad=True)
    x, bias = torch.randn(3, 6, 5), torch.zeros(3, 4)
    output = vmap(lambda w, b, x: functional_call(layer, {"weight": w, "bias": b}, x))(weight, bias, x)
    (gradient,) = torch.autograd.grad(output.sum(), weight)
    assert gradient.is_contiguous()


def test_linear_layers_under_nested_gradients() -> None:
    # the derivative of a gradient's length, per client, as meta-learning needs it
    layer = ClientLinear(3, 2).double()
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64)
    x, bias = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)

    def length(weight: Tensor, x: Tensor, call: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return grad(lambda w: call(w, x).square().sum())(weight).square().sum()

    def ours(w: Tensor, x: Tensor) -> Tensor:
        return functional_call(layer, {"weight": w, "bias": bias}, x)

    made = vmap(lambda w, x: grad(lambda w: length(w, x, ours))(w))(weights, x)
    expected = vmap(lambda w, x: grad(lambda w: length(w, x, lambda w, x: x @ w.T))(w))(weights, x)
    torch.testing.assert_close(made, expected)


@pytest.mark.parametrize("clients", [1, 2])
def test_the_network_trains_in_bfloat16(clients: int) -> None:
    network = PaperCNN("pflib", image_size=16)
    values = {name: value.detach().expand(clients, *value.shape) for name, value in network.named_parameters()}
    values = {name: value.clone().requires_grad_() for name, value in values.items()}
    x = torch.randn(clients, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def gradients() -> tuple[Tensor, ...]:
        features = vmap(lambda values, x: functional_call(network, values, x))(values, x)
        return torch.autograd.grad(features.float().square().sum(), tuple(values.values()))

    with torch.autocast("cpu", torch.bfloat16):
        rough = gradients()
    for one, exact in zip(rough, gradients(), strict=True):
        assert one.dtype == torch.float32
        assert not torch.equal(one, exact)
        assert (one - exact).norm() < 0.05 * exact.norm()
