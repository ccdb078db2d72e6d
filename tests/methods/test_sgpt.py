from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import SIZES, build, fit, learned, terms
from timm.models.vision_transformer import VisionTransformer

from benchmark.backbones.vit import PromptedViT
from benchmark.contract import Client, MiniBatch, Phase
from benchmark.engine.roles import names_under
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads, Values
from benchmark.seeds import keyed_initialization
from methods.prompt_groups import (
    GroupRule,
    key_similarity,
    majority,
    merge_keys,
    nearest_group,
    one_hot,
    orthonormal_keys,
    training_group,
)
from methods.sgpt import SGPT

MODEL = "--model.init_args."
SMALL = ["--data.partition.init_args.num_clients=4", "--data.clients_per_round=3", f"{MODEL}training.epochs=1"]
WIDTH, GROUPS = 16, 3


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tiny(**arguments: Any) -> SGPT:
    """SGPT with values that differ everywhere, on a ViT of five layers."""
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=WIDTH, depth=5, num_heads=2, num_classes=0)
    settings = {"shared_blocks": (0, 1), "group_blocks": (2, 4), "num_groups": GROUPS} | arguments
    method = SGPT(4, 2, PromptedViT(vit).eval(), **settings)
    for i, parameter in enumerate((method.shared_prompts, method.group_prompts.tokens, method.group_keys)):
        parameter.data = draw(*parameter.shape, seed=i + 1)
    return method


def shared_values(method: SGPT) -> Values:
    return {name: method.get_parameter(name).detach().clone() for name in names_under(method, method.shared)}


def first_tokens(method: SGPT, x: torch.Tensor) -> torch.Tensor:
    return method.backbone.tokens_before(x, method.first_layer)


def naive_features(vit: Any, x: torch.Tensor, tokens: dict[int, torch.Tensor], mean_over: int) -> torch.Tensor:
    """One image, block by block; token lists in Python."""
    rows = list(vit._pos_embed(vit.patch_embed(x[None]))[0])
    for i, block in enumerate(vit.blocks):
        if i in tokens:
            rows.insert(1, tokens[i])
        rows = list(block(torch.stack(rows)[None])[0])
    return vit.norm(torch.stack(rows))[:mean_over].mean(0)


# ---------------------------------------------------------------------- the selection module


def test_keys_are_gram_schmidt_of_xavier() -> None:
    torch.manual_seed(5)
    keys = orthonormal_keys(4, 10)
    with keyed_initialization("group keys"):
        drawn = torch.nn.init.xavier_uniform_(torch.empty(4, 10))
    expected: list[torch.Tensor] = []
    for row in drawn:
        rest = row - sum(((row @ k) * k for k in expected), torch.zeros(10))
        expected.append(rest / rest.norm())
    torch.testing.assert_close(keys, torch.stack(expected))
    torch.testing.assert_close(keys @ keys.T, torch.eye(4))


def test_a_keys_length_changes_its_gradient_and_no_similarity() -> None:
    """Show the effect of starting all keys with length 1, where the authors' first one is longer."""
    query, direction = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]])
    for length in (1.0, 2.0):
        key = (length * direction).requires_grad_()
        similarity = key_similarity(query, key)
        similarity.sum().backward()
        torch.testing.assert_close(similarity.detach(), torch.tensor([[0.6]]))
        # What of the query's direction stands upright on the key, divided by the key's length.
        torch.testing.assert_close(key.grad, torch.tensor([[0.0, 0.8]]) / length)


def test_groups_are_selected_by_distance_and_in_training_also_by_frequency() -> None:
    similarity = torch.tensor([[0.9, 0.5], [0.0, 0.8]])
    # 0.1 * 0.9005 > 0.5 * 0.1005; 1 * 0.9005 > 0.2 * 0.1005
    assert training_group(similarity, torch.tensor([0.9, 0.1])).tolist() == [1, 1]
    assert training_group(similarity, torch.zeros(2)).tolist() == [0, 1]
    assert nearest_group(similarity).tolist() == [0, 1]


