"""FedOTP: plans by hand and by bisection, where gradients go, and what it becomes at its limits."""

import math
from typing import Any

import pytest
import torch
from federation import build, fit
from live_client import client_of, constructed, gradients, mini_batch
from text_prompts import run
from torch import Tensor

from benchmark.contract import Stage
from benchmark.errors import ConfigurationError
from benchmark.seeds import torch_generator
from methods.transport import transport_plan

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")

EPS = 0.2 / math.log(3)  # so that 0.2 more of similarity is a ratio of 3


def similarities(*shape: int) -> Tensor:
    """As CLIP's: around 0.2."""
    return 0.2 + 0.05 * torch.randn(*shape, generator=torch_generator("similarities"))


def logit(similarity: Tensor, gamma: float, eps: float = EPS, iterations: int = 100) -> float:
    return 100 * float((transport_plan(similarity, gamma, eps, iterations) * similarity).sum())


@pytest.mark.parametrize(
    ("gamma", "iterations", "plan", "expected"),
    [
        (1.0, 1, (0.5, 0.5), 30.0),
        (0.5, 1, (0.125, 0.375), 17.5),
        (0.8, 200, (0.3, 0.5), 26.0),
        (0.8, 1, (0.2, 0.6), 28.0),
        (0.8, 2, (0.228571, 0.571429), 27.428571),
        (0.8, 3, None, 26.980392),
        (0.8, 10, None, 26.043340),
    ],
)
def test_two_patches_and_one_prompt_by_hand(gamma: float, iterations: int, plan: Any, expected: float) -> None:
    similarity = torch.tensor([[0.2], [0.4]])
    if plan is not None:
        made = transport_plan(similarity, gamma, EPS, iterations)
        torch.testing.assert_close(made, torch.tensor(plan)[:, None], rtol=1e-5, atol=1e-6)
    assert logit(similarity, gamma, iterations=iterations) == pytest.approx(expected, abs=1e-4)


def test_more_by_hand() -> None:
    assert logit(torch.tensor([[0.2], [0.4]]), 0.5, eps=0.01) == pytest.approx(20.0, abs=1e-4)
    similarity = torch.tensor([[0.4, 0.2], [0.2, 0.4]])
    for gamma, plan, expected in ((0.8, (0.3, 0.1), 28.0), (1.0, (0.375, 0.125), 35.0)):
        made = transport_plan(similarity, gamma, EPS, 1)
        torch.testing.assert_close(made, torch.tensor([plan, plan[::-1]]), rtol=1e-5, atol=1e-6)
        assert logit(similarity, gamma, iterations=1) == pytest.approx(expected, abs=1e-4)


