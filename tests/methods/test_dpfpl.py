"""DP-FPL: factors and the way back by hand, the subspace, and its degenerate ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from federation import build, fit
from live_client import client_of, constructed, gradients, mini_batch
from text_prompts import run

from benchmark.errors import ConfigurationError
from benchmark.seeds import torch_generator
from methods.dpfpl import factors, mapped_back, orthonormal

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")

SGD = ("--model.init_args.training={lr: 0.05, epochs: 2}",)


def drawn(*shape: int, key: str) -> torch.Tensor:
    return torch.randn(shape, generator=torch_generator(key))


def test_a_step_by_hand() -> None:
    own, start = torch.tensor([[3.0, 0.0, 0.0], [4.0, 0.0, 0.0]]), torch.tensor([[1.0], [0.0], [0.0]])
    u, v = factors(own, start)
    torch.testing.assert_close(u, torch.tensor([[0.6], [0.8]]))
    torch.testing.assert_close(v, torch.tensor([[1.0, 0.0, 0.0]]))
    torch.testing.assert_close(own - u @ v, torch.tensor([[2.4, 0.0, 0.0], [3.2, 0.0, 0.0]]))
    found = mapped_back(torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 5.0]]), u, v)
    torch.testing.assert_close(found, torch.tensor([[1.0, 1.2, 2.4], [0.0, 1.6, 3.2]]))


@pytest.mark.parametrize("rank", [1, 2, 5, 8])
def test_the_way_back_is_a_projection_of_at_most_twice_the_rank(rank: int) -> None:
    u, v = factors(drawn(8, 20, key="own"), drawn(20, rank, key="start"))
    torch.testing.assert_close(u.T @ u, torch.eye(rank), rtol=0, atol=1e-5)
    torch.testing.assert_close(v @ v.T, torch.eye(rank), rtol=0, atol=1e-5)
    change, other = drawn(8, 20, key="change"), drawn(8, 20, key="other")
    back = mapped_back(change, u, v)
    by_factors = change @ v.T @ v + u @ u.T @ change - u @ u.T @ change @ v.T @ v
    torch.testing.assert_close(back, by_factors, rtol=0, atol=1e-5)
    torch.testing.assert_close(mapped_back(back, u, v), back, rtol=0, atol=1e-5)
    assert float((back * other).sum()) == pytest.approx(float((change * mapped_back(other, u, v)).sum()), abs=1e-4)
    assert torch.linalg.matrix_rank(back, rtol=1e-4) <= 2 * rank
    if rank == 8:
        torch.testing.assert_close(back, change, rtol=0, atol=1e-5)


@pytest.mark.parametrize("columns", [torch.zeros(4, 2), torch.ones(4, 3)])
def test_columns_without_a_direction_stay_finite(columns: torch.Tensor) -> None:
    found = orthonormal(columns)
    torch.testing.assert_close(found.T @ found, torch.eye(columns.shape[1]), rtol=0, atol=1e-5)


def test_signs_are_gram_schmidts() -> None:
    columns = drawn(5, 3, key="columns")
    found = orthonormal(columns)
    kept: list[torch.Tensor] = []
    for column in columns.T:
        left = column - sum(((column @ one) * one for one in kept), torch.zeros(5))
        kept.append(left / left.norm())
    torch.testing.assert_close(found, torch.stack(kept, dim=1), rtol=0, atol=1e-5)


def test_plain_sgd_takes_the_step_that_the_paper_writes() -> None:
    method = constructed("DPFPL", rank=1)
    start = {"start": drawn(method.clip.text_width, 1, key="start")}
    client, batch = replace(client_of(method), constants=start), mini_batch(method, 0, 5)
    found = gradients(method, client, batch)
    torch.testing.assert_close(found["own_context"], found["context"])
    u, v = factors(method.own_context, start["start"])
    g = found["context"]
    expected = (g @ v.T) @ v + u @ (u.T @ g) - u @ u.T @ (g @ v.T) @ v
    moved = method.in_subspace(client, {name: -0.1 * value for name, value in found.items()})
    assert set(moved) == {"own_context"}
    torch.testing.assert_close(moved["own_context"], -0.1 * expected, rtol=1e-4, atol=1e-6)


def started(conf: str, own: str, *options: str) -> Any:
    """A run in which all that is a client's own starts at 0."""
    method, data = build(conf, *SGD, *options)
    method.get_parameter(own).data.zero_()
    fit(method, data, 2)
    return method


def test_of_full_rank_it_is_fedpgps_free_change_without_contrast() -> None:
    method = started("DPFPL", "own_context", "--model.init_args.rank=3")
    free = ("--model.init_args.adaptation=full_rank", "--model.init_args.mu=0")
    fedpgp = started("FedPGP", "change", *free)
    for left, right in ((method.context, fedpgp.context),):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        method.store.all_rows("own_context"), fedpgp.store.all_rows("change"), rtol=1e-3, atol=1e-4
    )


def test_of_rank_0_the_own_context_rests_and_it_is_promptfl() -> None:
    method = started("DPFPL", "own_context", "--model.init_args.rank=0")
    assert not method.store.all_rows("own_context").any()
    promptfl, data = build("PromptFL", *SGD)
    fit(promptfl, data, 2)
    torch.testing.assert_close(method.context, promptfl.context, rtol=1e-5, atol=1e-6)


def test_noise_on_single_images_gradients_stays_in_the_subspace() -> None:
    """A round of one step of noise alone moves the own context by at most twice the rank, the shared one by all."""
    noisy = "--data.record_privacy={clip: 1.0, noise_multiplier: 50.0}"
    one = ("--model.init_args.rank=1", "--model.init_args.training={lr: 0.1, epochs: 1, steps: 1}", noisy)
    method, data = build("DPFPL", "--data.partition=Even", "--data.clients_per_round=6", *one)
    start = method.own_context.detach().clone()
    fit(method, data, 1)
    moved = method.store.all_rows("own_context") - start
    assert moved.abs().max() > 0.1
    for client in range(6):
        assert torch.linalg.matrix_rank(moved[client], rtol=1e-3) <= 2
    assert torch.linalg.matrix_rank(method.context, rtol=1e-3) == 3


def test_every_client_has_a_start_of_its_own_and_sends_the_shared_context_alone() -> None:
    method = run("DPFPL")
    starts = [method.client_constants(client, method.simulation.terms)["start"] for client in (0, 1, 0)]
    assert torch.equal(starts[0], starts[2])
    assert not torch.equal(starts[0], starts[1])
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == 3 * method.clip.text_width


def test_a_rank_above_the_tokens_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="rank=4 is above num_context=3"):
        constructed("DPFPL", rank=4)
