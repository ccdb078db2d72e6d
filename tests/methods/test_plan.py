"""PLAN: the objectives of both stages written out, what each moves and sends, and its degenerate cases."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit, terms
from live_client import constructed, gradients, mini_batch, parameters_of
from text_prompts import assert_same_scores, run
from torch import Tensor

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Client, Stage
from benchmark.engine.roles import read_roles
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads, Values
from benchmark.seeds import torch_generator
from methods import PLAN
from methods.prompt_aggregator import aggregated
from methods.prompt_merging import MergingRule

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")

FEW = ("--data.partition=federation.Few", "--data.clients_per_round=4", "--data.clients_at_once=2")
OWN = {"own_context", "own_image_prompts"}
GLOBAL = {"context", "image_prompts"}


def drawn(*shape: int, key: str) -> Tensor:
    return 0.02 * torch.randn(shape, generator=torch_generator(key))


def client_in(method: Any, number: int, received: Values) -> Client:
    """A client of a round, whose parameters are the method's own, prepared; its own prompts are moved first."""
    for name in OWN:
        value = method.get_parameter(name)
        value.data.add_(drawn(*value.shape, key=name))
    client = Client(parameters_of(method), received, torch.ones(8, dtype=torch.int64), Round(number, (0,), 3))
    with torch.no_grad():
        return replace(client, prepared=method.prepare(client, Stage.TRAIN, "train"))


def others(method: Any, count: int) -> Values:
    """Prompts of so many clients."""
    return {f"all_{n}": drawn(count, *method.get_parameter(n).shape, key=f"all {n}") for n in sorted(GLOBAL)}


def globals_of(method: Any) -> Values:
    """Global prompts, as a server sends them."""
    return {name: drawn(*method.get_parameter(name).shape, key=f"sent {name}") for name in sorted(GLOBAL)}


def logits_of(method: Any, x: Tensor, context: Tensor, image_prompts: Tensor) -> Tensor:
    """Logits under prompts [L, n, w] and [L, n, v], layer by layer through open_clip's own blocks.

    The image tower has more than L layers: the last prompts' outputs go through the others.
    """
    clip, names, count = method.clip, method.names_of("train"), context.shape[1]
    model, visual = clip.model, clip.model.visual
    texts = [" ".join(["X"] * count + [f"{name}."]) for name in names]
    tokens = clip.tokenizer(texts, context_length=clip.context_length)
    words = model.token_embedding(tokens) + model.positional_embedding
    first = context[0] + model.positional_embedding[1 : 1 + count]
    for block, prompts in zip(model.transformer.resblocks, [first, *context[1:]], strict=True):
        words = torch.cat([words[:, :1], prompts.expand(len(words), -1, -1), words[:, 1 + count :]], 1)
        words = block(words, attn_mask=model.attn_mask)
    classes = model.ln_final(words)[torch.arange(len(words)), tokens.argmax(1)] @ model.text_projection

    patches = visual._embeds(x)
    there, first = patches.shape[1], visual.ln_pre(image_prompts[0])
    for layer, block in enumerate(visual.transformer.resblocks):
        if layer < len(image_prompts):
            prompts = image_prompts[layer] if layer else first
            patches = torch.cat([patches[:, :there], prompts.expand(len(x), -1, -1)], 1)
        patches = block(patches)
    images = visual.ln_post(patches[:, 0]) @ visual.proj
    return clip.logit_scale * F.normalize(images, dim=-1) @ F.normalize(classes, dim=-1).T


# --- the objectives ---


@pytest.mark.parametrize("taught_by", ["templates", "global prompts"])
def test_the_objective_of_stage_1_written_out(taught_by: str) -> None:
    method = constructed("PLAN", distillation=0.7, temperature=2.0)
    sent = globals_of(method) if taught_by == "global prompts" else {}
    client, batch = client_in(method, 3 if sent else 1, sent), mini_batch(method, 0, 5)
    logits = logits_of(method, batch.x, method.own_context, method.own_image_prompts)
    if sent:
        teacher = logits_of(method, batch.x, sent["context"], sent["image_prompts"])
    else:
        teacher = method.clip.logit_scale * batch.features["image"] @ method.frozen_text("train").T
    cross = -((teacher / 2).softmax(1) * (logits / 2).log_softmax(1)).sum() / 5
    expected = F.cross_entropy(logits, batch.y) + 0.7 * 4 * cross
    torch.testing.assert_close(method.client_loss(client, batch), expected, rtol=1e-4, atol=1e-4)
    made = gradients(method, client, batch)
    assert {name for name, value in made.items() if value.any()} == OWN