def test_with_identical_keys_frequency_alone_decides() -> None:
    keys = draw(1, WIDTH).expand(4, -1).contiguous()
    similarity = key_similarity(draw(20, WIDTH, seed=1), keys)
    frequency = torch.tensor([0.4, 0.25, 0.05, 0.3])
    assert training_group(similarity, frequency).tolist() == [2] * 20


def test_the_majority_counts_images_only() -> None:
    chosen = one_hot(torch.tensor([2, 0, 0, 2, 1, 1, 1]), 3)
    mask = torch.tensor([True, True, True, True, True, False, False])
    assert majority(chosen, mask).argmax(1).tolist() == [0] * 7
    mask[1] = False
    assert majority(chosen, mask).argmax(1).tolist() == [2] * 7


def test_the_query_is_the_rectified_class_token_of_the_first_layers() -> None:
    x = draw(2, 3, 16, 16)
    for layers in (None, 3):
        method = tiny(query_blocks=layers)
        vit = method.backbone.vit
        tokens = vit._pos_embed(vit.patch_embed(x))
        for block in list(vit.blocks)[:layers]:
            tokens = block(tokens)
        torch.testing.assert_close(method.frozen_features(x)["query"], F.relu(vit.norm(tokens)[:, 0]))


# ---------------------------------------------------------------------- forward and loss


@pytest.mark.parametrize("layers", [1, 2, 3, None])
def test_kept_features_have_the_query_of_a_pass_from_the_images(layers: int | None) -> None:
    method = tiny(shared_blocks=(2,), group_blocks=(4,), query_blocks=layers)
    x = draw(3, 3, 16, 16)
    kept = method.frozen_features(x)
    assert torch.equal(kept["query"], method.backbone.grow(x, {}, layers)[:, 0].relu())
    assert torch.equal(kept["tokens"], first_tokens(method, x).half())


def test_tokens_stand_behind_the_class_token_and_are_never_removed() -> None:
    method, x = tiny(), draw(3, 3, 16, 16)
    vit, head = method.backbone.vit, method.head
    shared = dict(zip((0, 1), method.shared_prompts, strict=True))
    off = torch.stack([head(naive_features(vit, image, shared, 1)) for image in x])
    torch.testing.assert_close(method.logits(first_tokens(method, x)), off)
    groups = [2, 0, 1]
    on = [
        head(naive_features(vit, image, {**shared, 2: own[0], 4: own[1]}, 3))
        for image, own in zip(x, (method.group_prompts.tokens[:, g] for g in groups), strict=True)
    ]
    torch.testing.assert_close(
        method.logits(first_tokens(method, x), one_hot(torch.tensor(groups), GROUPS)), torch.stack(on)
    )


def test_with_the_selection_off_one_token_before_the_first_layer_is_vpt() -> None:
    method, x = tiny(shared_blocks=(0,)), draw(3, 3, 16, 16)
    torch.testing.assert_close(
        method.logits(first_tokens(method, x)), method.head(method.backbone(x, method.shared_prompts))
    )


def test_every_test_image_takes_its_nearest_group() -> None:
    method, x, query = tiny(query_blocks=2), draw(6, 3, 16, 16), draw(6, WIDTH, seed=4)
    cosine = [[F.cosine_similarity(q, key, 0).item() for key in method.group_keys] for q in query]
    groups = [row.index(max(row)) for row in cosine]
    assert len(set(groups)) > 1
    logits = method.logits(first_tokens(method, x), one_hot(torch.tensor(groups), GROUPS))
    torch.testing.assert_close(method.classify(first_tokens(method, x), query), logits)
    torch.testing.assert_close(method(x), method.classify(first_tokens(method, x), method.frozen_features(x)["query"]))


