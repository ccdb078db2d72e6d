"""pFedMoAP: the gate by hand, whose prompts are sent to whom and when, what rests without them, and PromptFL."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from federation import build, fit, terms
from live_client import client_of, constructed, gradients, mini_batch, parameters_of
from text_prompts import metrics, run
from torch import Tensor

from benchmark.contract import LocalTraining, Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads
from benchmark.seeds import torch_generator
from methods.experts import ExpertAttention, ExpertRule

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch_generator("drawn", *shape))


@torch.no_grad()
def identity(width: int, scaling: float) -> ExpertAttention:
    """A gate of one head whose projections do nothing."""
    gate = ExpertAttention(width, 1, scaling)
    for part in (gate.query, gate.key, gate.value, gate.out):
        part.weight.copy_(torch.eye(width))
        part.bias.zero_()
    return gate


ALL = torch.ones(2, dtype=torch.bool)


@torch.no_grad()
def test_the_gate_by_hand() -> None:
    image, experts = torch.tensor([[1.0, 0.0]]), torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    mixture = identity(2, math.log(3))(image, experts, ALL)
    torch.testing.assert_close(mixture, torch.tensor([[[0.75, 0.25]]]))
    assert 100 * float(image[0] @ mixture[0, 0]) == pytest.approx(75)
    assert 0.5 * 100 + 100 * float(image[0] @ mixture[0, 0]) == pytest.approx(125)
    alone = identity(2, math.log(3))(image, experts, torch.tensor([True, False]))
    torch.testing.assert_close(alone, torch.tensor([[[1.0, 0.0]]]))


@torch.no_grad()
def test_the_gate_is_that_of_a_loop_over_images_classes_and_heads() -> None:
    gate, images, experts = ExpertAttention(16, 2, 10.0), drawn(3, 16), drawn(4, 5, 16)
    made = gate(images, experts, torch.tensor([True, True, False, True]))
    for b in range(3):
        for c in range(5):
            q, k, v = gate.query(images[b]), gate.key(experts[:, c]), gate.value(experts[:, c])
            heads = []
            for own in (slice(0, 8), slice(8, 16)):
                scores = {j: 10 * float(q[own] @ k[j, own]) for j in (0, 1, 3)}
                total = sum(math.exp(z - max(scores.values())) for z in scores.values())
                weights = {j: math.exp(z - max(scores.values())) / total for j, z in scores.items()}
                heads.append(sum(weight * v[j, own] for j, weight in weights.items()))
            torch.testing.assert_close(made[b, c], gate.out(torch.cat(heads)), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_experts_order_and_the_keys_bias_change_nothing_and_equal_ones_share() -> None:
    gate, images, experts = ExpertAttention(16, 2, 10.0), drawn(3, 16), drawn(4, 5, 16)
    mask = torch.ones(4, dtype=torch.bool)
    made = gate(images, experts, mask)
    torch.testing.assert_close(gate(images, experts[[2, 0, 3, 1]], mask), made)
    equal = gate(images, experts[:1].expand(4, -1, -1), mask)
    torch.testing.assert_close(equal, gate.out(gate.value(experts[0])).expand(3, -1, -1))
    gate.key.bias += 3
    torch.testing.assert_close(gate(images, experts, mask), made, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ the server


def rule_of(count: int, prompts: Tensor) -> ExpertRule:
    """A server at which these clients have uploaded their prompts in the first round."""
    rule, clients = ExpertRule(count), len(prompts)
    rule.start({"context": torch.zeros_like(prompts[0])}, terms(clients, seed=3))
    upload(rule, 1, tuple(range(clients)), prompts)
    return rule


def upload(
    rule: ExpertRule, number: int, clients: tuple[int, ...], prompts: Tensor, selected: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    weights = torch.ones(len(clients), dtype=torch.float64)
    shared = {"context": torch.zeros_like(prompts[0])}
    round = Round(number, selected or clients, 3)
    return rule.aggregate(round, shared, Uploads(clients, {"context": prompts}, weights))


def sent_to(rule: ExpertRule, number: int, clients: tuple[int, ...], *of_round: int) -> list[list[float]]:
    """The first numbers of the experts that each client gets."""
    sent = rule.broadcast(Round(number, of_round, 3), {"context": torch.zeros(1, 2)}, clients)
    return [rows[mask][:, 0, 0].tolist() for rows, mask in zip(sent.own["experts"], sent.masks["experts"], strict=True)]


def test_the_nearest_by_hand() -> None:
    rule = rule_of(1, torch.tensor([[[0.0, 0.0]], [[1.0, 0.0]], [[0.0, 3.0]]]))
    assert [rule.nearest(client, "now") for client in range(3)] == [[1], [0], [0]]
    rule.count = 5
    assert [rule.nearest(client, "now") for client in range(3)] == [[1, 2], [0, 2], [0, 1]]
    rule.known["now"] = [0, 2]
    assert rule.nearest(0, "now") == [2], "never one without an upload"
    assert rule.nearest(1, "now") == []


def test_equal_prompts_name_each_other_first_and_of_equally_near_ones_the_lower() -> None:
    rule = rule_of(2, torch.tensor([[[5.0]], [[1.0]], [[3.0]], [[1.0]], [[1.0]]]))
    assert [rule.nearest(client, "now") for client in (1, 3, 4, 2)] == [[3, 4], [1, 4], [1, 3], [0, 1]]


def test_experts_are_of_earlier_rounds_and_of_the_round_in_an_evaluation() -> None:
    rule = rule_of(9, torch.tensor([[[1.0, 0.0]], [[2.0, 0.0]], [[4.0, 0.0]]]))
    assert sent_to(rule, 2, (0, 1, 2), 0, 1, 2) == [[2, 4], [1, 4], [2, 1]]
    mean = upload(rule, 2, (0, 1), torch.tensor([[[10.0, 0.0]], [[20.0, 0.0]]]))
    assert mean["context"].tolist() == [[15.0, 0.0]]
    assert sent_to(rule, 2, (0, 1, 2)) == [[2, 4], [1, 4], [10, 20]], "client 2 rested: the nearest of now"
    assert sent_to(rule, 3, (0, 1, 2), 0, 1, 2) == [[4, 20], [10, 4], [10, 20]]


def test_an_evaluation_has_the_experts_of_training_also_where_uploads_are_lost() -> None:
    rule = rule_of(1, torch.tensor([[[1.0, 0.0]], [[2.0, 0.0]], [[5.0, 0.0]]]))
    assert sent_to(rule, 2, (0, 1, 2), 0, 1, 2) == [[2], [1], [2]]
    assert sent_to(rule, 2, (0, 1, 2)) == [[2], [1], [2]], "a void round moves nothing"
    upload(rule, 3, (1, 2), torch.tensor([[[9.0, 0.0]], [[1.5, 0.0]]]), selected=(0, 1, 2))
    assert sent_to(rule, 3, (0, 1, 2)) == [[2], [1], [2]], "client 0 trained with them, though its upload was lost"
    assert sent_to(rule, 4, (0, 1, 2), 0, 1, 2) == [[1.5], [1.5], [1]]


def test_who_has_not_uploaded_gets_none_and_before_anybody_has_nothing_is_sent() -> None:
    method, data = build("PFedMoAP", "--data.clients_per_round=3")
    fit(method, data, 0)
    rule = method.server.rule
    shared = method.simulation.shared()
    assert set(rule.broadcast(Round(1, (0, 1), 3), shared, (0, 1)).own) == set()
    fit(method, data, 1)
    rule = method.server.rule
    chosen = rule.select(1)
    assert rule.known == {"now": chosen, "before": [], "last": chosen, "round": [1]}
    sent = rule.broadcast(Round(2, tuple(range(11)), 3), shared, tuple(range(11)))
    assert sent.masks["experts"].sum(1).tolist() == [2 * (client in chosen) for client in range(11)]


def test_messages() -> None:
    method = run("PFedMoAP", "--data.clients_per_round=11", rounds=3)
    L = 3 * method.clip.text_width
    for number, (clients, down, up, *_) in enumerate(method.server.traffic.rounds, start=1):
        # Three experts from the second round on.
        assert (clients, up) == (11, 11 * 4 * L)
        assert down == 11 * (4 * L if number == 1 else 4 * 4 * L)
    method = run("PFedMoAP", "--data.clients_per_round=4", rounds=2)
    first, second = (set(method.server.rule.select(number)) for number in (1, 2))
    assert 0 < len(first & second) < 4
    assert method.server.traffic.rounds[1][1] == 4 * L * (4 + 3 * len(first & second)), "newcomers get no experts"


# ------------------------------------------------------------------ the client


def received_by(method: Any, count: int = 3, there: int = 3) -> dict[str, Tensor]:
    experts = method.context + 0.5 * drawn(count, *method.context.shape)
    return {"experts": experts, "experts_mask": torch.arange(count) < there}


def test_the_logits_by_a_loop_over_experts() -> None:
    method, batch = constructed("PFedMoAP"), mini_batch(constructed("PFedMoAP"))
    received = received_by(method, 3, 2)
    prompts = method.class_prompts("train")
    own, first, second = (method.clip.text_features(prompts, p) for p in (method.context, *received["experts"][:2]))
    pooled = batch.features["image"][:, ::4]
    mixture = method.gate(pooled, torch.stack([own, first, second])[..., ::4], torch.ones(3, dtype=torch.bool))
    local = batch.features["image"] @ own.T
    expected = method.clip.logit_scale * (0.5 * local + (pooled[:, None] * mixture).sum(-1))
    for stage in (Stage.TRAIN, Stage.EVALUATE):
        client = client_of(method, received, stage, participated=True)
        torch.testing.assert_close(method.mixed_logits(client, batch, own), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(method.client_logits(client, batch), expected, rtol=1e-4, atol=1e-4)


def test_a_silent_gate_leaves_lambda_times_promptfls_logits() -> None:
    method = constructed("PFedMoAP", lam=0.25)
    batch = mini_batch(method)
    for bias in (method.gate.value.bias, method.gate.out.bias, method.gate.value.weight):
        bias.zero_()
    classes = method.text_features("train")
    made = method.mixed_logits(client_of(method, received_by(method)), batch, classes)
    torch.testing.assert_close(made, 0.25 * method.logits(batch.features["image"], classes))


@pytest.mark.parametrize("received", ["nothing", "none of three"])
def test_without_experts_the_logits_are_promptfls_and_the_gate_rests(received: str) -> None:
    method = constructed("PFedMoAP")
    batch = mini_batch(method)
    client = client_of(method, received_by(method, 3, 0) if received != "nothing" else None)
    classes = method.text_features("train")
    plain = method.logits(batch.features["image"], classes)
    assert torch.equal(method.mixed_logits(client, batch, classes), plain)
    made = gradients(method, client, batch)
    assert made.pop("context").abs().max() > 1e-3
    assert not any(gradient.any() for gradient in made.values())
    (phase,) = method.local_phases()
    update = {name: torch.ones_like(value) for name, value in parameters_of(method).items()}
    held = phase.transform(client, update)
    assert set(held) == set(update) - {"context"}, "the context takes the optimizer's own step"
    assert not any(value.any() for value in held.values())
    used = phase.transform(client_of(method, received_by(method, 3, 1)), update)
    assert set(used) == set(held)
    assert all(torch.equal(value, update[name]) for name, value in used.items())


def test_experts_are_constants_and_the_gate_has_its_own_rate() -> None:
    method = constructed("PFedMoAP", gate_lr=0.3)
    client = client_of(method, received_by(method))
    assert not client.prepared["experts"].requires_grad
    made = gradients(method, client, mini_batch(method))
    for name in ("context", "gate.value.weight", "gate.out.weight"):
        assert made[name].abs().max() > 1e-4
    assert made["gate.query.weight"].any()
    # What is the same for all experts, or for all classes, a softmax does not see.
    for name in ("key", "value", "out"):
        assert made[f"gate.{name}.bias"].abs().max() < 1e-5
    (phase,) = method.local_phases()
    assert [(g.parameters, g.lr, g.momentum) for g in phase.groups] == [
        (("context",), 0.05, 0.9),
        (("gate",), 0.3, 0.9),
    ]


def test_a_client_that_never_took_part_is_scored_with_the_average() -> None:
    method = constructed("PFedMoAP")
    average = {"context": method.context + 0.1}
    prompts = method.class_prompts("test")
    for participated, context in ((False, average["context"]), (True, method.context)):
        text = client_of(method, average, Stage.EVALUATE, participated).prepared["text"]
        torch.testing.assert_close(text, method.clip.text_features(prompts, context))


def test_with_one_expert_it_is_promptfl_bit_for_bit_and_the_gate_never_moves() -> None:
    method, promptfl = run("PFedMoAP", "--model.init_args.num_experts=1"), run("PromptFL")
    assert torch.equal(method.get_parameter("context"), promptfl.get_parameter("context"))
    assert "gate.out.weight" not in method.roles.trained
    assert torch.equal(method.gate.out.weight, constructed("PFedMoAP", num_experts=1).gate.out.weight)
    made, expected = metrics(method), metrics(promptfl)
    for name, value in expected.items():
        if "accuracy" in name:
            assert torch.equal(made[name], value)


def test_a_gate_that_is_given_a_width_it_cannot_have_is_refused() -> None:
    for settings in ({"gate_width": 15}, {"gate_width": 16, "heads": 3}):
        with pytest.raises(ConfigurationError, match=r"gate_width must divide 64 and be a multiple of heads=\d"):
            constructed("PFedMoAP", **settings)


def test_prompt_and_gate_differ_in_their_rate_alone() -> None:
    method = constructed("PFedMoAP", gate_lr=0.01)
    method.training_settings = LocalTraining(lr=0.3, momentum=0.7, weight_decay=0.2)
    groups = [group for phase in method.local_phases() for group in phase.groups]
    found = {(group.parameters, group.lr, group.momentum, group.weight_decay) for group in groups}
    assert found == {(("context",), 0.3, 0.7, 0.2), (("gate",), 0.01, 0.7, 0.2)}


def test_a_client_that_never_took_part_is_tested_with_the_received_prompt() -> None:
    method = constructed("PFedMoAP")
    sent = drawn(*method.context.shape)
    for took_part, expected in ((True, method.context), (False, sent)):
        client = replace(client_of(method), received={"context": sent}, participated=torch.tensor(took_part))
        text = method.prepare(client, Stage.EVALUATE, "train")["text"]
        features = method.clip.text_features(method.class_prompts("train"), expected)
        torch.testing.assert_close(text, features, rtol=1e-5, atol=1e-6)
