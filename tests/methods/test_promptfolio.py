"""PromptFolio: the mixture by hand, and the two methods at its ends."""

from typing import Any

import pytest
import torch
from live_client import client_of, constructed, gradients, mini_batch, train
from text_prompts import assert_same_scores, run

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")

FEATURES = (torch.eye(2), torch.tensor([[0.6, 0.8], [0.8, 0.6]]))


def logits_of(method: Any, image: torch.Tensor) -> torch.Tensor:
    return 100 * image @ method.mixed(*FEATURES).T


@pytest.mark.parametrize(("renormalize", "expected"), [(False, [90.0, 20.0]), (True, [97.618706, 21.693046])])
def test_logits_by_hand(renormalize: bool, expected: list[float]) -> None:
    method = constructed("PromptFolio", theta=0.25, renormalize=renormalize)
    torch.testing.assert_close(logits_of(method, torch.tensor([1.0, 0.0])), torch.tensor(expected))


def test_logits_are_linear_in_theta() -> None:
    methods = [constructed("PromptFolio", theta=theta) for theta in (0.0, 0.5, 1.0)]
    images = mini_batch(methods[0]).features["image"]
    at = [method.logits(images, method.text_features("test")) for method in methods]
    torch.testing.assert_close(at[1], (at[0] + at[2]) / 2, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(at[0], at[2])


def test_equal_contexts_give_the_same_logits_for_every_theta() -> None:
    made = []
    for theta in (0.1, 0.7):
        method = constructed("PromptFolio", theta=theta)
        method.own_context.copy_(method.context)
        made.append(method.text_features("test"))
    torch.testing.assert_close(made[0], made[1], rtol=0, atol=1e-5)


def test_at_theta_0_the_run_is_promptfls_bit_for_bit() -> None:
    options = ("--model.init_args.training.weight_decay=0", "--model.init_args.training.lr=0.05")
    method, promptfl = run("PromptFolio", "--model.init_args.theta=0", *options), run("PromptFL", *options)
    assert torch.equal(method.get_parameter("context"), promptfl.get_parameter("context"))
    rows = method.store.all_rows("own_context")
    assert torch.equal(rows, rows[:1].expand_as(rows))  # no client's own has moved
    assert_same_scores(method, promptfl)


def test_at_theta_1_a_client_is_coops() -> None:
    rate = {"lr": 0.05, "epochs": 2}
    method, coop = constructed("PromptFolio", theta=1.0, training=rate), constructed("CoOp", training=rate)
    coop.context.copy_(method.own_context)
    start = {"context": method.context.clone()}
    found, expected = train(method, start, mini_batch(method)), train(coop, {}, mini_batch(coop))
    torch.testing.assert_close(found["own_context"], expected["context"], rtol=1e-5, atol=1e-6)
    assert not torch.equal(found["own_context"], coop.clip.initial_context(3))


def test_at_theta_1_the_shared_context_has_no_gradient() -> None:
    method = constructed("PromptFolio", theta=1.0)
    made = gradients(method, client_of(method), mini_batch(method))
    assert not made["context"].any()
    assert made["own_context"].any()


def test_the_shared_context_alone_is_sent() -> None:
    method = run("PromptFolio")
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == 3 * method.clip.text_width