@pytest.mark.parametrize("batch_majority", [False, True])
def test_the_loss_of_both_stages(batch_majority: bool) -> None:
    method, x, query = tiny(batch_majority=batch_majority), draw(6, 3, 16, 16), draw(6, WIDTH, seed=4)
    y, mask = torch.tensor([0, 1, 2, 3, 0, -100]), torch.tensor([True] * 5 + [False])
    frequency = torch.tensor([0.3, 0.4, 0.3])
    received = {"group_frequency": frequency}
    client = Client({}, received, torch.zeros(4), Round(1, (), 0))
    first, nothing = method.client_loss(client, MiniBatch(x, y, mask, 0, features={"query": query}))
    torch.testing.assert_close(first, F.cross_entropy(method.logits(first_tokens(method, x[:5])), y[:5]))
    assert nothing["group_selections"].tolist() == [0.0] * GROUPS
    cosine = [[F.cosine_similarity(q, key, 0).item() for key in method.group_keys] for q in query]
    groups = [min(range(GROUPS), key=lambda g: (1 - row[g]) * (float(frequency[g]) + 5e-4)) for row in cosine]
    assert len(set(groups[:5])) > 1
    if batch_majority:
        groups = [max(range(GROUPS), key=lambda g: groups[:5].count(g))] * 6
    loss, totals = method.client_loss(client, MiniBatch(x, y, mask, 1, features={"query": query}))
    logits = method.logits(first_tokens(method, x), one_hot(torch.tensor(groups), GROUPS))
    agreement = sum(row[g] for row, g in zip(cosine[:5], groups[:5], strict=True)) / 5
    torch.testing.assert_close(loss, F.cross_entropy(logits[:5], y[:5]) - agreement)
    assert totals["group_selections"].tolist() == [groups[:5].count(g) for g in range(GROUPS)]


def test_tokens_in_late_blocks_take_kept_tokens_and_give_the_same_numbers() -> None:
    options = (*SMALL, f"{MODEL}shared_blocks=[1]")
    kept, data = build("SGPT", *options)
    assert kept.inputs == ("features",)
    fit(kept, data, 2)
    anew, data = build("SGPT", *options, "--data.cache_features=false")
    fit(anew, data, 2)
    for name, value in learned(kept).items():
        torch.testing.assert_close(value, learned(anew)[name], equal_nan=True)
    x = torch.randn(3, 3, 32, 32)
    inputs = kept.frozen_features(x)
    late = kept.classify(inputs["tokens"].float(), inputs["query"])
    torch.testing.assert_close(late, kept(x), atol=5e-3, rtol=1e-2)


def test_the_first_block_with_a_token_is_counted_from_the_towers_first() -> None:
    method, x = tiny(shared_blocks=(1,)), draw(3, 3, 16, 16)
    assert tiny().inputs == ("images", "features")
    assert (method.inputs, method.first_layer) == (("features",), 1)
    vit, shared = method.backbone.vit, {1: method.shared_prompts[0]}
    off = torch.stack([method.head(naive_features(vit, image, shared, 1)) for image in x])
    torch.testing.assert_close(method.logits(first_tokens(method, x)), off)
    torch.testing.assert_close(method.logits(method.frozen_features(x)["tokens"].float()), off, atol=5e-3, rtol=1e-2)


# ---------------------------------------------------------------------- the server


def naive_keys(keys: torch.Tensor, selections: torch.Tensor) -> torch.Tensor:
    merged = torch.zeros_like(keys[0])
    for g in range(keys.shape[1]):
        total = float(selections[:, g].sum())
        for k in range(len(keys)):
            merged[g] += keys[k, g] * (float(selections[k, g]) / total if total > 50 else 1 / len(keys))
    return merged


def test_keys_are_weighted_with_selections_unless_they_are_rare() -> None:
    selections = torch.tensor([[40.0, 30.0, 0.0], [20.0, 20.0, 0.0], [0.0, 0.0, 0.0], [60.0, 0.0, 0.0]])
    keys = draw(4, 3, 5)
    merged = merge_keys(keys, selections)
    torch.testing.assert_close(merged, naive_keys(keys, selections))
    torch.testing.assert_close(merged[0], (2 * keys[0, 0] + keys[1, 0] + 3 * keys[3, 0]) / 6)
    torch.testing.assert_close(merged[1], keys[:, 1].mean(0))
    assert torch.equal(merge_keys(keys[:1].expand(4, -1, -1), selections), keys[0])


