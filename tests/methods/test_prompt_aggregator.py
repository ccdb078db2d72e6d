"""The attention that merges prompts of several clients: beside torch's own, its sizes, and the order of clients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.seeds import torch_generator
from methods.prompt_aggregator import aggregated, aggregator


def drawn(*shape: int, key: str) -> Tensor:
    return torch.randn(shape, generator=torch_generator(key))


def some(layers: int, width: int) -> nn.ParameterDict:
    """An aggregator whose biases and norms are drawn, too."""
    torch.manual_seed(3)
    made = aggregator(layers, width).requires_grad_(False)
    for name, value in made.items():
        if value.ndim == 1 or name.endswith("bias"):
            value.add_(0.1 * drawn(*value.shape, key=name))
    return made


def of_torch(prompts: Tensor, of: nn.ParameterDict, heads: int) -> Tensor:
    """Layer by layer and place by place with torch's modules."""
    width, made = prompts.shape[-1], torch.zeros(prompts.shape[1:])
    for layer in range(prompts.shape[1]):
        attention = nn.MultiheadAttention(width, heads, batch_first=True).requires_grad_(False)
        three = ("query", "key", "value")
        attention.in_proj_weight.copy_(torch.cat([of[f"{name}_weight"][layer] for name in three]))
        attention.in_proj_bias.copy_(torch.cat([of[f"{name}_bias"][layer] for name in three]))
        attention.out_proj.weight.copy_(of["out_weight"][layer])
        attention.out_proj.bias.copy_(of["out_bias"][layer])
        for place in range(prompts.shape[2]):
            x = prompts[:, layer, place]
            x = F.layer_norm(x + attention(x, x, x)[0], (width,), of["first_norm_weight"], of["first_norm_bias"])
            inner = F.relu(F.linear(x, of["inner_weight"][layer], of["inner_bias"][layer]))
            x = x + F.linear(inner, of["outer_weight"][layer], of["outer_bias"][layer])
            x = F.layer_norm(x, (width,), of["second_norm_weight"], of["second_norm_bias"])
            made[layer, place] = x.mean(0)
    return made


@pytest.mark.parametrize("clients", [1, 3])
def test_it_is_torchs_attention_at_each_place(clients: int) -> None:
    prompts, of = drawn(clients, 2, 3, 8, key="prompts"), some(2, 8)
    torch.testing.assert_close(aggregated(prompts, {**of}, 4), of_torch(prompts, of, 4), rtol=1e-4, atol=1e-5)


def test_the_order_of_clients_changes_nothing() -> None:
    prompts, of = drawn(4, 2, 3, 8, key="prompts"), {**some(2, 8)}
    made = aggregated(prompts[[2, 0, 3, 1]], of, 2)
    torch.testing.assert_close(made, aggregated(prompts, of, 2), rtol=1e-5, atol=1e-6)


def test_equal_prompts_are_merged_into_what_one_is() -> None:
    prompts, of = drawn(1, 2, 3, 8, key="prompts"), {**some(2, 8)}
    made = aggregated(prompts.expand(5, -1, -1, -1), of, 2)
    torch.testing.assert_close(made, aggregated(prompts, of, 2), rtol=1e-5, atol=1e-6)


def test_its_output_has_unit_variance_whatever_the_size_of_prompts() -> None:
    torch.manual_seed(3)
    made = aggregated(0.02 * drawn(1, 2, 3, 64, key="prompts"), {**aggregator(2, 64)}, 8)
    torch.testing.assert_close(made.var(-1, correction=0), torch.ones(2, 3), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("width", "numbers"), [(768, 56_690_688), (512, 25_210_880)])
def test_its_numbers_at_vit_b_16(width: int, numbers: int) -> None:
    with torch.device("meta"):  # shapes only
        made = aggregator(12, width)
    assert sum(value.numel() for value in made.values()) == numbers == 12 * (8 * width**2 + 7 * width) + 4 * width


def test_it_starts_as_torchs_attention_does() -> None:
    torch.manual_seed(3)
    made = aggregator(3, 16)
    for name in ("query", "key", "value"):
        assert made[f"{name}_weight"].abs().max() <= (6 / (4 * 16)) ** 0.5
        assert made[f"{name}_weight"].abs().max() > 0.9 * (6 / (4 * 16)) ** 0.5
        assert not made[f"{name}_bias"].any()
    assert not made["out_bias"].any()
    assert made["inner_weight"].abs().max() <= 16**-0.5
    assert not torch.equal(made["inner_weight"][0], made["inner_weight"][1])
