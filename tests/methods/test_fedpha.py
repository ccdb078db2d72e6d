"""FedPHA: projection and push by hand, prompts of unequal length, and what it is without its two terms."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_client import client_of, constructed, gradients, mini_batch, train
from text_prompts import open_clip_text, run

from benchmark.contract import Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.seeds import torch_generator
from methods.fedpha import projected, push

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")

NAMES = [f"class{c}" for c in range(8)]


def of_length(method: Any, length: int, **settings: Any) -> Any:
    """The client with a context of so many tokens."""
    method.client_constants = lambda number, terms: {"length": torch.tensor(length)}
    client = replace(client_of(method), constants={"length": torch.tensor(length)})
    return replace(client, prepared=method.prepare(client, settings.get("stage", Stage.TRAIN), "train"))


def test_the_projection_by_hand() -> None:
    shared = torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    own = torch.tensor([[1.0, 2.0, 3.0]])
    for complement, expected in ((False, [0.0, 2.0, 0.0]), (True, [0.0, 2.0, 3.0])):
        made = projected(own, shared, 0.5, complement, through=False)
        torch.testing.assert_close(made, torch.tensor([expected]))


def test_what_has_diverged_has_no_projection_and_moves_no_others() -> None:
    shared, own = torch.eye(3).repeat(2, 1, 1), torch.ones(2, 4, 3)
    shared[1, 0, 0] = torch.inf
    made = torch.func.vmap(lambda a, g: projected(a, g, 0.5, True, through=False))(own, shared)
    assert torch.equal(made[0], projected(own[0], shared[0], 0.5, True, through=False))
    assert made[1].isnan().all()


@pytest.mark.parametrize(("rows", "kept"), [(16, 3), (32, 6), (20, 3), (10, 1), (4, 0)])
def test_the_cut_is_the_floor_of_a_floating_point_product(rows: int, kept: int) -> None:
    assert int(rows * (1 - 0.8)) == kept
    shared = torch.randn(rows, 40, generator=torch_generator("shared"))
    for complement, rank in ((False, rows - kept), (True, 40 - kept)):
        of_unit = projected(torch.eye(40), shared, 0.8, complement, through=False)
        torch.testing.assert_close(of_unit, of_unit.T, rtol=0, atol=1e-5)
        torch.testing.assert_close(of_unit @ of_unit, of_unit, rtol=0, atol=1e-5)
        assert of_unit.trace().item() == pytest.approx(rank, abs=1e-3)


def test_at_the_ends_of_the_ratio() -> None:
    shared = torch.randn(4, 9, generator=torch_generator("shared"))
    torch.testing.assert_close(projected(shared, shared, 1.0, False, through=False), shared, rtol=0, atol=1e-5)
    beside = torch.randn(2, 9, generator=torch_generator("own"))
    beside = beside - projected(beside, shared, 1.0, False, through=False)
    assert projected(beside, shared, 1.0, False, through=False).abs().max() < 1e-5
    assert not projected(beside, shared, 0.0, False, through=False).any()


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [([1.0, 0.0], [0.0, 1.0], 0.0), ([1.0, 0.0], [1.0, 0.0], 1.0), ([1.0, 0.0], [0.5, math.sqrt(0.75)], 0.0)],
)
def test_the_push_by_hand(own: list[float], shared: list[float], expected: float) -> None:
    made = push(torch.tensor([own]), torch.tensor([shared]), 1.0)
    assert made.item() == pytest.approx(expected, abs=1e-5)


def test_where_features_are_equal_the_push_has_no_gradient() -> None:
    own = torch.eye(3).requires_grad_()
    push(own, torch.eye(3), 1.0).backward()
    assert own.grad is not None
    assert not own.grad.any()


@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_shorter_prompt_is_read_as_if_it_were_alone(length: int) -> None:
    method = constructed("FedPHA")
    made = method.own_features(of_length(method, length), "test", method.own_context)
    expected = open_clip_text(method.clip, NAMES, method.own_context[:length])
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)


def test_words_that_all_classes_have_stand_behind_a_shorter_prompt() -> None:
    method = constructed("FedPHA")
    clip = method.clip
    prompts, short = (clip.class_prompts(NAMES, count, "of a {} here.") for count in (4, 2))
    made = clip.text_features(prompts, method.own_context, length=torch.tensor(2))
    torch.testing.assert_close(made, clip.text_features(short, method.own_context[:2]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("complement", [False, True])
def test_the_objective_written_out(complement: bool) -> None:
    method = constructed("FedPHA", complement=complement, alpha=0.5, pull=3.0, push=2.0)
    client, batch = of_length(method, 3), mini_batch(method, 0, 5)
    shared, own = method.context, method.own_context[:3]
    cut = int(3 * 0.5)
    _, _, rows = torch.linalg.svd(shared, full_matrices=complement)
    off = own @ rows[cut:].T @ rows[cut:]
    of_own, of_shared, of_off = (open_clip_text(method.clip, NAMES, context) for context in (own, shared, off))
    images, scale = batch.features["image"], method.clip.logit_scale
    expected = sum(F.cross_entropy(scale * images @ classes.T, batch.y) for classes in (of_own, of_shared))
    expected = expected + 3 * sum(
        float((a - b) ** 2) for a, b in zip(of_own.flatten(), of_off.flatten(), strict=True)
    ) / (of_own.numel())
    far = [float((a - b).norm()) for a, b in zip(of_own, of_shared, strict=True)]
    expected = expected + 2 * sum(max(0.0, 0.5 - distance) for distance in far) / 8
    torch.testing.assert_close(method.client_loss(client, batch), expected, rtol=1e-4, atol=1e-4)


def test_the_pull_moves_the_shared_context_only_through_the_decomposition() -> None:
    made = {}
    for through in (False, True):
        method = constructed("FedPHA", svd_gradient=through, push=0.0)
        client, batch = of_length(method, 3), mini_batch(method, 0, 5)
        with_pull = gradients(method, client, batch)["context"]
        method.pull = 0.0
        made[through] = with_pull - gradients(method, client, batch)["context"]
        assert with_pull.isfinite().all()
    assert made[False].abs().max() < 1e-5
    assert made[True].abs().max() > 1e-4


@pytest.mark.parametrize("length", [2, 4])
def test_without_its_terms_the_two_contexts_are_coops_and_promptfls(length: int) -> None:
    rate = {"lr": 0.05, "epochs": 2, "weight_decay": 0.0}
    method, promptfl = constructed("FedPHA", pull=0.0, push=0.0, training=rate), constructed("PromptFL", training=rate)
    coop = constructed("CoOp", num_context=length, training=rate)
    coop.context.copy_(method.own_context[:length])
    shared: Values = {"context": method.context.clone()}
    method.client_constants = None
    of_length(method, length)
    own = method.own_context.clone()
    made = _trained(method, shared, length)
    expected = train(promptfl, shared, mini_batch(promptfl))["context"]
    torch.testing.assert_close(made["context"], expected, rtol=1e-4, atol=1e-6)
    expected = train(coop, {}, mini_batch(coop))["context"]
    torch.testing.assert_close(made["own_context"][:length], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(made["own_context"][length:], own[length:])


def _trained(method: Any, received: Values, length: int) -> Values:
    loss, constants = method.client_loss, {"length": torch.tensor(length)}
    method.client_loss = lambda client, batch: loss(replace(client, constants=constants), batch)
    return train(method, received, mini_batch(method))


def test_a_prediction_does_not_see_the_shared_context() -> None:
    method = constructed("FedPHA")
    batch = mini_batch(method)
    expected = method.client_logits(of_length(method, 2, stage=Stage.EVALUATE), batch)
    method.context.fill_(float("nan"))
    assert torch.equal(method.client_logits(of_length(method, 2, stage=Stage.EVALUATE), batch), expected)


def test_lengths_are_given_or_drawn_from_the_runs_seed() -> None:
    drawn = [[_length(run("FedPHA", rounds=1), client) for client in range(11)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) <= {1, 2, 3, 4}
    assert len(set(drawn[0])) > 2
    given = constructed("FedPHA", own_lengths=[*range(1, 12)])
    assert given.own_context.shape[0] == 11
    assert [int(given.client_constants(k, None)["length"]) for k in range(11)] == [*range(1, 12)]
    with pytest.raises(ConfigurationError, match="own_lengths names 2 lengths for 11 clients"):
        constructed("FedPHA", own_lengths=[1, 2])
    with pytest.raises(ConfigurationError, match="shortest=4 is above longest=2"):
        constructed("FedPHA", shortest=4, longest=2)


def _length(method: Any, client: int) -> int:
    return int(method.client_constants(client, method.simulation.terms)["length"])


def test_the_shared_context_alone_is_sent_whatever_the_lengths() -> None:
    method = run("FedPHA")
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == 3 * method.clip.text_width
