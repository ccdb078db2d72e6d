"""FOCoOp: its losses, movements and server by hand, its messages, and the methods at its ends."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build
from live_client import client_of, constructed, gradients, mini_batch, parameters_of, train
from sklearn.metrics import roc_auc_score
from text_prompts import BASE_TO_NOVEL, assert_same_scores, metrics, open_clip_text, run

from benchmark.checks.methods import MethodUnderCheck
from benchmark.checks.privacy import check_single_images
from benchmark.contract import Stage
from benchmark.engine.plan.work import Shown
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads
from benchmark.formulas import in_distribution_scores
from benchmark.server import ServerRule
from methods.context_matching import ContextMatching, mixed, unbalanced_plan, upper_cluster
from methods.losses import soft_maximum, unevenness

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")

INIT = "--model.init_args."
PLAIN = (f"{INIT}num_ood=0", f"{INIT}robust=none", f"{INIT}class_specific=false")
RATE = f"{INIT}training={{lr: 0.05, epochs: 2, momentum: 0.9}}"
COST = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.1, 0.9]], dtype=torch.float64)
MASSES = torch.tensor([0.302295, 0.353545, 0.000016, 0.111208], dtype=torch.float64)
#: Of the example: images, classes and others, in two dimensions.
ROWS = [[[0.8, 0.6], [0.6, 0.8]], [[1.0, 0.0], [0.0, 1.0]], [[-0.6, 0.8], [-0.8, -0.6]]]
IMAGES, CLASSES, FOREIGN = (torch.tensor(rows, dtype=torch.float64) for rows in ROWS)
LABELS, ALL = torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool)


def near(found: torch.Tensor, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


def at_scale_10(**settings: Any) -> Any:
    method = constructed("FOCoOp", **settings)
    method.clip.model.logit_scale.fill_(math.log(10))
    return method


# --- the objective ---


def test_the_unevenness_by_hand() -> None:
    near(unevenness(torch.tensor([[0.0, 0.0], [2.0, 0.0]])), [0.693147, 1.126928])
    near(unevenness(torch.full((1, 3), 5.0)), [1.098612])
    drawn = torch.randn(50, 7, generator=torch.Generator().manual_seed(1))
    assert (unevenness(10 * drawn) >= math.log(7)).all()


def test_the_soft_maximum_lies_between_the_mean_and_the_greatest() -> None:
    losses, mask = torch.tensor([1.0, 4.0, 2.5, 100.0]), torch.tensor([True, True, True, False])
    near(soft_maximum(losses, mask, 1e4), 2.5, 1e-2)
    near(soft_maximum(losses, mask, 0.01), 4.0, 2e-2)
    near(soft_maximum(losses, mask, 1.0), math.log((math.e + math.e**4 + math.e**2.5) / 3), 1e-5)
    assert soft_maximum(losses, torch.zeros_like(mask), 0.5) == 0


def test_moved_features_by_hand() -> None:
    method = at_scale_10()
    classes, foreign = method.moved(IMAGES, CLASSES, FOREIGN, y=LABELS, mask=ALL)
    of_classes = torch.tensor([[-0.006659, 0.099778], [0.099778, -0.006659]], dtype=torch.float64)
    of_foreign = torch.tensor([[0.083818, 0.054540], [0.065194, -0.075827]], dtype=torch.float64)
    near(classes, F.normalize(CLASSES + of_classes).tolist(), 2e-6)
    near(foreign, F.normalize(FOREIGN + of_foreign).tolist(), 2e-6)
    near(method.losses(IMAGES, CLASSES, FOREIGN, y=LABELS).mean(), 2.929512, 5e-6)
    near(method.losses(IMAGES, classes, foreign, y=LABELS).mean(), 3.223904, 5e-6)


@pytest.mark.parametrize("rho", [0.01, 0.1])
def test_features_move_within_the_ball_to_where_the_loss_is_greater(rho: float) -> None:
    method = constructed("FOCoOp", rho=rho)
    batch, classes = mini_batch(method), method.text_features("train")
    images, foreign = batch.features["image"], method.foreign_features(classes)
    made = method.moved(images, classes, foreign, y=batch.y, mask=batch.mask)
    for before, after in zip((classes, foreign), made, strict=True):
        # A row of length 1 that moves by rho at most turns by arcsin(rho) at most.
        cosine = (before * after).sum(-1)
        assert (cosine >= math.sqrt(1 - rho**2) - 1e-6).all()
        assert (cosine < 1).any()
    least, most = (method.losses(images, *rows, y=batch.y).mean() for rows in ((classes, foreign), made))
    assert most >= least - 1e-6


def test_in_a_ball_without_size_features_stay() -> None:
    """No radius is no movement, bit for bit; a small one moves the gradients a little."""
    losses, slopes = [], []
    for settings in ({"rho": 0.0}, {"robust": "none"}, {"rho": 1e-6}):
        method = constructed("FOCoOp", **settings)
        losses.append(method.client_loss(client_of(method), mini_batch(method)))
        slopes.append(gradients(method, client_of(method), mini_batch(method))["context"])
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(slopes[0], slopes[1])
    torch.testing.assert_close(losses[2].detach(), losses[1], rtol=1e-4, atol=1e-3)


def written_out(method: Any, batch: Any) -> torch.Tensor:
    """The objective without movement: prompts with open_clip's own blocks, image by image."""
    contexts = method.frac * method.context + (1 - method.frac) * method.own_context
    names = [f"class{c}" for c in range(8)]
    rows = [open_clip_text(method.clip, [name], own)[0] for name, own in zip(names, contexts, strict=True)]
    rows += [open_clip_text(method.clip, [""], own)[0] for own in method.ood_context]
    losses = []
    for f, y in zip(batch.features["image"], batch.y, strict=True):
        logits = method.clip.logit_scale * torch.stack(rows) @ f
        uneven = logits[8:].logsumexp(0) - logits[8:].mean()
        losses.append(F.cross_entropy(logits, y) + method.det_weight * uneven)
    return torch.stack(losses)


