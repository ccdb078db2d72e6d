"""TRIP: its terms and its mean over the rounds by hand, the objective image by image, and its degenerate cases."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit, terms
from live_client import client_of, constructed, gradients, mini_batch
from oracle import FEW, Values, simulate
from text_prompts import assert_same_scores, run
from torch import Tensor

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Stage
from benchmark.engine.roles import read_roles
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads
from methods import TRIP
from methods.losses import taught_entropy
from methods.trajectory import BetaTrajectory

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")

OFF = "--model.init_args.average=off"


# --- the terms by hand ---


def test_the_teachers_term_by_hand() -> None:
    logits, teacher = torch.tensor([[2.0, 0.0], [9.0, 0.0]]), torch.zeros(2, 2)
    made = taught_entropy(logits, teacher, torch.tensor([True, False]))
    assert made.item() == pytest.approx(1.1269, abs=1e-4)
    same = teacher.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(taught_entropy(same, teacher, torch.ones(2) > 0), same)
    assert not gradient.any()


def rule_of(rounds: int, with_start: bool, given: int | None = None) -> BetaTrajectory:
    rule = BetaTrajectory(given, with_start)
    rule.start({"p": torch.zeros(1)}, replace(terms(1), rounds=rounds))
    return rule


def averaged(values: list[float], with_start: bool, start: float = 0.0) -> float:
    """Return what is evaluated after the last round."""
    rule, shared = rule_of(len(values), with_start), {"p": torch.tensor([start])}
    for number, value in enumerate(values, 1):
        uploads = Uploads((0,), {"p": torch.tensor([[value]])}, torch.ones(1))
        shared = rule.aggregate(Round(number, (0,), 0), shared, uploads)
        assert shared["p"].item() == value  # training goes on from the round's own value
        assert rule.broadcast(Round(number + 1, (0,), 0), shared, (0,)).common["p"].item() == value
    return rule.broadcast(Round(len(values), (), 0), shared, (0,)).common["p"].item()


def test_the_weights_of_rounds_by_hand() -> None:
    made = torch.tensor([rule_of(3, False).log_weight_of(number) for number in (1, 2, 3)]).exp()
    torch.testing.assert_close(made, torch.tensor([0.6181, 0.3360, 0.3360]), atol=1e-4, rtol=0)
    assert rule_of(9, False, 3).log_weight_of(2) == rule_of(3, False).log_weight_of(2)
    assert rule_of(3, False).log_weight_of(5) == rule_of(5, False).log_weight_of(5)  # after the last: as a last one


@pytest.mark.parametrize(
    ("rounds", "shares"),
    [
        (3, [0.3239, 0.3239, 0.1761, 0.1761]),
        (
            15,
            [
                *(0.1791, 0.1791, 0.0785, 0.0552, 0.0449, 0.0392, 0.0359, 0.0340),
                *(0.0332, 0.0332, 0.0340, 0.0359, 0.0392, 0.0449, 0.0552, 0.0785),
            ],
        ),
    ],
)
def test_the_shares_of_rounds_by_hand(rounds: int, shares: list[float]) -> None:
    for place, share in enumerate(shares):
        start, *values = [float(place == at) for at in range(rounds + 1)]
        assert averaged(values, True, start) == pytest.approx(share, abs=1e-4)
        if place:
            assert averaged(values, False) == pytest.approx(share / (1 - shares[0]), abs=1e-4)


@pytest.mark.parametrize("with_start", [False, True])
def test_a_trajectory_that_stands_still_is_where_it_stands(with_start: bool) -> None:
    assert averaged([3.0] * 4, with_start, 3.0) == pytest.approx(3.0)


# --- the method ---


def logits_by_image(method: Any, experts: Tensor, images: Tensor, weights: Tensor) -> Tensor:
    """Image by image: its mixed context, its text features, its logits."""
    rows = []
    for image, omega in zip(images, weights, strict=True):
        context = sum(share * expert for share, expert in zip(omega, experts, strict=True))
        text = method.clip.text_features(method.class_prompts("train"), context)
        rows.append(method.clip.logit_scale * text @ image)
    return torch.stack(rows)


def test_the_objective_written_out() -> None:
    method = constructed("TRIP", alpha=0.7)
    batch = mini_batch(method, 0, 5)
    f, weights = batch.features["image"], batch.features["training"]
    logits = logits_by_image(method, method.context, f, weights)
    teacher = (method.clip.logit_scale * f @ method.frozen_text("train").T).softmax(1)
    expected = F.cross_entropy(logits, batch.y) - 0.7 * (teacher * logits.log_softmax(1)).sum() / 5
    torch.testing.assert_close(method.client_loss(client_of(method), batch), expected, rtol=1e-4, atol=1e-4)
    made = method.client_logits(client_of(method, stage=Stage.EVALUATE), batch)
    expected = logits_by_image(method, method.context, f, batch.features["test"])
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(method(batch.x), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(made, logits_by_image(method, method.context, f, weights), atol=1e-2)


def test_an_experts_gradient_is_the_weighted_sum_of_the_images() -> None:
    method = constructed("TRIP")
    batch = mini_batch(method, 0, 5)
    made = gradients(method, client_of(method), batch)["context"]
    mixed = method.mixed(batch.features["training"]).detach().requires_grad_()
    method.mixed = lambda weights: mixed
    (of_images,) = torch.autograd.grad(method.client_loss(client_of(method), batch), mixed)
    expected = torch.einsum("bk,bnw->knw", batch.features["training"], of_images)
    torch.testing.assert_close(made, expected)


def test_equal_experts_are_one_whatever_the_weights() -> None:
    method = constructed("TRIP", expert_init="same")
    weights = torch.tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(method.mixed(weights), method.context[:2], rtol=0, atol=1e-6)
    assert torch.equal(method.context[0], method.context[2])
    drawn = constructed("TRIP", expert_init="independent").context
    assert not torch.equal(drawn[0], drawn[2])


def test_what_is_kept_of_an_image_does_not_depend_on_the_others() -> None:
    method = constructed("TRIP")
    x = mini_batch(method, 0, 6).x
    together, order = method.frozen_features(x), torch.tensor([5, 1, 3])
    assert {name: value.dtype for name, value in together.items()} == dict.fromkeys(together, torch.float32)
    for name, value in method.frozen_features(x[order]).items():
        torch.testing.assert_close(value, together[name][order], rtol=0, atol=1e-6)
    torch.testing.assert_close(method(x)[order], method(x[order]), rtol=1e-4, atol=1e-4)
    for name, value in constructed("TRIP").frozen_features(x).items():
        assert torch.equal(value, together[name])


def test_agrees_with_a_sequential_simulation() -> None:
    teachers: list[Tensor] = []

    def loss(method: Any, values: Values, *others: Any) -> Tensor:
        x, y = others[-2:]
        features = method.frozen_features(x)
        logits = logits_by_image(method, values["context"], features["image"], features["training"])
        teachers.append((method.clip.logit_scale * features["image"] @ method.frozen_text("train").T).softmax(1))
        return F.cross_entropy(logits, y) - (teachers[-1] * logits.log_softmax(1)).sum() / len(y)

    longer = ("--data.partition=federation.Longer", "--data.partition.init_args.num_clients=4")
    expected = simulate("TRIP", 2, loss, *longer)
    method, data = build("TRIP", *FEW, *longer)
    fit(method, data, 2)
    torch.testing.assert_close(method.get_parameter("context"), expected["context"], rtol=1e-3, atol=1e-5)


def test_of_one_expert_and_without_a_teacher_it_is_promptfl() -> None:
    one = ("--model.init_args.num_experts=1", "--model.init_args.expert_init=same", "--model.init_args.alpha=0", OFF)
    method, promptfl = constructed("TRIP", num_experts=1, alpha=0.0), constructed("PromptFL")
    assert torch.equal(method.context[0], promptfl.context)
    x = mini_batch(method).x
    assert torch.equal(method.frozen_features(x)["training"], torch.ones(12, 1))
    torch.testing.assert_close(method(x), promptfl(x), rtol=1e-4, atol=1e-4)  # the text pass rounds otherwise
    same = ("--model.init_args.training.lr=0.05", "--model.init_args.training.epochs=1")
    made, expected = run("TRIP", *one), run("PromptFL", *same, "--model.init_args.training.momentum=0.9")
    torch.testing.assert_close(made.context[0], expected.context, rtol=1e-3, atol=1e-5)


def test_the_trajectory_is_never_trained_from() -> None:
    on, off = run("TRIP", rounds=3), run("TRIP", OFF, rounds=3)
    assert torch.equal(on.context, off.context)
    sent = on.server.rule.broadcast(on.server.evaluated, on.simulation.shared(), (0,)).common
    assert not torch.equal(sent["context"], on.context)


def test_a_run_again_evaluates_the_same() -> None:
    assert_same_scores(run("TRIP", rounds=2), run("TRIP", rounds=2))


@pytest.mark.parametrize(("experts", "expected"), [(8, 131_072), (4, 65_536)])
def test_message(experts: int, expected: int) -> None:
    with torch.device("meta"):  # shapes only
        method = TRIP(10, ["a", "b"], PromptedCLIP("ViT-B-16", "random"), num_experts=experts)
    roles = read_roles(method)
    assert sum(method.get_parameter(name).numel() for name in roles.shared) == expected
    assert not roles.personal


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_experts": 18}, "TRIP: num_experts=18, but an image has 17 tokens of 96 numbers; give at most 17"),
        ({"init_words": "a photo of"}, "TRIP: init_words start all experts alike"),
        ({"templates": 1000}, "TRIP: templates=1000, but open_clip has 80"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        constructed("TRIP", **settings)


def test_a_resnet_is_refused() -> None:
    with torch.device("meta"):
        resnet = PromptedCLIP("RN50", "random")
    with pytest.raises(ConfigurationError, match="TRIP routes by the tokens of a ViT, and this CLIP's image tower is"):
        TRIP(2, ["a"], resnet)
