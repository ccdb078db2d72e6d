"""FedMVP: sentences and attention by hand, whose order counts for nothing, and what it is without its network."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_client import client_of, constructed, mini_batch
from text_prompts import run
from torch_attention import attention_of, drawn

from benchmark.contract import Stage
from benchmark.errors import ConfigurationError
from methods.fedmvp import sentence
from methods.prompt_networks import PromptFormer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")

DESCRIBED = {f"class{c}": [f"a mark of kind {c}", f"often {c} lines"] for c in range(8)}


@pytest.mark.parametrize(
    ("descriptor", "expected"),
    [
        ("a long neck", "a photo of a big cat, which is a long neck"),
        ("often grey", "a photo of a big cat, which often grey"),
        ("used to dig", "a photo of a big cat, which is used to dig"),
        ("long whiskers", "a photo of a big cat, which has long whiskers"),
        ("animal ears", "a photo of a big cat, which has animal ears"),
    ],
)
def test_a_sentence_links_a_descriptor_by_its_first_word(descriptor: str, expected: str) -> None:
    assert sentence("a photo of a", "big_cat", "", descriptor) == expected


def test_the_network_has_the_published_size() -> None:
    former = PromptFormer(512, 768, 4, 4)
    assert sum(value.numel() for value in former.parameters()) == 9_845_760


def test_attention_is_torchs() -> None:
    former, patches, context = PromptFormer(6, 8, 2, 2), drawn(3, 4, 8, key="patches"), drawn(5, 6, key="context")
    attention = attention_of(former, 8, 2)
    with torch.no_grad():
        mapped = former.text_map(context).expand(3, -1, -1)
        x, _ = attention(former.norm_query(patches), former.norm_key(mapped), mapped)
        value, gate = former.inner(former.norm(x)).chunk(2, -1)
        p = x + former.outer(value * F.gelu(gate))
        expected = torch.stack([p[:, :2].mean(1), p[:, 2:].mean(1)], dim=1)
        found = former(patches, context, torch.ones(5, dtype=torch.bool))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_descriptions_are_a_set_and_absent_ones_are_not_seen() -> None:
    former, patches, context = PromptFormer(6, 8, 2, 2), drawn(3, 4, 8, key="patches"), drawn(5, 6, key="context")
    there = torch.tensor([True, False, True, True, False])
    found = former(patches, context, there)
    order = torch.tensor([3, 0, 4, 2, 1])
    torch.testing.assert_close(former(patches, context[order], there[order]), found, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(former(patches, context[there], there[there]), found, rtol=1e-5, atol=1e-6)
    changed = torch.where(there[:, None], context, context + 7)
    assert torch.equal(former(patches, changed, there), found)


def test_equal_descriptions_make_equal_tokens() -> None:
    former = PromptFormer(6, 8, 2, 2)
    found = former(drawn(3, 4, 8, key="patches"), drawn(1, 6, key="context").expand(5, -1), torch.ones(5).bool())
    torch.testing.assert_close(found, found[:1, :1].expand_as(found), rtol=1e-5, atol=1e-6)


def test_a_class_is_scored_by_the_mean_over_its_descriptions() -> None:
    method = constructed("FedMVP", attributes=DESCRIBED)
    links = ("which is a mark of kind {}", "which often {} lines")
    sentences = [[f"a photo of a class{c}, {link.format(c)}" for link in links] for c in range(8)]
    texts = method.clip.text_features_of([text for own in sentences for text in own])
    torch.testing.assert_close(method.descriptions("test").flatten(0, 1), texts, rtol=1e-5, atol=1e-5)
    client, batch = client_of(method, stage=Stage.EVALUATE), mini_batch(method, 0, 3)
    features = method.prompted_features(batch.x, method.descriptions("test"), torch.ones(8).bool())
    by_sentence = (method.clip.logit_scale * features @ texts.T).unflatten(1, (8, 2)).mean(2)
    torch.testing.assert_close(method.client_logits(client, batch), by_sentence, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(method(batch.x), by_sentence, rtol=1e-4, atol=1e-4)


def with_noise(batch: Any, mirror: list[bool]) -> Any:
    return replace(batch, noise={"mirror": torch.tensor(mirror)})


def test_the_objective_written_out() -> None:
    method = constructed("FedMVP", attributes=DESCRIBED, alpha=3.0)
    client = client_of(method)
    batch = with_noise(mini_batch(method, 0, 3), [True, False, True])
    features = client.prepared["descriptions"]
    images = method.prompted_features(batch.x, features, client.prepared["held"])
    seen = torch.stack([batch.x[0].flip(-1), batch.x[1], batch.x[2].flip(-1)])
    frozen = method.clip.image_features(seen)
    logits = method.clip.logit_scale * images @ features.mean(1).T
    far = sum(1 - float(a @ b) for a, b in zip(images, frozen, strict=True)) / 3
    expected = F.cross_entropy(logits, batch.y) + 3 * far
    torch.testing.assert_close(method.client_loss(client, batch), expected, rtol=1e-4, atol=1e-4)
    method.alpha = 0.0
    assert 0 <= far <= 2
    torch.testing.assert_close(method.client_loss(client, batch), expected - 3 * far, rtol=1e-4, atol=1e-4)


def test_in_training_patches_attend_to_the_classes_that_a_client_holds() -> None:
    method = constructed("FedMVP")
    client = replace(client_of(method), class_counts=torch.tensor([3, 0, 1, 0, 0, 0, 0, 2]))
    assert method.prepare(client, Stage.TRAIN, "train")["held"].nonzero().flatten().tolist() == [0, 2, 7]
    assert method.prepare(client, Stage.EVALUATE, "test")["held"].all()
    method.set_label_spaces({"train": (2, 5, 7)})
    assert method.prepare(client, Stage.TRAIN, "train")["held"].tolist() == [True, False, True]


def test_without_prompts_it_is_zero_shot_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    method = constructed("FedMVP")
    monkeypatch.setattr(PromptFormer, "forward", lambda self, patches, *_: patches[:, :0])
    batch = mini_batch(method, 0, 4)
    texts = method.clip.text_features_of([f"a photo of a class{c}." for c in range(8)])
    expected = method.clip.logit_scale * method.clip.image_features(batch.x) @ texts.T
    torch.testing.assert_close(method(batch.x), expected, rtol=1e-5, atol=1e-4)


def test_patches_are_what_open_clip_embeds() -> None:
    method = constructed("FedMVP")
    visual, x = method.clip.model.visual, mini_batch(method, 0, 2).x
    seen: list[torch.Tensor] = []
    visual.ln_pre.register_forward_hook(lambda module, given, made: seen.append(given[0]))
    visual._embeds(x)
    torch.testing.assert_close(method.clip.patch_embeddings(x), seen[0][:, 1:], rtol=1e-5, atol=1e-6)


def test_the_network_alone_is_sent() -> None:
    method = run("FedMVP")
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == sum(value.numel() for value in method.former.parameters())


# --- the second phase ---


def with_maps(key: str = "maps") -> PromptFormer:
    """A network whose maps do something."""
    former = PromptFormer(6, 8, 2, 2, rank=3)
    with torch.no_grad():
        for name, value in former.low_rank.items():
            value.copy_(0.5 * drawn(*value.shape, key=key + name))
    return former


def folded(former: PromptFormer) -> PromptFormer:
    """The same network without maps: ``W (x + x A B)`` is ``(W (I + A B)^T) x``."""
    made = PromptFormer(*(former.text_map.in_features, former.text_map.out_features), former.heads, former.num_prompts)
    made.load_state_dict({n: v for n, v in former.state_dict().items() if not n.startswith("low_rank.")})
    with torch.no_grad():
        for of in ("query", "key", "value"):
            whole = torch.eye(made.query.in_features) + former.low_rank[f"{of}_a"] @ former.low_rank[f"{of}_b"]
            weight = getattr(made, of).weight
            weight.copy_(torch.stack([whole @ row for row in weight]))
    return made


def test_the_maps_have_the_published_size_and_begin_without_effect() -> None:
    former = PromptFormer(512, 768, 4, 4, rank=8)
    assert sum(value.numel() for value in former.low_rank.parameters()) == 36_864
    assert sum(value.numel() for value in former.parameters()) == 9_882_624
    assert 0.019 < float(former.low_rank["key_a"].std()) < 0.021
    small, patches, context = PromptFormer(6, 8, 2, 2, rank=3), drawn(3, 4, 8, key="p"), drawn(5, 6, key="c")
    there = torch.ones(5, dtype=torch.bool)
    assert torch.equal(small(patches, context, there), folded(small)(patches, context, there))


def test_maps_stand_before_query_key_and_value() -> None:
    former, patches, context = with_maps(), drawn(3, 4, 8, key="patches"), drawn(5, 6, key="context")
    there = torch.tensor([True, True, False, True, True])
    found = former(patches, context, there)
    torch.testing.assert_close(found, folded(former)(patches, context, there), rtol=1e-4, atol=1e-5)
    for of in ("query", "key", "value"):
        kept = former.low_rank[f"{of}_b"].detach().clone()
        with torch.no_grad():
            former.low_rank[f"{of}_b"].zero_()
            assert not torch.allclose(former(patches, context, there), found, atol=1e-3), of
            former.low_rank[f"{of}_b"].copy_(kept)


def test_the_second_phase_has_the_objective_of_maps_added_to_the_weights() -> None:
    method = constructed("FedMVP", attributes=DESCRIBED, alpha=3.0, network_rounds=1, rank=3)
    with torch.no_grad():
        for name, value in method.former.low_rank.items():
            value.copy_(0.3 * drawn(*value.shape, key=name))
    client, batch = client_of(method), with_noise(mini_batch(method, 0, 3), [True, False, True])
    found = method.client_loss(client, batch)
    method.former = folded(method.former)
    torch.testing.assert_close(method.client_loss(client, batch), found, rtol=1e-4, atol=1e-4)


def of_network(method: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in method.simulation.shared().items() if ".low_rank." not in name}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def test_without_rounds_of_the_second_phase_it_is_the_method_of_one_phase() -> None:
    assert_same(of_network(run("FedMVP", "--model.init_args.network_rounds=2")), of_network(run("FedMVP")))


def test_the_second_phase_trains_of_the_network_the_map_of_descriptions_alone() -> None:
    method = run("FedMVP", "--model.init_args.network_rounds=2", rounds=3)
    before, after = of_network(run("FedMVP")), of_network(method)
    assert {name for name, value in after.items() if not torch.equal(value, before[name])} == {
        "former.text_map.weight",
        "former.text_map.bias",
    }
    assert all(method.former.low_rank[f"{of}_b"].any() for of in ("query", "key", "value"))
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == sum(value.numel() for value in method.former.parameters())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_prompts": 5}, "num_prompts=5 must divide the 16 patches"),
        ({"attributes": {"class0": ["a"]}}, "attributes has no 'class1'"),
        ({"attributes": DESCRIBED | {"class4": ["one"]}}, "give every class as many, at least one"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        constructed("FedMVP", **settings)


def test_a_rank_without_a_second_phase_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="rank=3 is of the second phase, which begins after network_rounds"):
        constructed("FedMVP", attributes=DESCRIBED, rank=3)