@pytest.mark.parametrize(("prompt_momentum", "key_momentum"), [(0.5, 0.5), (0.25, 0.0), (1.0, 1.0)])
def test_a_round_of_the_server_against_a_plain_loop(prompt_momentum: float, key_momentum: float) -> None:
    method = tiny(prompt_momentum=prompt_momentum, key_momentum=key_momentum, head="global")
    old = shared_values(method)
    server = method.make_server()
    server.start(old, terms(2))
    weights = torch.tensor([5.0, 1.0, 2.0])
    selections = torch.tensor([[70.0, 0.0, 3.0], [10.0, 2.0, 9.0], [20.0, 60.0, 2.0]])
    updates: list[Values] = []
    for k in range(3):
        update = {n: draw(*value.shape, seed=10 * k + i) for i, (n, value) in enumerate(old.items())}
        updates.append(update | {"group_selections": selections[k]})
    uploads = Uploads((0, 1, 2), {n: torch.stack([u[n] for u in updates]) for n in updates[0]}, weights)
    assert sorted(old) == ["group_keys", "group_prompts.tokens", "head.bias", "head.weight", "shared_prompts"]
    new = server.aggregate(Round(1, (0, 1, 2), 0), old, uploads)
    assert new.keys() == old.keys()
    for name, before in old.items():
        mean = sum(u[name] * float(w) / 8 for u, w in zip(updates, weights, strict=True))
        if name == "group_prompts.tokens":
            mean = prompt_momentum * before + (1 - prompt_momentum) * mean
        if name == "group_keys":
            merged = naive_keys(torch.stack([u[name] for u in updates]), selections)
            mean = key_momentum * before + (1 - key_momentum) * merged
        torch.testing.assert_close(new[name], mean)
    if prompt_momentum == 1:
        assert torch.equal(new["group_prompts.tokens"], old["group_prompts.tokens"])
    sent = server.broadcast(Round(2, (0, 1), 0), new, (0, 1)).common["group_frequency"]
    torch.testing.assert_close(sent, torch.tensor([100.0, 62.0, 14.0]) / 176)


# ---------------------------------------------------------------------- rounds


def run(rounds: int, *overrides: str, phases: Any = None) -> tuple[Any, dict[int, Values], Values]:
    """A run; the uploads of its last round, and the initial shared values."""
    method, data = build("SGPT", *SMALL, *overrides)
    if phases is not None:
        method.local_phases = lambda made=method.local_phases: phases(made())
    start = shared_values(method)
    uploads: dict[int, Values] = {}
    rule = method.make_server()
    average = rule.aggregate

    def aggregate(round: Round, shared: Values, sent: Uploads) -> Values:
        uploads.update({c: {n: v[k].clone() for n, v in sent.values.items()} for k, c in enumerate(sent.clients)})
        return average(round, shared, sent)

    rule.aggregate = aggregate
    method.make_server = lambda: rule
    fit(method, data, rounds)
    return method, uploads, start


def only(stage: int) -> Any:
    def phases(made: list[Phase]) -> list[Phase]:
        return [Phase(p.groups, p.epochs if i == stage else 0, p.optimizer) for i, p in enumerate(made)]

    return phases


def test_the_first_stage_rests_group_prompts_and_keys_the_second_shared_prompts() -> None:
    group, shared = {"group_prompts.tokens", "group_keys"}, {"shared_prompts"}
    for stage, moved, resting in ((0, shared, group), (1, group, shared)):
        method, uploads, start = run(1, phases=only(stage))
        for upload in uploads.values():
            assert all(torch.equal(upload[name], start[name]) for name in resting)
            assert all(not torch.equal(upload[name], start[name]) for name in moved)
            assert (upload["group_selections"].sum() > 0) == (stage == 1)
        assert not torch.equal(method.store.all_rows("head.weight")[max(uploads)], method.head.weight)


def test_selections_of_the_second_stage_are_counted_and_bytes_are_too() -> None:
    method, uploads, start = run(1)
    for client, upload in uploads.items():
        assert upload["group_selections"].sum() == SIZES[client]
        assert set(upload) == {*start, "group_selections"}
    total = sum(upload["group_selections"] for upload in uploads.values())
    assert method.server.rule.selections.tolist() == total.tolist()
    sent = method.server.rule.broadcast(Round(2, (0,), 0), shared_values(method), (0,))
    torch.testing.assert_close(sent.common["group_frequency"], total / total.sum())
    floats = 64 * (2 + 2 * 5 + 5) + 5
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == floats