@pytest.mark.parametrize("tau", [0.0, 5.0])
def test_the_objective_written_out(tau: float) -> None:
    method = constructed("FOCoOp", robust="none", dro_tau=tau)
    method.own_context.add_(0.01 * torch.randn(method.own_context.shape))
    batch = mini_batch(method, 0, 6)
    losses = written_out(method, batch)
    expected = tau * (losses / tau).exp().mean().log() if tau else losses.mean()
    torch.testing.assert_close(method.client_loss(client_of(method), batch), expected, rtol=1e-4, atol=1e-4)


def test_words_stand_behind_the_contexts_of_no_class() -> None:
    method = constructed("FOCoOp", ood_words=["fog", "rust", "velvet"])
    found = method.foreign_features(method.text_features("train"))
    for row, word, context in zip(found, ("fog", "rust", "velvet"), method.ood_context, strict=True):
        torch.testing.assert_close(row, open_clip_text(method.clip, [word], context)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("robust", ["none", "ball"])
def test_the_order_of_the_contexts_of_no_class_does_not_matter(robust: str) -> None:
    method, batch = constructed("FOCoOp", robust=robust), mini_batch(constructed("FOCoOp"))
    found = []
    for order in ([0, 1, 2], [2, 0, 1]):
        method.ood_context.copy_(method.ood_context[order].clone())
        rows = method.foreign_features(method.text_features("train"))
        found.append((method.client_loss(client_of(method), batch), rows))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0][1][[2, 0, 1]], found[1][1], rtol=1e-5, atol=1e-6)


def test_gradients_are_shared_out_by_the_fraction() -> None:
    method = constructed("FOCoOp", frac=0.2)
    made = gradients(method, client_of(method), mini_batch(method))
    torch.testing.assert_close(made["context"] / 0.2, made["own_context"] / 0.8, rtol=1e-5, atol=1e-6)
    assert made["ood_context"].abs().sum() > 0


# --- evaluation ---


