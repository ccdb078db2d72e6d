"""The text-prompt methods without a mathematics of their own, and what they have from their base."""

from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from federation import build, fit
from text_prompts import BASE_TO_NOVEL, FULL, ONE, alone, assert_same_scores, metrics, open_clip_text, run
from torch import Tensor

import methods
from benchmark.backbones import prompted_clip
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import LocalTraining, MiniBatch
from benchmark.errors import ConfigurationError
from datamodules.partition import ClientSplits, Partition
from datamodules.source import ImagePool
from methods import FedPGP, PromptFL, PromptPer, PromptProx
from methods.attention import memory_attention, spatial_attention
from methods.fedkgcoop import knowledge_distance
from methods.losses import model_contrast, text_contrast

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


# ---------------------------------------------------------------------- PromptFL and the base


def test_a_round_of_one_full_step_is_a_centralised_step_through_open_clip() -> None:
    method, data = build("PromptFL", *FULL, "--data.clients_per_round=11")
    method.training_settings = LocalTraining(lr=0.05, epochs=1, weight_decay=0.1)
    start = method.context.detach().clone()
    fit(method, data, 1)
    rows = torch.cat([torch.from_numpy(rows) for rows in data.splits.train])
    model, context = method.clip.model, start.clone().requires_grad_()
    images = model.encode_image(data.transform(data.pool.images[rows], None), normalize=True)
    logits = model.logit_scale.exp() * images @ open_clip_text(method.clip, data.class_names, context).T
    F.cross_entropy(logits, data.pool.labels[rows]).backward()
    assert context.grad is not None
    torch.testing.assert_close(method.get_parameter("context"), start - 0.05 * (context.grad + 0.1 * start))


def test_splits_are_classified_among_their_own_classes() -> None:
    method, data = build("PromptFL", *BASE_TO_NOVEL)
    trainer = fit(method, data, 1)
    names = data.class_names
    assert method.names_of("train") == method.names_of("test") == method.names_of("base") == names[:4]
    assert method.names_of("novel") == names[4:]
    assert method.names_of("all") == names
    for split, space in (("test", (0, 1, 2, 3)), ("base", (0, 1, 2, 3)), ("novel", (4, 5, 6, 7))):
        classes = open_clip_text(method.clip, [names[c] for c in space], method.context)
        recorded = trainer.callbacks[0].values[1, "server", split, "accuracy"]
        lists = data.splits.test if split == "test" else data.splits.others[split]
        for client, rows in enumerate(map(torch.from_numpy, lists)):
            x = data.transform(data.pool.images[rows], None)
            guess = (method.clip.model.encode_image(x, normalize=True) @ classes.T).argmax(1)
            right = (torch.tensor(space)[guess] == data.pool.labels[rows]).double().mean()
            assert recorded[client] == pytest.approx(right.item())
            torch.testing.assert_close(method(x, split).argmax(1), guess)


