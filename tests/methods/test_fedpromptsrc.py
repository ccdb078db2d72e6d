"""FedPromptSRC: the three distances and the trajectory by hand, the objective written out, and its degenerate cases."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from federation import terms
from live_client import client_of, constructed, mini_batch
from text_prompts import assert_same_scores, run

from benchmark.contract import Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads
from methods.losses import divergence_from_frozen
from methods.trajectory import AveragedTrajectory

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def averaged(values: list[float], mean: float, spread: float) -> list[float]:
    """Return what is evaluated after each round."""
    rule, shared, found = AveragedTrajectory(mean, spread), {"p": torch.zeros(1)}, []
    rule.start(shared, terms(1))
    for number, value in enumerate(values, 1):
        uploads = Uploads((0,), {"p": torch.tensor([[value]])}, torch.ones(1), {"p": torch.zeros(1, 1)})
        shared = rule.aggregate(Round(number, (0,), 0), shared, uploads)
        assert shared["p"].item() == value  # training goes on from the round's own value
        assert rule.broadcast(Round(number + 1, (0,), 0), shared, (0,)).common["p"].item() == value
        found.append(rule.broadcast(Round(number, (), 0), shared, (0,)).common["p"].item())
    return found


def test_the_trajectory_by_hand() -> None:
    assert averaged([1.0, 2.0, 4.0, 8.0], 3, 1) == pytest.approx([1, 1.8176, 3.0705, 4.3437], abs=1e-4)


def test_the_trajectory_at_its_ends() -> None:
    assert averaged([3.0] * 4, 3, 1) == pytest.approx([3.0] * 4)
    assert averaged([1.0, 2.0, 6.0], 2, 1e6)[-1] == pytest.approx(3.0)
    assert averaged([1.0, 2.0, 6.0], 2, 0.01)[-1] == pytest.approx(2.0)
    assert averaged([1.0, 2.0, 6.0], 500, 1)[-1] == pytest.approx(6.0)  # weights too small for a number of their own


def test_the_trajectory_leans_on_three_quarters_of_the_planned_rounds() -> None:
    rule = AveragedTrajectory()
    rule.start({"p": torch.zeros(1)}, replace(terms(1), rounds=500))
    weights = [rule.log_weight_of(number) for number in range(1, 501)]
    assert 1 + max(range(500), key=weights.__getitem__) == 375
    assert weights[399] == pytest.approx(-0.5)  # one spread of 25 rounds away


def test_the_divergence_by_hand() -> None:
    prompted, frozen = torch.tensor([[2.0, 0.0], [9.0, 0.0]]), torch.zeros(2, 2)
    made = divergence_from_frozen(prompted, frozen, torch.tensor([True, False]))
    assert made.item() == pytest.approx(0.2169, abs=1e-4)


def test_the_distance_of_text_features_by_hand() -> None:
    method = constructed("FedPromptSRC")
    client = client_of(method)
    client.prepared["frozen"] = torch.tensor([[0.8, 0.6], [0.0, 1.0]])
    assert method.far_classes(torch.eye(2), client).item() == pytest.approx(5.0)


def test_the_frozen_text_is_the_direction_of_a_mean_over_templates() -> None:
    from open_clip import OPENAI_IMAGENET_TEMPLATES

    method = constructed("FedPromptSRC", templates=5)
    model, tokenizer = method.clip.model, method.clip.tokenizer
    for c, made in enumerate(method.frozen_text("train")):
        texts = [template(f"class{c}") for template in OPENAI_IMAGENET_TEMPLATES[:5]]
        features = model.encode_text(tokenizer(texts, context_length=method.clip.context_length))
        expected = F.normalize(features.mean(0), dim=-1)
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)


def test_the_objective_written_out() -> None:
    method = constructed("FedPromptSRC")
    client, batch = client_of(method), mini_batch(method, 0, 5)
    images = method.clip.image_features(batch.x, method.image_prompts)
    classes, frozen = method.text_features("train"), method.frozen_text("train")
    scale, plain = method.clip.logit_scale, method.clip.image_features(batch.x)
    logits, teacher = scale * images @ classes.T, (scale * plain @ frozen.T).softmax(1)
    divergence = (teacher * (teacher.log() - logits.log_softmax(1))).sum() / (5 * 8)
    expected = F.cross_entropy(logits, batch.y) + divergence
    expected = expected + 25 * (classes - frozen).abs().mean() + 10 * (images - plain).abs().mean()
    torch.testing.assert_close(method.client_loss(client, batch), expected, rtol=1e-4, atol=1e-4)


def test_without_image_prompts_images_are_where_they_were() -> None:
    method = constructed("FedPromptSRC", text_weight=0.0, logit_weight=0.0)
    method.image_prompts = torch.nn.Parameter(method.image_prompts[:, :0])
    client, batch = client_of(method), mini_batch(method, 0, 5)
    with_it = method.client_loss(client, batch)
    method.weights = (0.0, 0.0, 0.0)
    torch.testing.assert_close(with_it, method.client_loss(client, batch), rtol=1e-5, atol=1e-5)


def test_a_deeper_prompt_changes_nothing_before_its_layer() -> None:
    method = constructed("FedPromptSRC")
    seen: list[torch.Tensor] = []
    x = mini_batch(method, 0, 2).x
    for tower in (method.clip.model.transformer, method.clip.model.visual.transformer):
        tower.resblocks[1].ln_1.register_forward_hook(lambda module, given, made: seen.append(given[0]))
    for _ in range(2):
        method(x)
        method.deep_context.add_(1.0)
        method.image_prompts[1].add_(1.0)
    first, later = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    changed = [not torch.equal(a, b) for a, b in zip(first, later, strict=True)]
    assert any(changed)  # the prompts' own places
    for before, after in zip(first, later, strict=True):
        assert before.shape == after.shape
        assert (before - after).abs().amax(-1).ne(0).sum(-1).max() <= 2  # of each row, the two prompts alone


def test_the_trajectory_is_never_trained_from() -> None:
    on, off = (run("FedPromptSRC", f"--model.init_args.trajectory={choice}", rounds=3) for choice in ("server", "none"))
    for name in on.roles.shared:
        assert torch.equal(on.get_parameter(name), off.get_parameter(name))
    sent = on.server.rule.broadcast(on.server.evaluated, on.simulation.shared(), (0,)).common
    assert not torch.equal(sent["context"], on.get_parameter("context"))


def test_of_depth_1_and_without_image_prompts_it_is_promptfl() -> None:
    plain = ("--model.init_args.depth=1", "--model.init_args.trajectory=none", "--model.init_args.init_words=null")
    weights = tuple(f"--model.init_args.{name}_weight=0" for name in ("text", "image", "logit"))
    method = constructed("FedPromptSRC", depth=1, init_words=None)
    promptfl = constructed("PromptFL", num_context=2)
    assert torch.equal(method.text_features("test"), promptfl.text_features("test"))
    made = run("FedPromptSRC", *plain, *weights)
    assert made.shared == ("context", "image_prompts")
    traffic = made.server.traffic.per_client()
    assert traffic["up_floats"] == 2 * (made.clip.text_width + made.clip.vision_width)


def test_a_run_resumed_or_not_evaluates_the_same() -> None:
    assert_same_scores(run("FedPromptSRC", rounds=2), run("FedPromptSRC", rounds=2))


def test_all_prompts_are_sent_and_that_of_vit_b_16_has_46080_numbers() -> None:
    method = run("FedPromptSRC")
    made = method.server.traffic.per_client()
    per_layer = 2 * (method.clip.text_width + method.clip.vision_width)
    assert made["up_floats"] == made["down_floats"] == 2 * per_layer
    assert 9 * 4 * (512 + 768) == 46080


def test_an_evaluation_asks_for_no_template() -> None:
    assert set(client_of(constructed("FedPromptSRC"), stage=Stage.EVALUATE).prepared) == {"text"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"depth": 3}, r"FedPromptSRC: depth=3, but the tower \(text\) has 2 blocks"),
        ({"templates": 1000}, "templates=1000, but open_clip has 80"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        constructed("FedPromptSRC", **settings)
