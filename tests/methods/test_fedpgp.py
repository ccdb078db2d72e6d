"""FedPGP: its loss by loops over classes, where its gradients go, what it sends, and what it becomes at its limits."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import Witness, build, fit
from text_prompts import alone, assert_same_scores, client_of, open_clip_text, run
from torch import Tensor

from benchmark.contract import Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Round
from benchmark.seeds import torch_generator
from methods.fedpgp import FedPGP
from methods.losses import text_contrast

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def naive_contrast(shared: Tensor, anchor: Tensor, own: Tensor, tau: float) -> float:
    total = 0.0
    for g, c, i in zip(shared, anchor, own, strict=True):
        near, far = math.exp(cosine(g, c) / tau), math.exp(cosine(g, i) / tau)
        total -= math.log(near / (near + far))
    return total / len(shared)


def three_features() -> tuple[Tensor, Tensor, Tensor]:
    shared, anchor, own = torch.randn(3, 5, 6, generator=torch_generator("features"))
    return shared, anchor, own


def test_the_contrast_is_that_of_a_loop_over_classes() -> None:
    shared, anchor, own = three_features()
    for tau in (0.5, 0.1):
        made = text_contrast(shared, anchor, own, tau, "both", "intended").item()
        assert made == pytest.approx(naive_contrast(shared, anchor, own, tau), rel=1e-5)


def test_the_ablations_with_either_sign() -> None:
    shared, anchor, own = three_features()
    to_own = sum(cosine(g, i) for g, i in zip(shared, own, strict=True)) / 5
    to_anchor = sum(cosine(g, c) for g, c in zip(shared, anchor, strict=True)) / 5

    def made(contrast: Any, sign: Any) -> float:
        return text_contrast(shared, anchor, own, 0.5, contrast, sign).item()

    assert made("no_positive", "intended") == pytest.approx(to_own, abs=1e-6)
    assert made("no_positive", "printed") == pytest.approx(1 - to_own, abs=1e-6)
    assert made("no_negative", "intended") == pytest.approx(1 - to_anchor, abs=1e-6)
    assert made("no_negative", "printed") == pytest.approx(to_anchor, abs=1e-6)


def objective(method: Any, batch: Any) -> Tensor:
    client = client_of(method, {}, method.prepare(client_of(method, {}, {}), Stage.TRAIN, "train"))
    return method.client_loss(client, batch)


@pytest.mark.parametrize("zc", ["photo", "placeholder"])
def test_the_objective_through_open_clips_own_tower(zc: str) -> None:
    method, batch = alone("FedPGP", f"--model.init_args.zc={zc}", "--model.init_args.mu=0.7")
    names = [f"class{c}" for c in range(8)]
    words = "a photo of a {}." if zc == "photo" else "X X X {}."
    anchor = method.clip.text_features_of([words.format(name) for name in names])
    shared = open_clip_text(method.clip, names, method.context)
    own = open_clip_text(method.clip, names, method.context + method.u @ method.v)
    logits = method.clip.model.logit_scale.exp() * batch.features["image"] @ own.T
    expected = F.cross_entropy(logits[:11], batch.y[:11]) + 0.7 * naive_contrast(shared, anchor, own, 0.5)
    torch.testing.assert_close(objective(method, batch), expected, rtol=1e-5, atol=1e-5)


def gradients(method: Any, loss: Tensor) -> dict[str, Tensor | None]:
    names = ["context", "u", "v"]
    made = torch.autograd.grad(loss, [getattr(method, name) for name in names], allow_unused=True, retain_graph=True)
    return dict(zip(names, made, strict=True))


def test_where_the_gradients_go() -> None:
    method, batch = alone("FedPGP", "--model.init_args.mu=1")
    for name in ("context", "u", "v"):
        getattr(method, name).requires_grad_()
    names = [f"class{c}" for c in range(8)]
    anchor = method.clip.text_features_of([f"a photo of a {name}." for name in names])
    shared = open_clip_text(method.clip, names, method.context)
    own = open_clip_text(method.clip, names, method.context + method.u @ method.v)
    # z_G alone reaches p_G and neither U nor V.
    through = gradients(method, F.cosine_similarity(shared, anchor, dim=1).sum())
    assert through["context"] is not None
    assert through["context"].abs().max() > 0
    assert through["u"] is through["v"] is None
    near, far = F.cosine_similarity(shared, anchor, dim=1), F.cosine_similarity(shared, own, dim=1)
    logits = method.clip.logit_scale * batch.features["image"][:11] @ own.T
    expected = gradients(method, F.cross_entropy(logits, batch.y[:11]) + F.softplus((far - near) / 0.5).mean())
    made = gradients(method, objective(method, batch))
    for name, value in made.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)
    stopped = F.softplus((F.cosine_similarity(shared.detach(), own, dim=1) - near.detach()) / 0.5).mean()
    without = gradients(method, F.cross_entropy(logits, batch.y[:11]) + stopped)
    assert (without["context"] - made["context"]).abs().max() > 1e-3, "p_G is trained through z_G as well"
    torch.testing.assert_close(without["u"], made["u"], rtol=1e-3, atol=1e-4)


def test_without_an_own_change_the_contrast_reads_hand_written_prompts_alone() -> None:
    method, batch = alone("FedPGP")
    with torch.no_grad():
        method.u.zero_()
        features = method.clip.text_features(method.class_prompts("train"), method.context)
        anchor = method.clip.text_features(method.anchor_prompts)
        difference = objective(method, batch)
        method.contrast_weight = 0.0
        difference = difference - objective(method, batch)
    expected = sum(math.log(1 + math.exp((1 - cosine(g, c)) / 0.5)) for g, c in zip(features, anchor, strict=True)) / 8
    assert difference.item() == pytest.approx(expected, rel=1e-4)


def test_the_hand_written_prompts_are_encoded_once_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    method, data = build("FedPGP", "--data.clients_at_once=2")
    encoded = []
    features = method.clip.text_features

    def counted(prompts: Any, *contexts: Tensor) -> Tensor:
        encoded.append(prompts is method.anchor_prompts)
        return features(prompts, *contexts)

    monkeypatch.setattr(method.clip, "text_features", counted)
    fit(method, data, 2)
    assert encoded.count(True) == 1
    assert encoded.count(False) > 8


def test_other_classes_have_other_hand_written_prompts() -> None:
    method, _ = alone("FedPGP")
    for classes in ((0, 1, 2, 3), (2, 5, 7)):
        method.set_label_spaces({"train": classes})
        anchor = method.prepare(client_of(method, {}, {}), Stage.TRAIN, "train")["anchor"]
        names = [f"a photo of a class{c}." for c in classes]
        torch.testing.assert_close(anchor, method.clip.text_features_of(names), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("off", ["--model.init_args.mu=0", "--model.init_args.contrast=none"])
def test_without_contrast_and_change_it_is_promptfl_bit_for_bit(off: str) -> None:
    method, promptfl = run("FedPGP", off, "--model.init_args.bottleneck=0"), run("PromptFL")
    assert torch.equal(method.get_parameter("context"), promptfl.get_parameter("context"))
    assert_same_scores(method, promptfl)


def test_with_a_change_that_stays_at_zero_it_is_promptfl() -> None:
    method, data = build("FedPGP", "--model.init_args.mu=0")
    method.u.data.zero_()
    method.local_phases = lambda: [method.training_settings.phase("context")]
    fit(method, data, 2)
    promptfl = run("PromptFL")
    assert torch.equal(method.get_parameter("context"), promptfl.get_parameter("context"))
    assert_same_scores(method, promptfl)


@pytest.mark.parametrize("bottleneck", [1, 2])
def test_a_client_differs_from_the_server_by_a_matrix_of_low_rank(bottleneck: int) -> None:
    method = run("FedPGP", f"--model.init_args.bottleneck={bottleneck}")
    with torch.no_grad():
        for u, v in zip(method.store.all_rows("u"), method.store.all_rows("v"), strict=True):
            method.u.copy_(u)
            method.v.copy_(v)
            values = torch.linalg.svdvals((method.prompt() - method.context).double())
            assert values[bottleneck - 1] > 1e-4
            assert values[bottleneck:].max() < 1e-6


def test_only_the_shared_prompt_is_sent() -> None:
    method, data = build("FedPGP")
    witness = Witness()
    method.make_server = lambda: witness
    fit(method, data, 1)
    assert all(set(message) == {"context"} for message in witness.last.values())
    assert set(witness.broadcast(Round(2, (0,), 0), method.simulation.shared(), (0,)).common) == {"context"}
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == 3 * method.clip.text_width


def test_initial_values() -> None:
    method, promptfl = build("FedPGP", "--model.init_args.num_context=16")[0], build("PromptFL")[0]
    assert torch.equal(build("FedPGP")[0].context, promptfl.context), "p_G starts as PromptFL's context"
    assert (method.u.shape, method.v.shape) == ((16, 2), (2, 64))
    for part in (method.context, method.v):
        assert part.std().item() == pytest.approx(0.02, rel=0.25)
    full = build("FedPGP", "--model.init_args.adaptation=full_rank")[0]
    assert full.personal == ("change",)
    assert torch.equal(full.prompt(), full.context)


def test_a_change_of_full_rank_is_personal_and_learned() -> None:
    method = run("FedPGP", "--model.init_args.adaptation=full_rank", rounds=1)
    change = method.store.all_rows("change")
    ranks = torch.linalg.matrix_rank(change[change.abs().amax((1, 2)) > 0])
    assert (ranks == 3).any()
    assert method.server.traffic.per_client()["up_floats"] == 3 * method.clip.text_width


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"contrast": "half"}, "contrast: expected both or no_positive or no_negative or none, got half"),
        ({"zc": "words"}, "zc: expected photo or placeholder, got words"),
        ({"adaptation": "rank"}, "adaptation: expected low_rank or full_rank, got rank"),
        ({"ablation_sign": "-"}, "ablation_sign: expected intended or printed, got -"),
        ({"bottleneck": -1}, "bottleneck: expected a whole number from 0 to 1,000, got -1"),
        ({"temperature": 0.0}, "temperature: expected a number above 0, got 0.0"),
    ],
)
def test_wrong_choices_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FedPGP(2, ["a", "b"], build("PromptFL")[0].clip, **settings)