def test_one_prompt_is_the_bisections_plan() -> None:
    similarity = similarities(49)
    low, high = 0.0, 1e6
    for _ in range(200):
        kappa = (low + high) / 2
        plan = torch.minimum(torch.tensor(1 / 49), kappa * torch.exp((similarity - 1) / 0.1))
        low, high = (kappa, high) if plan.sum() < 0.8 else (low, kappa)
    torch.testing.assert_close(transport_plan(similarity[:, None], 0.8, 0.1, 100)[:, 0], plan, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("eps", [0.01, 0.1])
def test_every_prompt_is_served_and_no_patch_gives_more_than_it_has(eps: float) -> None:
    similarity = similarities(3, 5, 49, 2)
    for iterations in (1, 7, 100):
        columns = transport_plan(similarity, 0.8, eps, iterations).sum(-2)
        torch.testing.assert_close(columns, torch.full_like(columns, 0.4), rtol=0, atol=1e-5)
    plan = transport_plan(similarity, 0.8, 0.1, 100)
    rows = plan.sum(-1)
    assert rows.max() <= 1.001 / 49
    # Where a patch keeps some of its mass, its factor is 1: the plan is K v.
    kernel = torch.exp((similarity - 1) / 0.1)
    factor = (plan / kernel).amax(-1) / (plan / kernel).amax(-1).amax(-1, keepdim=True)
    assert factor[rows < 0.99 / 49].min() > 0.999
    assert transport_plan(similarity, 1.0, eps, 100).sum((-2, -1)).sub(1).abs().max() < 1e-5


def test_limits_of_the_plan() -> None:
    similarity = similarities(2, 16, 2)
    uniform = torch.full_like(similarity, 0.8 / 32)
    torch.testing.assert_close(transport_plan(similarity, 0.8, 1e4, 20), uniform, rtol=1e-4, atol=0)
    for eps in (0.01, 1.0):
        mean = 100 * similarity[0, :, :1].mean().item()
        assert logit(similarity[0, :, :1], 1.0, eps) == pytest.approx(mean, abs=1e-3)
    moved = transport_plan(similarity + 0.3, 0.8, 0.1, 100)
    torch.testing.assert_close(moved, transport_plan(similarity, 0.8, 0.1, 100), rtol=1e-3, atol=1e-6)
    order = torch.randperm(16, generator=torch_generator("order"))
    permuted = transport_plan(similarity[:, order], 0.8, 0.1, 100)
    torch.testing.assert_close(permuted, transport_plan(similarity, 0.8, 0.1, 100)[:, order])


def test_a_plan_depends_on_nothing_else_in_the_batch() -> None:
    similarity = similarities(4, 3, 16, 2)
    whole = transport_plan(similarity, 0.8, 0.01, 50)
    torch.testing.assert_close(transport_plan(similarity[1:2, 2:], 0.8, 0.01, 50), whole[1:2, 2:], rtol=1e-6, atol=0)


def test_gradients_go_through_the_similarities_alone() -> None:
    method, generator = constructed("FedOTP"), torch_generator("logits")
    images = torch.nn.functional.normalize(torch.randn(3, 16, 64, generator=generator), dim=-1)
    classes = torch.nn.functional.normalize(torch.randn(2, 8, 64, generator=generator), dim=-1).requires_grad_()
    plan = transport_plan(torch.einsum("bme,jce->bcmj", images, classes), 0.8, 0.1, 20)
    assert not plan.requires_grad
    (made,) = torch.autograd.grad(method.logits(images, classes)[:, 4].sum(), classes)
    expected = torch.zeros_like(made)
    expected[:, 4] = method.clip.logit_scale * torch.einsum("bmj,bme->je", plan[:, 4], images)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


def test_both_contexts_learn_and_start_apart() -> None:
    method = constructed("FedOTP", num_context=16)
    made = gradients(method, client_of(method), mini_batch(method))
    assert set(made) == {"context", "own_context"}
    for name, gradient in made.items():
        assert gradient.abs().max() > 1e-3
        assert method.get_parameter(name).std().item() == pytest.approx(0.02, rel=0.25)
    assert (method.context - method.own_context).abs().max() > 0.01
    assert torch.equal(method.context, constructed("PromptFL", num_context=16).context)


def test_equal_contexts_are_one_prompt() -> None:
    method = constructed("FedOTP", iterations=100)
    x = mini_batch(method).x
    method.own_context.copy_(method.context)
    two = method(x)
    method.prompts = lambda: method.context[None]
    torch.testing.assert_close(two, method(x), rtol=1e-4, atol=1e-4)


def as_promptfl(method: Any) -> Any:
    """One prompt and one token, the pooled feature."""
    method.personal, method.gamma = (), 1.0
    method.prompts = lambda: method.context[None]
    method.frozen_features = lambda x: {"image": method.clip.image_features(x)[:, None]}
    return method


def test_with_one_prompt_and_the_pooled_feature_it_is_promptfl() -> None:
    method, data = build("FedOTP", "--model.init_args.training.lr=0.05")
    fit(as_promptfl(method), data, 2)
    promptfl = run("PromptFL")
    learned, expected = method.get_parameter("context"), promptfl.get_parameter("context")
    torch.testing.assert_close(learned, expected, rtol=1e-4, atol=1e-5)


def test_only_the_shared_context_is_sent_and_the_own_one_stays() -> None:
    method = run("FedOTP")
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == 3 * method.clip.text_width
    rows = method.store.all_rows("own_context")
    assert (rows - rows[0]).abs().amax((1, 2)).max() > 1e-3


def test_patches_are_the_features_that_are_kept() -> None:
    method = constructed("FedOTP")
    batch = mini_batch(method)
    assert batch.features["image"].shape == (12, 16, 64)
    torch.testing.assert_close(batch.features["image"].norm(dim=-1), torch.ones(12, 16))
    torch.testing.assert_close(method(batch.x), method.client_logits(client_of(method, stage=Stage.EVALUATE), batch))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.5}, "gamma: expected a number above 0 and at most 1, got 1.5"),
        ({"eps": 0.0}, "eps: expected a number above 0, got 0.0"),
        ({"iterations": 0}, "iterations: expected a whole number from 1 to 1,000,000,000, got 0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        constructed("FedOTP", **settings)
