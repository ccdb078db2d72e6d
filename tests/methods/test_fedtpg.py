"""FedTPG: its network by torch's attention, what it reads, the plain mean, and contexts for names it has never read."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit, terms
from live_client import client_of, constructed, mini_batch
from text_prompts import BASE_TO_NOVEL
from torch_attention import attention_of, drawn

from benchmark.contract import Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads
from benchmark.privacy import UserLevelPrivacy
from methods.fedtpg import EqualMean
from methods.prompt_networks import ContextWriter

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def test_the_network_has_the_published_size_and_begins_as_torchs_attention() -> None:
    writer = ContextWriter(512, 512, 4)
    assert 4 * 512 + sum(value.numel() for value in writer.parameters()) == 4_206_080
    bound = (6 / 2048) ** 0.5
    for each in (writer.query, writer.key, writer.value):
        assert 0.99 * bound < each.weight.abs().max() <= bound
        assert not each.bias.any()
    assert 0.99 * 512**-0.5 < writer.out.weight.abs().max() <= 512**-0.5
    assert not writer.out.bias.any()
    assert 0.99 * 2048**-0.5 < writer.outer.weight.abs().max() <= 2048**-0.5


def test_attention_is_torchs() -> None:
    writer, queries, names = ContextWriter(8, 8, 2), drawn(3, 8, key="queries"), drawn(5, 8, key="names")
    attention = attention_of(writer, 8, 2)
    with torch.no_grad():
        known = writer.norm_key(names)
        absent = torch.tensor([False, True, False, False, True])
        x, _ = attention(writer.norm_query(queries), known, known, key_padding_mask=absent)
        value, gate = writer.inner(writer.norm(x)).chunk(2, -1)
        torch.testing.assert_close(writer(queries, names, ~absent), x + writer.outer(value * F.gelu(gate)))
        # Names that do not count are as good as not there, and their order says nothing.
        torch.testing.assert_close(
            writer(queries, names, ~absent), writer(queries, names[[3, 0, 2]], torch.ones(3) > 0)
        )


def test_features_of_another_width_than_tokens_are_projected() -> None:
    made = ContextWriter(6, 8, 2)(drawn(3, 8, key="queries"), drawn(5, 6, key="names"), torch.ones(5) > 0)
    assert made.shape == (3, 8)


def test_the_server_takes_the_plain_mean() -> None:
    rule = EqualMean()
    rule.start({"w": torch.zeros(1)}, terms(2))
    uploads = Uploads((0, 1), {"w": torch.tensor([[1.0], [4.0]])}, torch.tensor([1.0, 5.0]).double())
    assert rule.aggregate(Round(1, (0, 1), 0), {"w": torch.zeros(1)}, uploads)["w"].item() == 2.5
    late = replace(uploads, factors=torch.tensor([1.0, 0.5]).double())
    assert rule.aggregate(Round(1, (0, 1), 0), {"w": torch.zeros(1)}, late)["w"].item() == 2.0
    private = UserLevelPrivacy(clip=1e6, noise_multiplier=0.0, inner=EqualMean())
    with pytest.warns(UserWarning, match="nothing is private"):
        private.start({"w": torch.zeros(1)}, terms(2))
    clipped = replace(uploads, received={"w": torch.zeros(2, 1)})
    assert private.aggregate(Round(1, (0, 1), 0), {"w": torch.zeros(1)}, clipped)["w"].item() == 2.5
    assert isinstance(constructed("FedTPG").make_server(), EqualMean)
    assert not isinstance(constructed("FedTPG", average="images").make_server(), EqualMean)


def test_a_client_reads_and_tells_apart_its_own_classes_alone() -> None:
    own, counts = [0, 2, 4], torch.tensor([3, 0, 1, 0, 2, 0, 0, 0])
    found = {}
    for names in ("own", "all"):
        method, batch = constructed("FedTPG", names=names), mini_batch(constructed("FedTPG"))
        kept = torch.isin(batch.y, torch.tensor(own))
        client = replace(client_of(method), class_counts=counts)
        client = replace(client, prepared=method.prepare(client, Stage.TRAIN, "train"))
        found[names] = method.client_loss(client, replace(batch, y=batch.y.masked_fill(~kept, -100), mask=kept))
    # By hand: names of its own, a context for them, and labels among them.
    words = [f"class{c}" for c in own]
    context = method.writer(method.context, method.clip.text_features_of(words), torch.ones(3) > 0)
    text = method.clip.text_features(method.clip.class_prompts(words, method.num_context), context)
    logits = method.clip.logit_scale * batch.features["image"][kept] @ text.mT
    y = torch.tensor([own.index(label) for label in batch.y[kept].tolist()])
    torch.testing.assert_close(found["own"], F.cross_entropy(logits, y))
    text = method.text_features("train")  # of all, by a network that has read all
    logits = method.clip.logit_scale * batch.features["image"][kept] @ text.mT
    torch.testing.assert_close(found["all"], F.cross_entropy(logits, batch.y[kept]))
    assert found["all"] > found["own"]


def test_other_names_have_another_context_by_the_same_network() -> None:
    method, data = build("FedTPG", *BASE_TO_NOVEL)
    fit(method, data, 1)
    base, novel = (method.name_features(split) for split in ("base", "novel"))
    everyone = torch.ones(4) > 0
    with torch.no_grad():
        contexts = [method.writer(method.context, names, everyone) for names in (base, novel)]
        assert not torch.allclose(*contexts)
        expected = method.clip.text_features(method.class_prompts("novel"), contexts[1])
        torch.testing.assert_close(method.text_features("novel"), expected)


def test_heads_must_divide_a_token() -> None:
    with pytest.raises(ConfigurationError, match="FedTPG: heads=5 must divide the"):
        constructed("FedTPG", heads=5)