def test_the_energy_of_a_clients_logits_is_in_the_order_of_its_own_score() -> None:
    method = constructed("FOCoOp")
    batch, client = mini_batch(method), client_of(method, stage=Stage.EVALUATE)
    logits = method.client_logits(client, batch)
    assert torch.equal(logits, method.scored(batch.features["image"], *client.prepared.values()))
    torch.testing.assert_close(method(batch.x), logits)
    every = torch.cat([client.prepared["text"], client.prepared["foreign"]])
    shares = method.logits(batch.features["image"], every).double().softmax(-1)
    expected = shares[:, :8].sum(-1) / shares[:, 8:].sum(-1)
    torch.testing.assert_close(in_distribution_scores(logits)["energy"], expected.log(), rtol=1e-4, atol=1e-4)
    plain = method.logits(batch.features["image"], client.prepared["text"])
    torch.testing.assert_close(logits.softmax(-1), plain.softmax(-1), rtol=1e-4, atol=1e-6)


def test_foreign_images_are_held_against_the_own_score() -> None:
    """AUROC of each client's energy, against that of the probability of all classes among all columns."""
    options = ("--data.ood={source: federation.ForeignImages, images: 10}", "--data.evaluate_local=false")
    method = run("FOCoOp", *options, "--data.partition=federation.Few", "--data.clients_per_round=4", rounds=1)
    data, found = method.trainer.datamodule, method.evaluation.scores["server", "test"].compute()
    for client in range(6):
        own = method.store.all_rows("own_context")[client]
        contexts = method.frac * method.context + (1 - method.frac) * own
        with torch.no_grad():
            classes = method.clip.text_features(method.class_prompts("test"), contexts.unsqueeze(0))[0]
            every = torch.cat([classes, method.foreign_features(classes)])
            scores = []
            for images in (data.pool.images[data.splits.test[client]], data.others[Shown.FOREIGN].images):
                f = method.clip.image_features(data.transform(images, None))
                scores.append((method.clip.logit_scale * f @ every.T).double().softmax(-1)[:, :8].sum(-1))
        expected = roc_auc_score([1] * len(scores[0]) + [0] * 10, torch.cat(scores))
        assert found["ood_auroc_energy"][client].item() == pytest.approx(expected, abs=1e-6)


# --- the server ---


def test_the_transport_by_hand() -> None:
    first = [[0.125, 0.000842], [0.000842, 0.125], [0.000842, 0.000842], [0.075816, 0.001389]]
    near(unbalanced_plan(COST, 0.1, most=1), first)
    plan = unbalanced_plan(COST, 0.1)
    near(plan, [[0.302295, 0.0], [0.0, 0.353545], [0.0, 0.000016], [0.111208, 0.0]])
    near(plan.sum(1), MASSES.tolist())
    near(plan.sum(), 0.767065, 2e-6)


def test_equal_contexts_have_equal_masses_which_are_never_negative() -> None:
    drawn = torch.rand(30, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    drawn[[4, 17, 29]] = drawn[0].clone()
    plan = unbalanced_plan(drawn, 0.1)
    assert (plan >= 0).all()
    assert len(set(plan.sum(1)[[0, 4, 17, 29]].tolist())) == 1


def test_clusters_by_hand() -> None:
    assert upper_cluster(MASSES).tolist() == [True, True, False, False]
    assert not upper_cluster(torch.full((4,), 0.25)).any()
    assert upper_cluster(torch.tensor([0.0, 1.0, 2.0])).tolist() == [False, False, True]  # the middle is of the lower


@pytest.mark.parametrize(("mix", "share"), [("barycenter", 0.5), ("official", 0.151148)])
def test_the_mixture_by_hand(mix: Any, share: float) -> None:
    plan = unbalanced_plan(COST, 0.1)[:2]
    classes, contexts = torch.eye(2, 3, dtype=torch.float64), torch.full((2, 3), 7.0, dtype=torch.float64)
    contexts[1] = 9.0
    found = mixed(classes, contexts, plan, 0.5, mix)
    near(found[0], (0.5 * classes[0] + share * contexts[0]).tolist(), 1e-5)


def test_the_mixture_of_equal_contexts_lies_between_them_and_the_class() -> None:
    classes, x = torch.randn(3, 4, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64)
    plan = torch.tensor([[0.1, 0.0, 0.2], [0.3, 0.0, 0.0]], dtype=torch.float64)
    found = mixed(classes, x, plan, 0.5, "barycenter")
    torch.testing.assert_close(found[[0, 2]], (classes[[0, 2]] + 1) / 2)
    assert torch.equal(found[1], classes[1])  # nothing is brought


def uploads_of(count: int = 3, rows: int = 4, classes: tuple[int, ...] = (5,)) -> Uploads:
    drawn = torch.Generator().manual_seed(4)
    values = {
        "context": torch.randn(count, *classes, 2, 6, generator=drawn),
        "ood_context": torch.randn(count, rows, 2, 6, generator=drawn),
    }
    values["ood_context"][1, 2] = values["context"][0, 1] if classes else values["context"][0]
    return Uploads(tuple(range(count)), values, torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)[:count])