def test_the_objective_of_stage_2_written_out() -> None:
    method = constructed("PLAN")
    sent = others(method, 3)
    client, batch = client_in(method, 2, sent), replace(mini_batch(method, 0, 5), phase=1)
    assert client.prepared == {}
    context = aggregated(sent["all_context"], {**method.text_aggregator}, 4)
    image_prompts = aggregated(sent["all_image_prompts"], {**method.image_aggregator}, 4)
    expected = F.cross_entropy(logits_of(method, batch.x, context, image_prompts), batch.y)
    torch.testing.assert_close(method.client_loss(client, batch), expected, rtol=1e-4, atol=1e-4)
    made = gradients(method, client, batch)
    moved = {name for name, value in made.items() if value.any()}
    # Softmax does not see a key's bias.
    expected_moved = {name for name in made if "aggregator" in name and "key_bias" not in name}
    assert expected_moved <= moved <= expected_moved | {name for name in made if "key_bias" in name}


def test_without_a_teacher_nothing_is_prepared() -> None:
    method = constructed("PLAN", distillation=0.0)
    client, batch = client_in(method, 1, {}), mini_batch(method, 0, 5)
    assert client.prepared == {}
    logits = logits_of(method, batch.x, method.own_context, method.own_image_prompts)
    expected = F.cross_entropy(logits, batch.y)
    torch.testing.assert_close(method.client_loss(client, batch), expected, rtol=1e-4, atol=1e-4)


