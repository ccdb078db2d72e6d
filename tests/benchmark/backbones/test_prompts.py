"""Prompt tokens: shapes, initial values, keyed draws."""

import pytest
import torch

from benchmark.backbones.prompts import VisualPromptTokens
from benchmark.errors import ConfigurationError


def test_shallow_and_deep_shapes() -> None:
    assert VisualPromptTokens(10, 768)().shape == (10, 768)
    assert VisualPromptTokens(10, 768, depth=12)().shape == (12, 10, 768)
    assert VisualPromptTokens(0, 768)().shape == (0, 768)
    assert [name for name, _ in VisualPromptTokens(2, 8).named_parameters()] == ["tokens"]


def test_values_fill_the_interval_of_vpt() -> None:
    tokens = VisualPromptTokens(10, 768, depth=12, patch_size=16)()
    assert tokens.requires_grad
    assert 0.0624 < tokens.max().item() <= 0.0625
    assert -0.0625 <= tokens.min().item() < -0.0624
    assert tokens.mean().abs().item() < 1e-3
    # sqrt(6 / (3 * 8 * 8 + 192)) = 0.125
    assert 0.12 < VisualPromptTokens(10, 192, patch_size=8)().abs().max().item() <= 0.125


def test_values_depend_on_the_seed_and_on_nothing_drawn_before() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = VisualPromptTokens(3, 8)()
        expected = torch.rand(1)
        torch.manual_seed(1)
        torch.rand(1)
        assert torch.equal(VisualPromptTokens(3, 8)(), first)
        torch.manual_seed(1)
        assert torch.equal(torch.rand(1), expected)  # the global generator was left alone
        torch.manual_seed(2)
        assert not torch.equal(VisualPromptTokens(3, 8)(), first)


@pytest.mark.parametrize(("tokens", "dim", "depth", "patch"), [(-1, 8, None, 16), (1, 0, None, 16), (1, 8, 0, 16)])
def test_sizes_out_of_range_are_refused(tokens: int, dim: int, depth: int | None, patch: int) -> None:
    with pytest.raises(
        ConfigurationError, match=r"VisualPromptTokens: \w+: expected a whole number from [01] to 1.*, got -?[01]"
    ):
        VisualPromptTokens(tokens, dim, depth, patch)