def aggregated(uploads: Uploads, mix: Any = "barycenter", select: Any = "slot") -> Any:
    shared = {name: rows[0] for name, rows in uploads.values.items()}
    rule = ContextMatching(0.1, 0.5, mix, select)
    return rule.aggregate(Round(1, uploads.clients, 0), shared, uploads)


def by_hand(uploads: Uploads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean class contexts, all contexts of no class, [C, d] and [n, d], and the plan between them."""
    share = uploads.weights / uploads.weights.sum()
    mean = torch.einsum("s,s...->...", share, uploads.values["context"].double())
    x = uploads.values["ood_context"].double().flatten(0, 1).flatten(1)
    y = mean.reshape(-1, x.shape[1])
    cost = (x[:, None] - y).square().sum(-1)
    return y, x, unbalanced_plan(cost / cost.max(), 0.1)


@pytest.mark.parametrize("classes", [(5,), ()])
def test_the_server_averages_matches_and_takes_each_row_where_it_has_least_mass(classes: tuple[int, ...]) -> None:
    uploads = uploads_of(classes=classes)
    made, (y, x, plan) = aggregated(uploads), by_hand(uploads)
    upper = upper_cluster(plan.sum(1))
    assert 0 < upper.sum() < len(upper)
    expected = mixed(y, x[upper], plan[upper], 0.5, "barycenter")
    assert made["context"].shape == (*classes, 2, 6)
    torch.testing.assert_close(made["context"].flatten().double(), expected.flatten(), rtol=1e-5, atol=1e-6)
    masses = plan.sum(1).reshape(3, 4)
    for row in range(4):
        client = int(masses[:, row].argmin())
        assert torch.equal(made["ood_context"][row], uploads.values["ood_context"][client, row])


def test_among_equal_rows_the_first_clients_is_taken_and_nobody_is_matched() -> None:
    uploads = uploads_of()
    uploads.values["ood_context"][:] = uploads.values["ood_context"][:1, :1].clone()
    made = aggregated(uploads)
    assert torch.equal(made["ood_context"], uploads.values["ood_context"][0])
    torch.testing.assert_close(made["context"].flatten(1).double(), by_hand(uploads)[0], rtol=1e-5, atol=1e-6)


def test_as_the_code_selects_rows_are_sorted_by_mass_and_repeated() -> None:
    rule = ContextMatching(0.1, 0.5, "barycenter", "official")
    masses = torch.tensor([0.3, 0.1, 0.9, 0.2, 0.8, 0.9])
    matched = masses > 0.5
    assert rule.chosen(masses, matched, 2).tolist() == [1, 3]
    assert rule.chosen(masses, matched, 5).tolist() == [1, 3, 0, 1, 3]


def test_rows_may_be_averaged() -> None:
    uploads = uploads_of()
    made, expected = aggregated(uploads, select="mean"), uploads.values["ood_context"]
    share = (uploads.weights / 6).float()
    torch.testing.assert_close(made["ood_context"], torch.einsum("s,s...->...", share, expected))


def test_without_transport_the_server_is_fedavgs() -> None:
    for settings in ({"uot": False}, {"num_ood": 0}):
        assert type(constructed("FOCoOp", **settings).make_server()) is ServerRule
    assert isinstance(constructed("FOCoOp").make_server(), ContextMatching)


# --- what it is at its ends, and runs ---


def test_without_contexts_of_no_class_there_is_one_column_a_class() -> None:
    method = constructed("FOCoOp", num_ood=0)
    batch, client = mini_batch(method), client_of(method, stage=Stage.EVALUATE)
    assert client.prepared["foreign"].shape == (0, method.clip.embed_dim)
    assert torch.equal(
        method.client_logits(client, batch), method.logits(batch.features["image"], method.text_features("test"))
    )
    assert method.shared == ("context",)
    assert set(parameters_of(method)) == {"context", "own_context"}


def test_without_contexts_of_no_class_classes_may_move_all_the_same() -> None:
    method, plain = (constructed("FOCoOp", num_ood=0, robust=robust) for robust in ("ball", "none"))
    batch, client = mini_batch(method), client_of(method)
    logits = method.logits(batch.features["image"], method.text_features("train"))
    torch.testing.assert_close(plain.client_loss(client_of(plain), batch), F.cross_entropy(logits, batch.y))
    assert method.client_loss(client, batch) > plain.client_loss(client_of(plain), batch)
    assert run("FOCoOp", f"{INIT}num_ood=0", rounds=1).context.isfinite().all()


def test_record_level_privacy_takes_focoop_with_features_of_single_images() -> None:
    record = "--data.record_privacy={clip: 0.5, noise_multiplier: 1.0}"
    few = ("--data.partition=federation.Few", "--data.clients_per_round=4")
    check_single_images(MethodUnderCheck(lambda *options: build("FOCoOp", f"{INIT}robust=none", *few, *options)))
    for together in ("robust=ball", "dro_tau=1"):
        with pytest.raises(ConfigurationError, match="does not say that its loss is a mean over single images"):
            run("FOCoOp", f"{INIT}robust=none", f"{INIT}{together}", record, *few, rounds=1)


def test_at_fraction_1_the_run_is_promptfls_bit_for_bit() -> None:
    method, promptfl = run("FOCoOp", f"{INIT}frac=1", *PLAIN, RATE), run("PromptFL", RATE)
    assert torch.equal(method.get_parameter("context"), promptfl.get_parameter("context"))
    assert_same_scores(method, promptfl)


def test_at_fraction_0_the_run_is_coops_bit_for_bit() -> None:
    method, coop = run("FOCoOp", f"{INIT}frac=0", *PLAIN, RATE), run("CoOp", RATE)
    assert torch.equal(method.store.all_rows("own_context"), coop.store.all_rows("context"))
    assert_same_scores(method, coop)


def test_all_clients_start_alike_and_own_contexts_stay_with_them() -> None:
    method, _ = build("FOCoOp")
    assert torch.equal(method.context, method.own_context)
    assert method.context.shape == (8, 3, method.clip.text_width)
    assert method.context[0].ne(method.context[1]).any()
    trained = run("FOCoOp")
    made = trained.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == (8 + 3) * 3 * method.clip.text_width
    assert (100 + 100) * 16 * 512 == 1638400  # the published size


def test_words_start_the_contexts_of_all_classes() -> None:
    method = constructed("FOCoOp", init_words="a photo of")
    start = method.clip.initial_context(3, "a photo of")
    assert torch.equal(method.context, start.expand(8, -1, -1))
    assert torch.equal(method.own_context, method.context)


def test_one_context_for_all_classes_tells_new_ones_apart() -> None:
    method = run("FOCoOp", f"{INIT}class_specific=false", *BASE_TO_NOVEL, rounds=1)
    assert method.context.shape == (3, method.clip.text_width)
    novel = torch.stack([value for name, value in metrics(method).items() if name.endswith("novel/accuracy")])
    assert (novel > 0).any()


def test_a_context_for_each_class_knows_those_of_training_alone() -> None:
    with pytest.raises(ConfigurationError, match="FOCoOp classifies among all classes"):
        run("FOCoOp", *BASE_TO_NOVEL, rounds=1)


def test_training_lowers_the_loss() -> None:
    method = constructed("FOCoOp", training={"lr": 0.005, "epochs": 15})
    batch = mini_batch(method)
    before = method.client_loss(client_of(method), batch).item()
    train(method, {}, batch)
    assert method.client_loss(client_of(method), batch).item() < before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ood_words": ["fog"]}, "1 ood_words for num_ood=3"),
        ({"ood_words": ["fog", "Fog", "rust"]}, "have the same tokens"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        constructed("FOCoOp", **settings)