def test_a_prompt_momentum_of_one_freezes_the_group_prompts() -> None:
    method, _, start = run(2, f"{MODEL}prompt_momentum=1.0", f"{MODEL}key_momentum=1.0")
    assert torch.equal(method.get_parameter("group_prompts.tokens"), start["group_prompts.tokens"])
    assert torch.equal(method.get_parameter("group_keys"), start["group_keys"])
    assert not torch.equal(method.get_parameter("shared_prompts"), start["shared_prompts"])


def test_a_global_head_and_majorities_do_not_depend_on_the_clients_at_once() -> None:
    overrides = [f"{MODEL}head=global", f"{MODEL}batch_majority=true"]
    left, _, start = run(2, *overrides, "--data.clients_at_once=1")
    right, _, _ = run(2, *overrides, "--data.clients_at_once=3")
    assert {"head.weight", "head.bias"} <= set(start)
    assert left.roles.personal == ()
    for name, value in learned(left).items():
        torch.testing.assert_close(learned(right)[name], value, rtol=0, atol=0, equal_nan=True)


def test_new_clients_fit_their_head_in_the_second_stage() -> None:
    method, data = build("SGPT", *SMALL, "--data.new_clients=0.5", "--data.clients_per_round=2")
    phases: list[int] = []
    loss = method.client_loss

    def client_loss(client: Client, batch: MiniBatch) -> Any:
        if method.trainer.state.stage == "validate":
            phases.append(batch.phase)
        return loss(client, batch)

    method.client_loss = client_loss
    trainer = fit(method, data, 1)
    assert set(phases) == {1}
    fitted = trainer.callbacks[0].values[1, "server", "new", "accuracy"]
    assert (~fitted.isnan()).nonzero().flatten().tolist() == data.new_clients


def vit_b() -> PromptedViT:
    """The shapes of ViT-B/16 without its numbers."""
    with torch.device("meta"):
        return PromptedViT(VisionTransformer(num_classes=0))


def test_sizes_of_the_cifar100_setting() -> None:
    for head, more in (("personal", 0), ("global", 307_600)):
        method = SGPT(100, 4, vit_b(), head=head)  # type: ignore[arg-type]
        shared = shared_values(method)
        server = GroupRule(0.5, 0.5)
        server.start(shared, terms(2))
        sent = server.broadcast(Round(1, (0,), 0), shared, (0,)).common
        frequency = sent.pop("group_frequency")
        assert sum(v.numel() * v.element_size() for v in sent.values()) == 258_048 + more == 4 * 64_512 + more
        assert frequency.shape == (20,)
        assert not method.shared_prompts.any()
        assert 0.0624 < method.group_prompts.tokens.abs().max() <= 0.0625


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shared_blocks": (0, 3)}, r"must rise within 0 to 4, .* got \[0, 3\] and \[2, 4\]"),
        ({"group_blocks": (2, 5)}, r"must rise within 0 to 4"),
        ({"group_blocks": ()}, "with at least one each"),
        ({"num_groups": 17}, "num_groups must be from 1 to 16, since the keys start orthogonal; got 17"),
        ({"query_blocks": 6}, "query_blocks must be from 1 to 5, or null for all; got 6"),
        ({"key_momentum": 1.5}, "key_momentum: expected a number from 0 to 1, got 1.5"),
    ],
)
def test_what_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        tiny(**arguments)


def test_a_backbone_without_a_class_token_is_refused() -> None:
    vit = VisionTransformer(
        img_size=16, embed_dim=16, depth=5, num_heads=2, num_classes=0, class_token=False, global_pool="avg"
    )
    with pytest.raises(ConfigurationError, match="this backbone has none"):
        SGPT(4, 2, PromptedViT(vit), shared_blocks=(0,), group_blocks=(1,), num_groups=2)
