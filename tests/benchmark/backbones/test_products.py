"""Products by oneDNN are torch's up to rounding, in a gradient of any order, and are taken where they are faster."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit, learned
from torch import Tensor, nn

from benchmark.backbones import products
from benchmark.backbones.merged_layers import MergedLayers
from benchmark.contract import LocalTraining, Phase
from benchmark.internals import has_onednn
from methods.fedvpt import FedVPT

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


@pytest.mark.parametrize("shape", [(5, 128), (2, 7, 128), (2, 3, 4, 128), (128,)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_and_its_gradients_are_those_of_float64(shape: tuple[int, ...], biased: bool) -> None:
    x, weight, bias, along = drawn(*shape), drawn(130, 128), drawn(130), drawn(*shape[:-1], 130)
    results = []
    for kind, function in ((torch.float32, products.linear), (torch.float64, F.linear)):
        given = x.to(kind).transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        made = function(given, weight.to(kind).t().contiguous().t(), bias.to(kind) if biased else None)
        first = torch.autograd.grad((made.square() * along.to(kind)).sum(), given, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), given)[0]
        results.append((made, first, second))
    for found, expected in zip(*results, strict=True):
        assert found.dtype == torch.float32
        assert (found.double() - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("maker", "capability", "taken"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
    ],
)
def test_they_are_taken_on_amds_processors_with_avx_512(
    maker: str, capability: str, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "described", lambda field: {"vendor_id": maker}[field])
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert products.faster_by_onednn.__wrapped__() is taken


@pytest.mark.parametrize(
    ("x", "weight", "bias", "taken"),
    [
        (drawn(3, 128), drawn(128, 128), None, True),
        (drawn(3, 128), drawn(128, 128), drawn(128), True),
        (drawn(3, 128), drawn(128, 128), drawn(128).requires_grad_(), False),
        (drawn(3, 128), drawn(128, 128), drawn(256)[::2], False),
        (drawn(3, 128), drawn(128, 128), drawn(1), False),
        (drawn(3, 128), drawn(128, 128), drawn(1).expand(128), False),
        (drawn(3, 128), drawn(128, 128), drawn(128, dtype=torch.float64), False),
        (drawn(3, 130), drawn(128, 128), None, False),
        (drawn(3, 127), drawn(128, 127), None, False),
        (drawn(3, 128), drawn(127, 128), None, False),
        (drawn(0, 128), drawn(128, 128), None, False),
        (drawn(3, 128, dtype=torch.float64), drawn(128, 128, dtype=torch.float64), None, False),
        (drawn(3, 128).bfloat16(), drawn(128, 128).bfloat16(), None, False),
        (drawn(3, 128).to("meta"), drawn(128, 128).to("meta"), None, False),
    ],
)
def test_large_layers_of_float32_on_a_cpu_are_taken(
    x: Tensor, weight: Tensor, bias: Tensor | None, taken: bool
) -> None:
    assert products.takes(x, weight, bias) is taken


@contextmanager
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """Every frozen layer, however small, and on any processor, goes through oneDNN; gives the inputs' shapes."""
    seen: list[torch.Size] = []
    product = products.linear

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(x.shape)
        return product(x, weight, bias)

    with monkeypatch.context() as patched:
        patched.setattr(products, "LEAST", 1)
        patched.setattr(products, "faster_by_onednn", lambda: True)
        patched.setattr(products, "linear", noted)
        yield seen


def test_clients_share_a_product_at_each_level_of_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = drawn(6, 8), drawn(6), drawn(3, 2, 5, 8)

    def layer(own: Tensor) -> Tensor:
        with MergedLayers():
            return F.linear(own, weight, bias)

    with everywhere(monkeypatch) as seen:
        found = torch.vmap(torch.vmap(layer))(x)
        assert seen == [x.shape]
        gradient = torch.vmap(torch.func.grad(lambda own: layer(own).square().sum()))(x)
    torch.testing.assert_close(found, F.linear(x, weight, bias))
    torch.testing.assert_close(gradient, 2 * F.linear(x, weight, bias) @ weight)


@pytest.mark.parametrize(
    ("conf", "overrides"),
    [
        ("FedVPT", ()),
        ("FedVPT", ("--data.clients_at_once=1",)),
        ("FedVPT", ("--data.one_by_one=true",)),
        ("FedLoRA", ()),
        ("PFedPG", ()),
        ("PFedBayesPT", ()),
        ("SGPT", ()),
        ("HeadTune", ()),
        ("PromptFL", ()),
        ("FedMaPLe", ()),
        ("PFedMMA", ()),
    ],
)
def test_a_federation_learns_the_same_up_to_rounding(
    conf: str, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for onednn in (False, True):
        method, data = build(conf, "--model.init_args.training.epochs=1", *overrides)
        if onednn:
            with everywhere(monkeypatch) as seen:
                fit(method, data, 2)
            assert seen
        else:
            fit(method, data, 2)
        results.append(learned(method))
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-3, atol=1e-4, equal_nan=True, msg=name)


class BiasOfFrozenLayer(FedVPT):
    """Has a frozen layer between backbone and head, whose bias is trained."""

    shared = ("prompt", "between.bias")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.between = nn.Linear(64, 64)

    def local_phases(self) -> list[Phase]:
        return [self.training_settings.phase("prompt", "between.bias", "head")]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.backbone(x, *self.parts())))


@pytest.mark.parametrize("alone", ["true", "false"])
def test_a_bias_beside_a_frozen_weight_trains(alone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for onednn in (False, True):
        template, data = build("FedVPT", f"--data.one_by_one={alone}")
        torch.manual_seed(0)
        method = BiasOfFrozenLayer(8, 11, template.backbone, num_prompts=2, training=LocalTraining(lr=0.1, epochs=1))
        start = method.between.bias.detach().clone()
        with everywhere(monkeypatch) if onednn else nullcontext():
            fit(method, data, 1)
        assert not torch.allclose(method.between.bias, start)
        found.append(method.between.bias.detach())
    torch.testing.assert_close(*found)
