"""FedKgCoOp: the distance to the template by hand, where it is zero, and that without it the method is PromptFL."""

import math

import pytest
import torch
import torch.nn.functional as F
from live_client import client_of, constructed, gradients, mini_batch
from text_prompts import assert_same_scores, run

from benchmark.contract import Stage
from benchmark.errors import ConfigurationError
from benchmark.seeds import torch_generator
from methods.fedkgcoop import knowledge_distance

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")

WORDS = {"num_context": 4, "init_words": "a photo of a"}


def test_the_distance_by_hand() -> None:
    own, template = torch.eye(2), torch.tensor([[0.6, 0.8], [0.0, 1.0]])
    assert knowledge_distance(own, template).item() == pytest.approx(0.2)
    assert 8 * knowledge_distance(own, template).item() == pytest.approx(1.6)


def test_the_distance_lies_between_0_and_2_and_does_not_see_lengths() -> None:
    own, template = torch.randn(2, 5, 6, generator=torch_generator("features"))
    distance = knowledge_distance(own, template)
    torch.testing.assert_close(knowledge_distance(3 * own, 0.5 * template), distance)
    assert 0 < distance < 2
    torch.testing.assert_close(knowledge_distance(own, own), torch.tensor(0.0), rtol=0, atol=1e-6)
    torch.testing.assert_close(knowledge_distance(own, -own), torch.tensor(2.0))


def test_the_objective_is_a_loop_over_all_classes_whatever_the_batch_holds() -> None:
    method = constructed("FedKgCoOp", lam=3.0)
    client, batch = client_of(method), mini_batch(method, 0, 3)
    assert len(set(batch.y.tolist())) == 3
    classes = method.text_features("train")
    template = method.clip.text_features_of([f"a photo of a class{c}." for c in range(8)])
    far = 1 - sum(float(w @ v) for w, v in zip(classes, template, strict=True)) / 8
    expected = F.cross_entropy(method.clip.logit_scale * batch.features["image"] @ classes.T, batch.y) + 3 * far
    torch.testing.assert_close(method.client_loss(client, batch), expected, rtol=1e-5, atol=1e-5)


def test_at_the_templates_own_words_the_distance_and_its_gradient_are_zero() -> None:
    method = constructed("FedKgCoOp", **WORDS)
    client, batch = client_of(method), mini_batch(method)
    classes = method.text_features("train")
    assert knowledge_distance(classes, client.prepared["template"]).abs().item() < 1e-6
    with_it = gradients(method, client, batch)["context"]
    method.lam = 0.0
    torch.testing.assert_close(gradients(method, client, batch)["context"], with_it, rtol=0, atol=1e-4)


def test_another_template() -> None:
    method = constructed("FedKgCoOp", template="a photo of a {}, a type of pet.")
    expected = method.clip.text_features_of([f"a photo of a class{c}, a type of pet." for c in range(8)])
    torch.testing.assert_close(client_of(method).prepared["template"], expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigurationError, match=r"template has one \{\} for the class name, got 'a photo'"):
        constructed("FedKgCoOp", template="a photo")


def test_the_template_names_the_classes_of_training_alone() -> None:
    method = constructed("FedKgCoOp")
    method.set_label_spaces({"train": (2, 5, 7)})
    expected = method.clip.text_features_of([f"a photo of a class{c}." for c in (2, 5, 7)])
    made = method.prepare(client_of(method), Stage.TRAIN, "train")["template"]
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)


def test_an_evaluation_does_not_make_the_template() -> None:
    assert set(client_of(constructed("FedKgCoOp"), stage=Stage.EVALUATE).prepared) == {"text"}


def test_a_strong_pull_keeps_the_context_near_the_template() -> None:
    weak, strong = (
        run("FedKgCoOp", f"--model.init_args.lam={lam}", "--model.init_args.training.lr=0.005") for lam in (0, 50)
    )
    template = strong.clip.text_features(strong.template_prompts)
    distances = [float(knowledge_distance(m.text_features("train"), template)) for m in (weak, strong)]
    assert distances[1] < distances[0]
    assert not math.isnan(distances[1])


def test_without_it_the_run_is_promptfls_bit_for_bit() -> None:
    method, promptfl = run("FedKgCoOp", "--model.init_args.lam=0"), run("PromptFL")
    assert torch.equal(method.get_parameter("context"), promptfl.get_parameter("context"))
    assert_same_scores(method, promptfl)


def test_the_context_alone_is_sent() -> None:
    method = run("FedKgCoOp")
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == 3 * method.clip.text_width
