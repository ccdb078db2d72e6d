"""A recorded list of operations, shortened: the same numbers in fewer operations."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from operations import Operations
from torch import Tensor

from benchmark.engine.repeat.straight_line import straight_line


def run(function: Callable[..., Any], *tensors: Tensor) -> tuple[Any, Counter[str]]:
    """Run the shortened record of a function; return its result and the number of its operations by name."""
    recorded = straight_line(function, tensors)
    with Operations() as counting:
        made = recorded(*tensors)
    return made, counting.counts


def test_what_has_no_effect_is_left_out() -> None:
    x = torch.randn(3, 4)
    made, counts = run(lambda x: x.detach().expand(3, 4).view(3, 4) * 1 + x.view(12).view(3, 4), x)
    assert torch.equal(made, x + x)
    assert counts == {"add": 1}


def test_a_view_of_another_shape_stays() -> None:
    x = torch.randn(1, 4)
    made, counts = run(lambda x: x.expand(3, 4) + 1, x)
    assert torch.equal(made, x.expand(3, 4) + 1)
    assert counts == {"as_strided": 1, "add": 1}


def test_views_of_views_become_one() -> None:
    def function(x: Tensor) -> Tensor:
        made = x.exp()
        turned = made.view(2, 3, 4).transpose(0, 1).unsqueeze(1)[1:, :, :, 1:3]
        return turned.squeeze(1).contiguous() + made.view(2, 12)[0, 0]

    x = torch.randn(24)
    made, counts = run(function, x)
    assert torch.equal(made, function(x))
    assert counts == {"exp": 1, "as_strided": 2, "clone": 1, "add": 1}


def test_a_view_that_is_written_into_stays_one_of_its_own() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        made = x.exp()
        made.view(2, 2)[1].view(2, 1)[0].mul_(2)
        return made, made.view(2, 2)[1].unsqueeze(0) + 1

    x = torch.randn(4)
    made, _ = run(function, x)
    assert all(torch.equal(one, other) for one, other in zip(made, function(x), strict=True))


def test_an_input_may_begin_anywhere_in_its_memory() -> None:
    memory = torch.randn(20)
    recorded = straight_line(lambda x: x.view(2, 4).t().unsqueeze(0)[:, 1:].exp(), [memory[:8]])
    for start in (0, 5, 12):
        x = memory[start : start + 8]
        assert torch.equal(recorded(x), x.view(2, 4).t().unsqueeze(0)[:, 1:].exp())


def test_a_view_of_other_numbers_is_no_view_of_another_type() -> None:
    x = torch.randn(4)
    made, _ = run(lambda x: x.exp().view(torch.int32).view(2, 2) + 1, x)
    assert torch.equal(made, x.exp().view(torch.int32).view(2, 2) + 1)


def test_a_product_with_one_that_makes_another_type_stays() -> None:
    x = torch.arange(3)
    made, _ = run(lambda x: x * 1.0, x)
    assert made.dtype == torch.float32


def test_an_operation_is_done_once_and_one_on_another_number_again() -> None:
    x = torch.randn(5)
    made, counts = run(lambda x: (x.exp() + x.exp()) * (x.ne(1) & x.ne(True) & x.ne(2)), x)
    assert torch.equal(made, (x.exp() * 2) * x.ne(1) * x.ne(2))
    assert counts["exp"] == 1
    assert counts["ne"] >= 2


def test_what_depends_on_no_input_is_made_once() -> None:
    x = torch.randn(4)
    made, counts = run(lambda x: x + torch.arange(4) + torch.zeros_like(x) + torch.tensor(2.0), x)
    assert torch.equal(made, x + torch.arange(4) + 2.0)
    assert counts == {"add": 3}


def test_numbers_of_a_tensor_from_outside_may_change() -> None:
    x, outside = torch.randn(4), torch.ones(4)
    recorded = straight_line(lambda x: x * outside.exp(), [x])
    outside.fill_(2.0)
    assert torch.equal(recorded(x), x * outside.exp())


def test_what_is_written_into_stays_as_it_was() -> None:
    def function(x: Tensor) -> Tensor:
        total = torch.zeros(4)
        total[:2] += x[:2]
        first = total.clone()
        total.mul_(3)
        return first + total

    x = torch.randn(4)
    recorded = straight_line(function, [x])
    for _ in range(3):
        assert torch.equal(recorded(x), function(x))


def test_every_result_is_its_receivers_own() -> None:
    x = torch.randn(4)
    recorded = straight_line(lambda x: (x, x.view(2, 2), x.exp(), x.exp(), torch.ones(3)), [x])
    made = recorded(x)
    for result in made:
        result.zero_()
    assert (x != 0).all()
    again = recorded(x)
    assert torch.equal(again[2], x.exp())
    assert torch.equal(again[3], x.exp())
    assert torch.equal(again[4], torch.ones(3))


def test_one_of_several_results_is_taken() -> None:
    x = torch.randn(2, 1, 4, 4)
    made, counts = run(lambda x: torch.nn.functional.max_pool2d(x, 2, return_indices=True), x)
    expected = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))
    assert counts["max_pool2d_with_indices"] == 1


def test_random_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="draws random numbers"):
        straight_line(lambda x: x + torch.rand(4), [torch.randn(4)])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_is_recorded_unless_it_drops_something(dropout: float) -> None:
    """Torch marks the fused kernels as drawing, also where nothing is dropped."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    assert torch.Tag.nondeterministic_seeded in attention.tags

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        q = q.detach().requires_grad_()
        made = attention(q, k, v, dropout)[0]
        return made.detach(), torch.autograd.grad(made.sum(), q)[0]

    with torch.enable_grad():
        if dropout:
            with pytest.raises(ValueError, match=r"draws random numbers|dropout"):
                straight_line(attend, [q, k, v])
            return
        recorded = straight_line(attend, [q, k, v])
        for again in ([q, k, v], [v, q, k]):
            for made, expected in zip(recorded(*again), attend(*again), strict=True):
                assert torch.equal(made, expected)


def test_positions_may_be_looked_up_and_masks_not() -> None:
    x, positions = torch.randn(4), torch.tensor([2, 0])
    recorded = straight_line(lambda x, at: x[at], [x, positions])
    assert torch.equal(recorded(x, positions.flip(0)), x[positions.flip(0)])
    with pytest.raises(ValueError, match="would have to read numbers"):
        straight_line(lambda x: x[x > 0], [x])


def test_what_takes_too_much_memory_is_not_recorded() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp().view(-1).sin().sum()  # a kilobyte each, and a number

    x = torch.randn(16, 16)
    assert torch.equal(straight_line(function, [x], room=2052)(x), function(x))
    with pytest.raises(ValueError, match="to record it takes more than 0 MiB"):
        straight_line(function, [x], room=2051)
    outside = torch.randn(2**12)  # a view of what was there before takes nothing
    assert straight_line(lambda x: x[:4].view(-1) + outside[:4].view(-1), [torch.randn(2**12)[:64]], room=256)