class FiveAndThree(Partition):
    """Clients learn five classes of two batches, and are also tested on the other three, counted in any order.

    Args:
        num_clients: N.
        first: the class of the other three that is counted first.
    """

    further_splits = ("novel",)

    def __init__(self, num_clients: int = 3, first: int = 7) -> None:
        self.num_clients, self.first = num_clients, first

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Every third image of the five for each, all of the three for everybody."""
        base, others = (6, 2, 1, 0, 4), {7: (7, 3, 5), 5: (5, 7, 3), 3: (3, 5, 7)}[self.first]
        labels, test = pool.labels.numpy(), pool.test.numpy()
        of_base = np.isin(labels, base)
        train, tested = np.flatnonzero(of_base & ~test), np.flatnonzero(of_base & test)
        assert self.num_clients is not None
        return ClientSplits(
            [train[k :: self.num_clients][:7] for k in range(self.num_clients)],
            [tested[k :: self.num_clients][:6] for k in range(self.num_clients)],
            {"novel": [np.flatnonzero(~of_base & test)[:12]] * self.num_clients},
            {"train": base, "test": base, "novel": others},
        )


@pytest.mark.parametrize("conf", [name for name in methods.__all__ if getattr(methods, name).open_vocabulary])
def test_every_text_prompt_method_tells_new_classes_apart_whatever_their_order(conf: str) -> None:
    spaces = [f"--data.partition={__name__}.FiveAndThree", "--data.partition.init_args.num_clients=3"]
    one, other = (
        metrics(run(conf, *spaces, "--data.clients_per_round=3", f"--data.partition.init_args.first={first}", rounds=1))
        for first in (7, 5)
    )
    assert one.keys() == other.keys()
    for name, value in one.items():
        if not name.endswith("novel/loss"):
            torch.testing.assert_close(value, other[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: n + m)
    novel = torch.stack([value for name, value in one.items() if name.endswith("novel/accuracy")])
    assert novel.isfinite().all()
    assert (novel > 0).any()


def test_names_follow_the_order_of_a_label_space() -> None:
    method, _ = build("PromptFL")
    method.set_label_spaces({"novel": (7, 3, 5), "train": (0, 1)})
    assert method.names_of("novel") == ["class7", "class3", "class5"]
    assert method.class_prompts("novel").num_classes == 3
    assert method.class_prompts("train").num_classes == 2
    assert method.class_prompts("test").num_classes == 8
    torch.testing.assert_close(
        method.text_features("novel"), open_clip_text(method.clip, ["class7", "class3", "class5"], method.context)
    )


@pytest.mark.parametrize("conf", ["PromptFL", "FedPGP"])
def test_cached_features_give_the_same_accuracies(conf: str) -> None:
    cached, computed = (run(conf, f"--data.cache_features={flag}", *BASE_TO_NOVEL) for flag in ("true", "false"))
    for name, value in metrics(cached).items():
        if "accuracy" in name:
            assert torch.equal(value, metrics(computed)[name]), name
    torch.testing.assert_close(cached.get_parameter("context"), computed.get_parameter("context"), rtol=1e-4, atol=1e-5)
    assert any("novel" in name for name in metrics(cached))


@pytest.mark.parametrize("method_class", [PromptFL, FedPGP])
def test_a_message_of_the_papers_size(method_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = {"image_size": 32, "layers": 1, "width": 16, "head_width": 16, "patch_size": 16}
    text = {"context_length": 24, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 1}
    model = open_clip.CLIP(8, vision, text).requires_grad_(False).eval()
    model.visual.image_mean = model.visual.image_std = (0.5, 0.5, 0.5)
    tokenizer = open_clip.SimpleTokenizer(context_length=24)
    _, data = build("PromptFL", *ONE)
    monkeypatch.setattr(prompted_clip, "load_clip", lambda *arguments: (model, tokenizer))
    method = method_class(1, data.class_names, PromptedCLIP())
    fit(method, data, 1)
    made = method.server.traffic.per_client()
    assert made["up_bytes"] == made["down_bytes"] == 32_768
    assert method.server.traffic.rounds[0][1] == 32_768


def test_the_default_settings_are_fedpgps() -> None:
    method, _ = build("PromptFL")
    made = PromptFL(2, ["a", "b"], method.clip)
    phase = made.local_phases()[0]
    assert (made.num_context, phase.epochs, phase.optimizer) == (16, 2, "sgd")
    group = phase.groups[0]
    assert (group.lr, group.momentum, group.weight_decay) == (0.001, 0.9, 5e-4)


# ---------------------------------------------------------------------- zero-shot CLIP


def test_zero_shot_is_promptfl_before_training_from_the_same_words() -> None:
    words = ["--model.init_args.num_context=4", "--model.init_args.init_words=a photo of a"]
    zero, start = run("ZeroShotCLIP", *BASE_TO_NOVEL, rounds=0), run("PromptFL", *BASE_TO_NOVEL, *words, rounds=0)
    for split in ("base", "novel"):
        assert torch.equal(zero.text_features(split), start.text_features(split))
    texts = [f"a photo of a class{c}." for c in range(4)]
    torch.testing.assert_close(zero.text_features("base"), zero.clip.text_features_of(texts))
    assert_same_scores(zero, start)
    base = metrics(zero)["metric.0/server/base/accuracy"]
    assert (base == base[0]).all(), "every client has the same score on the same images"


def test_zero_shot_takes_a_template() -> None:
    method, _ = build("ZeroShotCLIP", "--model.init_args.template={} texture.")
    method.set_label_spaces({})
    expected = method.clip.text_features_of([f"class{c} texture." for c in range(8)])
    torch.testing.assert_close(method.text_features("test"), expected)
    method, _ = build("ZeroShotCLIP", "--model.init_args.template=a picture")
    with pytest.raises(ConfigurationError, match=r"template has one \{\} for the class name"):
        method.set_label_spaces({})


# ---------------------------------------------------------------------- CoOp, LocalCLIP


def test_with_one_client_coop_is_promptfl_and_nothing_is_sent() -> None:
    coop, promptfl = run("CoOp", *ONE), run("PromptFL", *ONE)
    assert torch.equal(coop.store.all_rows("context")[0], promptfl.get_parameter("context"))
    assert coop.server.traffic.per_client()["up_bytes"] == coop.server.traffic.per_client()["down_bytes"] == 0
    assert promptfl.server.traffic.per_client()["up_bytes"] == 4 * 3 * promptfl.clip.text_width


def test_coop_goes_on_from_its_own_prompt_unless_it_restarts() -> None:
    settings = [*ONE, *FULL]
    once = run("CoOp", *settings, rounds=1).store.all_rows("context")
    restarted = run("CoOp", *settings, "--model.init_args.local_restart=true", rounds=3).store.all_rows("context")
    torch.testing.assert_close(restarted, once)
    assert (run("CoOp", *settings, rounds=3).store.all_rows("context") - once).abs().max() > 0.01


def test_classes_that_a_client_does_not_hold_are_in_its_softmax() -> None:
    method, batch = alone("CoOp", *BASE_TO_NOVEL)
    logits = method.logits(method.image_features(batch), method.text_features("train"))
    assert logits.shape == (12, 4)
    own = torch.zeros_like(batch.y)
    only = MiniBatch(batch.x, own, batch.mask, features=batch.features)
    expected = F.cross_entropy(logits[:11], own[:11])
    assert expected > 0.01
    torch.testing.assert_close(method.client_loss(None, only), expected)  # type: ignore[arg-type]


def test_localclip_trains_both_towers_and_sends_nothing() -> None:
    method, data = build("LocalCLIP", *ONE, "--data.batch_size=64", "--model.init_args.training.momentum=0")
    fit(method, data, 1)
    oracle, _ = build("LocalCLIP", *ONE)
    model = oracle.clip.model.requires_grad_()
    rows = torch.from_numpy(data.splits.train[0])
    images = model.encode_image(data.transform(data.pool.images[rows], None), normalize=True)
    texts = oracle.clip.tokenizer([f"a photo of a {n}." for n in data.class_names], oracle.clip.context_length)
    logits = model.logit_scale.exp() * images @ model.encode_text(texts, normalize=True).T
    F.cross_entropy(logits, data.pool.labels[rows]).backward()
    left = dict(model.named_parameters())
    for name in method.roles.personal:
        value = left.pop(name.removeprefix("clip.model."))
        moved = method.store.all_rows(name)[0] - value.detach()
        torch.testing.assert_close(moved, -1e-4 * value.grad, rtol=1e-3, atol=3e-7, msg=lambda m, n=name: f"{n}: {m}")
    assert list(left) == ["token_embedding.weight"]
    assert method.server.traffic.per_client()["up_bytes"] == 0


# ---------------------------------------------------------------------- PromptFL+FT, Prompt+PER, Prompt+Prox


def test_fine_tuning_works_on_a_copy_and_without_epochs_it_is_promptfl() -> None:
    plain = run("PromptFL")
    none = run("PromptFLFT", "--model.init_args.finetune_epochs=0")
    tuned = run("PromptFLFT", "--model.init_args.finetune_epochs=2", each=True)
    assert_same_scores(plain, none)
    for other in (none, tuned):
        assert torch.equal(plain.get_parameter("context"), other.get_parameter("context"))
    losses = [metrics(m)["metric.2/server/test/loss"] for m in (plain, tuned)]
    assert (losses[0] - losses[1]).abs().max() > 1e-3


def test_the_fine_tuned_copy_is_what_one_client_would_train() -> None:
    tuned = run("PromptFLFT", *ONE, *FULL, "--model.init_args.finetune_epochs=2", rounds=0)
    trained = run("PromptFL", *ONE, *FULL, rounds=1)
    left, right = metrics(tuned), metrics(trained)
    torch.testing.assert_close(
        left["metric.0/server/test/loss"], right["metric.1/server/test/loss"], rtol=1e-4, atol=1e-5
    )


def test_fine_tuning_keeps_the_rate_of_the_first_round() -> None:
    method, _ = build("PromptFLFT", "--model.init_args.training.schedule=cosine")
    (trained,), (tuned,) = method.local_phases(), method.finetune_phases(new=False)
    assert (trained.schedule, tuned.schedule) == ("cosine", "constant")
    assert tuned.groups == trained.groups


def test_prompt_per_lies_between_promptfl_and_coop() -> None:
    rate = "--model.init_args.training.lr=0.05"
    everything_shared = run("PromptPer", "--model.init_args.num_personal=0", rate)
    promptfl = run("PromptFL")
    assert torch.equal(everything_shared.get_parameter("context"), promptfl.get_parameter("context"))
    assert_same_scores(everything_shared, promptfl)
    everything_own = run("PromptPer", "--model.init_args.num_personal=3", rate)
    coop = run("CoOp")
    assert torch.equal(everything_own.store.all_rows("personal_context"), coop.store.all_rows("context"))
    assert_same_scores(everything_own, coop)
    assert everything_own.server.traffic.per_client()["up_bytes"] == 0
    between = run("PromptPer", rounds=1)
    assert between.server.traffic.per_client()["up_floats"] == 2 * between.clip.text_width
    assert torch.equal(
        torch.cat([build("PromptPer")[0].context, between.personal_context]), build("PromptFL")[0].context
    ), "both halves start from one context"


def test_prompt_per_refuses_more_tokens_than_there_are() -> None:
    with pytest.raises(ConfigurationError, match="num_personal must be from 0 to num_context, 3 tokens; got 4"):
        PromptPer(2, ["a", "b"], build("PromptFL")[0].clip, num_context=3, num_personal=4)


@pytest.mark.parametrize("off", ["mu=0", "prox_grad=detached"])
def test_prompt_prox_without_its_term_is_promptfl(off: str) -> None:
    prox, promptfl = run("PromptProx", f"--model.init_args.{off}"), run("PromptFL")
    assert torch.equal(prox.get_parameter("context"), promptfl.get_parameter("context"))
    assert_same_scores(prox, promptfl)


def test_prompt_prox_pulls_towards_the_received_prompt_from_its_second_step_on() -> None:
    def after(conf: str, epochs: int, *overrides: str) -> Tensor:
        settings = [*ONE, *FULL, f"--model.init_args.training.epochs={epochs}", *overrides]
        return run(conf, *settings, rounds=1).get_parameter("context")

    start = build("PromptFL")[0].context
    first, second = after("PromptFL", 1), after("PromptFL", 2)
    torch.testing.assert_close(after("PromptProx", 1, "--model.init_args.mu=3"), first)
    torch.testing.assert_close(
        after("PromptProx", 2, "--model.init_args.mu=3"), second - 0.05 * 3 * (first - start), rtol=1e-4, atol=1e-6
    )


def test_prompt_prox_knows_its_choices() -> None:
    clip = build("PromptFL")[0].clip
    with pytest.raises(ConfigurationError, match="prox_grad: expected live or detached, got on"):
        PromptProx(2, ["a", "b"], clip, prox_grad="on")  # type: ignore[arg-type]


@pytest.mark.parametrize("conf", ["PromptFL", "FedOTP", "FedPGP"])
def test_in_bf16_logits_have_the_digits_of_their_features(conf: str) -> None:
    """CLIP multiplies cosines by 100, of which bfloat16 would keep steps of a half."""
    method = build(conf)[0]
    generator = torch.Generator().manual_seed(0)
    patches = (7,) if conf == "FedOTP" else ()
    prompts = (2,) if conf == "FedOTP" else ()
    images = F.normalize(torch.randn(5, *patches, method.clip.embed_dim, generator=generator), dim=-1).bfloat16()
    classes = F.normalize(torch.randn(*prompts, 4, method.clip.embed_dim, generator=generator), dim=-1).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = method.logits(images, classes)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, method.logits(images.float(), classes.float()), rtol=0, atol=0)


def test_in_bf16_contrasts_have_the_digits_of_their_features() -> None:
    def contrasts(first: Tensor, second: Tensor, third: Tensor) -> dict[str, Tensor]:
        return {
            "model": model_contrast(first, second, third, 0.5),
            "text": text_contrast(first, second, third, 0.5, "both", "intended"),
            "knowledge": knowledge_distance(first, second),
            "memory": memory_attention(first, second, torch.eye(6), 1.0),
            "spatial": torch.cat(spatial_attention(first, torch.stack([second] * 6), third)),
        }

    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(6, 16, generator=generator).bfloat16() for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        found = contrasts(*given)
    torch.testing.assert_close(found, contrasts(*(each.float() for each in given)), rtol=0, atol=0)
