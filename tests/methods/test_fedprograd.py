"""FedProGrad: the projection and the distance by hand, the gradient of a loop, and what it is without them."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_client import client_of, constructed, gradients, mini_batch
from text_prompts import assert_same_scores, metrics, run

from benchmark.contract import MiniBatch, Stage
from benchmark.seeds import torch_generator
from methods.fedprograd import distance_to_teacher, without_conflict

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


@pytest.mark.parametrize(
    ("general", "lam", "expected"),
    [
        ([-1.0, 1.0], 1.0, [0.5, 0.5]),
        ([-1.0, 1.0], 0.8, [0.6, 0.4]),
        ([-5.0, 5.0], 1.0, [0.5, 0.5]),
        ([1.0, 1.0], 1.0, [1.0, 0.0]),
        ([0.0, 0.0], 1.0, [1.0, 0.0]),
    ],
)
def test_the_projection_by_hand(general: list[float], lam: float, expected: list[float]) -> None:
    made = without_conflict(torch.tensor([1.0, 0.0]), torch.tensor(general), lam)
    torch.testing.assert_close(made, torch.tensor(expected))


def test_what_is_left_never_contradicts_and_is_no_longer() -> None:
    draws = torch.randn(20, 2, 4, 3, generator=torch_generator("gradients"))
    for task, general in draws:
        left = without_conflict(task, general, 1.0)
        product = float((left * general).sum())
        assert product >= -1e-6
        if float((task * general).sum()) < 0:
            assert product == pytest.approx(0, abs=1e-5)
        assert left.norm() <= task.norm() + 1e-6


def test_the_distance_by_hand() -> None:
    student, teacher = torch.tensor([[0.0, 0.0], [5.0, 1.0]]), torch.tensor([[math.log(3.0), 0.0], [1.0, 2.0]])
    there = torch.tensor([True, False])
    assert distance_to_teacher(student, teacher, there, 1.0).item() == pytest.approx(math.log(2))
    # q = (3, 1) / 4 against a student of the same distribution: its entropy; at T = 2, softened on both sides, times 4
    own = distance_to_teacher(teacher, teacher, there, 1.0).item()
    assert own == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    soft = math.sqrt(3) / (1 + math.sqrt(3))
    found = distance_to_teacher(teacher, teacher, there, 2.0).item()
    assert found == pytest.approx(-4 * (soft * math.log(soft) + (1 - soft) * math.log(1 - soft)))


def contradicting(method: Any) -> MiniBatch:
    """A mini-batch whose labels are what zero-shot CLIP finds least likely."""
    batch = mini_batch(method, 0, 5)
    texts = method.clip.text_features_of([f"a photo of a class{c}." for c in range(8)])
    return replace(batch, y=(batch.features["image"] @ texts.T).argmin(1))


@pytest.mark.parametrize(("lam", "mode"), [(1.0, "project"), (0.8, "project"), (0.5, "distill")])
def test_the_step_is_that_of_two_backward_passes(lam: float, mode: str) -> None:
    method = constructed("FedProGrad", lam=lam, mode=mode, num_context=4, init_words="a photo of a")
    method.context.add_(0.02 * torch.randn(method.context.shape, generator=torch_generator("context")))
    client, batch = client_of(method), contradicting(method)
    found, loss = gradients(method, client, batch)["context"], method.client_loss(client, batch)
    context = method.context.detach().clone().requires_grad_()
    images = batch.features["image"]
    student = method.clip.logit_scale * images @ method.clip.text_features(method.class_prompts("train"), context).T
    texts = method.clip.text_features_of([f"a photo of a class{c}." for c in range(8)])
    teacher = (method.clip.logit_scale * images @ texts.T).softmax(1)
    task, general = F.cross_entropy(student, batch.y), -(teacher * student.log_softmax(1)).sum(1).mean()
    g_d, g_g = (torch.autograd.grad(each, context, retain_graph=True)[0] for each in (task, general))
    dot = float((g_d * g_g).sum())
    assert dot < 0
    if mode == "distill":
        expected, value = g_d + lam * g_g, task + lam * general
    else:
        expected, value = g_d - lam * min(0.0, dot) / float(g_g.square().sum()) * g_g, task
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(loss, value, rtol=1e-5, atol=1e-5)


def test_a_teacher_like_the_student_changes_nothing() -> None:
    words = "a photo of a"
    method = constructed("FedProGrad", num_context=4, init_words=words)
    client, batch = client_of(method), mini_batch(method)
    found = gradients(method, client, batch)["context"]
    method.lam = 0.0
    # g_g is what rounding leaves; its direction is arbitrary, and g_d may lose a component along it.
    expected = gradients(method, client, batch)["context"]
    general = distance_to_teacher(
        method.logits(batch.features["image"], method.text_features("train")),
        method.logits(batch.features["image"], client.prepared["template"]),
        batch.mask,
        1.0,
    )
    entropy = torch.distributions.Categorical(
        logits=method.logits(batch.features["image"], client.prepared["template"])
    ).entropy()
    torch.testing.assert_close(general, entropy.mean(), rtol=1e-4, atol=1e-5)
    assert found.norm() <= expected.norm() + 1e-6


def test_words_stand_at_the_end_of_the_context_behind_zeros() -> None:
    method = constructed("FedProGrad", num_context=6, init_words="a photo of a")
    assert not method.context[:2].any()
    assert torch.equal(method.context[2:], method.clip.initial_context(4, "a photo of a"))


def test_an_evaluation_does_not_make_the_template() -> None:
    assert set(client_of(constructed("FedProGrad"), stage=Stage.EVALUATE).prepared) == {"text"}


def test_without_it_the_run_is_promptfls_bit_for_bit() -> None:
    method, promptfl = run("FedProGrad", "--model.init_args.lam=0"), run("PromptFL")
    assert torch.equal(method.get_parameter("context"), promptfl.get_parameter("context"))
    assert_same_scores(method, promptfl)


def test_the_recorded_loss_is_the_cross_entropy() -> None:
    """Before any step the two methods' recorded losses of a round of one step are the same."""
    one = ("--model.init_args.training.epochs=1", "--data.batch_size=64", "--model.init_args.training.momentum=0")
    found, expected = (run(conf, *one, rounds=1) for conf in ("FedProGrad", "PromptFL"))
    name = next(n for n in metrics(found) if n.endswith("train/loss"))
    torch.testing.assert_close(metrics(found)[name], metrics(expected)[name], rtol=1e-5, atol=1e-5, equal_nan=True)