def test_global_prompts_classify() -> None:
    method = constructed("PLAN")
    client, batch = client_in(method, 3, {}), mini_batch(method, 0, 5)
    client = replace(client, prepared=method.prepare(client, Stage.EVALUATE, "test"))
    expected = logits_of(method, batch.x, method.context, method.image_prompts)
    torch.testing.assert_close(method.client_logits(client, batch), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(method(batch.x), expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(method.own_context, method.context)


# --- the server ---


def started(method: Any, clients: int) -> tuple[MergingRule, Values]:
    rule, named = method.make_server(), dict(method.named_parameters())
    rule.start({name: value.clone() for name, value in named.items() if not name.startswith("clip.")}, terms(clients))
    return rule, {name: named[name].clone() for name in read_roles(method).shared}


def test_the_server_keeps_prompts_and_takes_the_equal_mean_of_what_merges_them() -> None:
    method = constructed("PLAN")
    rule, shared = started(method, 4)
    assert rule.broadcast(Round(1, (1, 3), 0), shared, (1, 3)).common == {}
    sent = {f"own_{n}": drawn(2, *shared[n].shape, key=n) for n in GLOBAL}
    made = rule.aggregate(Round(1, (1, 3), 0), shared, Uploads((1, 3), sent, torch.tensor([1.0, 9.0])))
    assert made == {}
    down = rule.broadcast(Round(2, (0, 2), 0), shared, (0, 2)).common
    assert set(down) == {"all_context", "all_image_prompts"} | (set(shared) - GLOBAL)
    assert torch.equal(down["all_context"], sent["own_context"])
    assert set(rule.broadcast(Round(1, (), 0), shared, (0,)).common) == GLOBAL  # an evaluation

    sums = {n: torch.stack([v, 3 * v + 1]) for n, v in shared.items() if n not in GLOBAL}
    made = rule.aggregate(Round(2, (0, 2), 0), shared, Uploads((0, 2), sums, torch.tensor([1.0, 9.0])))
    for name in sums:
        torch.testing.assert_close(made[name], 2 * shared[name] + 0.5, msg=name)
    of = {n.removeprefix("text_aggregator."): v for n, v in made.items() if n.startswith("text_aggregator.")}
    torch.testing.assert_close(made["context"], aggregated(sent["own_context"], of, 4))
    assert set(rule.broadcast(Round(3, (0,), 0), shared, (0,)).common) == GLOBAL


def test_before_anybody_has_sent_prompts_the_initial_ones_are_merged() -> None:
    method = constructed("PLAN")
    rule, shared = started(method, 4)
    down = rule.broadcast(Round(2, (0,), 0), shared, (0,)).common
    assert torch.equal(down["all_context"], shared["context"].expand(4, -1, -1, -1))


# --- runs ---


def federated(rounds: int, *options: str) -> Any:
    method, data = build("PLAN", *FEW, *options)
    fit(method, data, rounds)
    return method


def test_each_stage_moves_and_sends_what_is_its_own() -> None:
    """P = L n (w + v) and A = sum of L (8 d^2 + 7 d) + 4 d over the towers' widths d, as the specification has them."""
    methods = [federated(rounds) for rounds in range(5)]
    made = [{name: value.clone() for name, value in method.simulation.shared().items()} for method in methods]
    own = [{name: method.store.all_rows(name) for name in OWN} for method in methods]
    for number in range(1, 5):
        prompts = number % 2 == 1
        for name, value in made[number].items():
            if prompts or not name.endswith("key_bias"):  # softmax does not see that one
                assert torch.equal(value, made[number - 1][name]) == prompts, name
        for name in OWN:
            assert torch.equal(own[number][name], own[number - 1][name]) == (not prompts), name
    clip, layers, tokens = methods[4].clip, 2, 2
    w, v = clip.text_width, clip.vision_width
    p = layers * tokens * (w + v)
    a = sum(layers * (8 * d**2 + 7 * d) + 4 * d for d in (w, v))
    rule = methods[4].server.rule
    seen = [{c for number in range(1, last + 1, 2) for c in rule.select(number)} for last in (1, 3)]
    rows = [(row[3] / row[0], row[4] / row[0]) for row in methods[4].server.traffic.rounds]
    assert rows == [(0, p), (a + len(seen[0]) * p, a), (p, p), (a + len(seen[1]) * p, a)]
    assert int(rule.known.sum()) == len(seen[1])


def test_what_is_merged_is_what_clients_have() -> None:
    method = federated(2)
    rule = method.server.rule
    known = rule.known.nonzero().flatten()
    for name, of in (("context", method.text_aggregator), ("image_prompts", method.image_aggregator)):
        expected = aggregated(method.store.all_rows(f"own_{name}")[known], {**of}, 4)
        torch.testing.assert_close(method.get_parameter(name).detach(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_a_mean_of_text_prompts_needs_no_aggregator() -> None:
    method = federated(2, "--model.init_args.text_merge=mean")
    assert not [name for name, _ in method.named_parameters() if name.startswith("text_aggregator")]
    assert "text_aggregator" not in method.shared
    known = method.server.rule.known.nonzero().flatten().tolist()
    rows = [method.store.all_rows("own_context")[client] for client in known]
    torch.testing.assert_close(method.context.detach(), sum(rows) / len(rows))


def test_without_a_teacher_the_mean_of_stage_1_is_fedavg_of_independent_prompts() -> None:
    plain = ("trajectory=none", "init_words=null", "text_weight=0", "image_weight=0", "logit_weight=0")
    training = ("training.lr=0.05", "training.epochs=1", "training.momentum=0.9")
    method, data = build("PLAN", *FEW, *(f"--model.init_args.{option}" for option in (*training, "distillation=0")))
    other, of_other = build("FedPromptSRC", *FEW, *(f"--model.init_args.{option}" for option in (*training, *plain)))
    assert torch.equal(other.context, method.context[0])
    other.deep_context.data.copy_(method.context[1:])
    other.image_prompts.data.copy_(method.image_prompts)
    fit(method, data, 1)
    fit(other, of_other, 1)
    clients = method.server.rule.select(1)
    sizes = torch.tensor([float(len(data.train_indices[client])) for client in clients])
    context, images = (
        torch.einsum("k,klnd->lnd", sizes / sizes.sum(), method.store.all_rows(name)[clients])
        for name in ("own_context", "own_image_prompts")
    )
    torch.testing.assert_close(other.context.detach(), context[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(other.deep_context.detach(), context[1:], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(other.image_prompts.detach(), images, rtol=1e-4, atol=1e-6)


def test_a_client_that_never_trains_is_scored_with_the_global_prompts() -> None:
    method, data = build("PLAN", FEW[0], FEW[2], "--data.new_clients=0.34", "--data.clients_per_round=4")
    fit(method, data, 2)
    newcomers = list(data.new_clients)
    assert newcomers
    assert not method.server.rule.known[newcomers].any()
    assert not method.finetune_phases(new=True)
    sent = method.server.rule.broadcast(method.server.evaluated, method.simulation.shared(), tuple(newcomers)).common
    assert set(sent) == GLOBAL


def test_a_run_again_evaluates_the_same() -> None:
    assert_same_scores(run("PLAN", rounds=2), run("PLAN", rounds=2))


def test_message_of_vit_b_16() -> None:
    with torch.device("meta"):  # shapes only
        method = PLAN(10, ["a", "b"], PromptedCLIP("ViT-B-16", "random"))
    roles = read_roles(method)
    numbers = {name: method.get_parameter(name).numel() for name in roles.trained}
    assert sum(numbers[name] for name in roles.uploaded) == 122_880
    assert sum(numbers[name] for name in roles.shared if name not in GLOBAL) == 81_901_568


# --- refusals ---


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"depth": 3}, r"PLAN: depth=3, but the tower \(text\) has 2 blocks; give 1 to 2"),
        (
            {"heads": 5},
            r"PLAN: heads=5 must divide the widths of both towers, 64 \(text\) and 96 \(image\); give a divisor of 32",
        ),
        ({"templates": 1000}, "PLAN: templates=1000, but open_clip has 80"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        constructed("PLAN", **settings)


def test_a_resnet_is_refused() -> None:
    with torch.device("meta"):
        resnet = PromptedCLIP("RN50", "random")
    with pytest.raises(ConfigurationError, match="PLAN puts prompts between the patches of a ViT, and this CLIP"):
        PLAN(2, ["a"], resnet)


def test_prompts_of_the_first_layer_alone() -> None:
    method = constructed("PLAN", depth=1)
    batch = mini_batch(method, 0, 5)
    classes = method.clip.text_features(method.class_prompts("test"), method.context[0])
    images = method.clip.image_features(batch.x, method.image_prompts[0])
    torch.testing.assert_close(method(batch.x), method.clip.logit_scale * images @ classes.T, rtol=1e-4, atol=1e-4)
