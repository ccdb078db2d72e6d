"""pFedPrompt against PromptFL and against plain loops, and the memory that the engine gives it."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import SIZES, build, fit, learned
from torch import Tensor

from benchmark.contract import Client
from benchmark.errors import ConfigurationError
from benchmark.federation import Round
from methods import PFedPrompt
from methods.attention import memory_attention, spatial_attention


def as_promptfl(*overrides: str) -> tuple[Any, Any]:
    """PromptFL with the settings of PFedPrompt's tiny configuration."""
    return build("PromptFL", "--model.init_args.num_context=3", *overrides)


def unit(*shape: int, seed: int = 0) -> Tensor:
    """Random vectors of length 1."""
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


# ---------------------------------------------------------------- the two attentions


def test_memory_attention_by_hand() -> None:
    keys, values = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]), torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 0]])
    votes = memory_attention(torch.tensor([[1.0, 0.0]]), keys, values, beta=2.0)
    expected = [1.0, math.exp(-2 * 0.4) + math.exp(-2 * 1.0), 0.0]
    assert votes[0].tolist() == pytest.approx(expected)


def test_a_class_that_is_not_in_the_memory_gets_no_vote() -> None:
    values = F.one_hot(torch.tensor([2, 2, 4, 0]), 6).float() * torch.tensor([1.0, 1, 1, 0])[:, None]
    votes = memory_attention(unit(7, 5), unit(4, 5, seed=1), values, beta=1.0)
    assert (votes[:, [0, 1, 3, 5]] == 0).all()
    assert (votes[:, [2, 4]] > 0).all()


def test_a_large_beta_leaves_the_vote_of_the_nearest() -> None:
    f, keys = unit(20, 3).double(), unit(9, 3, seed=1).double()
    label = torch.arange(9) % 4
    votes = memory_attention(f, keys, F.one_hot(label, 4).double(), beta=400.0)
    distance = 1 - f @ keys.T
    nearest = distance.argmin(dim=1)
    assert torch.equal(votes.argmax(dim=1), label[nearest])
    torch.testing.assert_close(votes.amax(dim=1).log() / -400, distance.amin(dim=1), rtol=0, atol=3e-3)


def test_spatial_attention_agrees_with_loops() -> None:
    f, positions, classes = unit(3, 5), unit(3, 4, 5, seed=1), unit(6, 5, seed=2)
    to_classes, to_image = spatial_attention(f, positions, classes)
    for b in range(3):
        scores = [[2 * (positions[b, m] @ classes[c]).item() for c in range(6)] for m in range(4)]
        over_classes = torch.zeros(4, 5)
        for m in range(4):
            total = sum(math.exp(s) for s in scores[m])
            over_classes[m] = sum(math.exp(scores[m][c]) / total * classes[c] for c in range(6))
        attended = over_classes.mean(0) + over_classes.max(0).values
        for c in range(6):
            total = sum(math.exp(scores[m][c]) for m in range(4))
            seen = sum(math.exp(scores[m][c]) / total * positions[b, m] for m in range(4))
            assert to_classes[b, c].item() == pytest.approx((f[b] @ seen).item(), abs=1e-6)
            assert to_image[b, c].item() == pytest.approx((attended @ classes[c]).item(), abs=1e-6)


# ---------------------------------------------------------------- the method


@pytest.mark.parametrize(
    "lfa",
    [
        ["--model.init_args.alpha=0"],
        ["--model.init_args.lfa=spatial", "--model.init_args.b2=0", "--model.init_args.b3=0"],
    ],
)
def test_without_the_attention_it_is_promptfl_and_sends_what_promptfl_sends(lfa: list[str]) -> None:
    runs = []
    for method, data in (as_promptfl(), build("PFedPrompt", *lfa), build("PFedPrompt")):
        fit(method, data, 2)
        runs.append((learned(method), method.server.traffic.rounds, method.roles.shared))
    (plain, sent, names), (without, *_), (with_it, *own) = runs
    assert plain.keys() == without.keys() == with_it.keys()
    for name, value in plain.items():
        exact = lfa[0].endswith("alpha=0")
        torch.testing.assert_close(
            value, without[name], rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4, equal_nan=True
        )
    assert torch.equal(plain["context"], with_it["context"]), "in training it is off"
    assert own == [sent, names]
    assert any(
        n.startswith("metric") and not torch.equal(v.nan_to_num(), with_it[n].nan_to_num()) for n, v in plain.items()
    )


@pytest.mark.parametrize("overrides", [[], ["--data.cache_features=false"], ["--data.transform.augment=clip"]])
def test_the_evaluation_agrees_with_a_loop_over_clients(overrides: list[str]) -> None:
    method, data = build("PFedPrompt", *overrides, "--data.clients_at_once=4")
    trainer = fit(method, data, 1)
    losses = trainer.callbacks[0].values[1, "server", "test", "loss"]
    clip, text = method.clip, method.text_features("test")
    images, labels = data.transform(data.pool.images, None), data.pool.labels
    for client in range(11):
        own = data.splits.train[client]
        keys = clip.image_features(images[own])
        rows = data.splits.test[client]
        f = clip.image_features(images[rows])
        logits = clip.logit_scale * f @ text.T
        for b in range(len(rows)):
            for i, row in enumerate(own):
                logits[b, labels[row]] += 2.0 * math.exp(-3.0 * (1 - (f[b] @ keys[i]).item()))
        expected = F.cross_entropy(logits, labels[rows]).item()
        assert losses[client].item() == pytest.approx(expected, rel=1e-3), client


def test_the_memory_is_every_clients_own_training_images_without_augmentation() -> None:
    method, data = build("PFedPrompt", "--data.transform.augment=clip")
    fit(method, data, 0)
    memory = method.simulation.images.own_images([7, 8, 0])
    assert memory["image"].shape == (3, 10, 64)
    assert memory["mask"].sum(1).tolist() == [SIZES[7], SIZES[8], SIZES[0]] == [10, 1, 5]
    for k, client in enumerate((7, 8, 0)):
        rows = data.splits.train[client]
        plain = method.clip.image_features(data.transform(data.pool.images[rows], None))
        torch.testing.assert_close(memory["image"][k][memory["mask"][k]], plain, rtol=1e-4, atol=1e-5)
        assert torch.equal(memory["label"][k][memory["mask"][k]], data.pool.labels[rows])


def test_votes_count_within_the_label_space_of_the_split() -> None:
    method, _ = build("PFedPrompt")
    method.set_label_spaces({"novel": (7, 1, 5)})
    memory = {"label": torch.tensor([1, 5, 0, 7]), "mask": torch.tensor([True, True, True, False])}
    client = Client({}, {}, torch.zeros(8), Round(1, (), 0), own_images=memory)
    assert method.memory_values(client, "novel").tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert method.memory_values(client, "test").argmax(1).tolist() == [1, 5, 0, 0]


def test_lfa_in_train_changes_what_is_learned_and_nothing_that_is_sent() -> None:
    contexts, sent = [], []
    for flag in ("false", "true"):
        method, data = build("PFedPrompt", f"--model.init_args.lfa_in_train={flag}")
        fit(method, data, 1)
        contexts.append(method.get_parameter("context"))
        sent.append(method.server.traffic.rounds)
    assert not torch.equal(*contexts)
    assert sent[0] == sent[1]


def test_only_methods_that_ask_have_a_memory_and_unknown_forms_are_refused() -> None:
    method, _ = build("PFedPrompt", "--model.init_args.lfa=spatial")
    assert "own_images" not in method.inputs
    with pytest.raises(ConfigurationError, match="lfa: expected memory or spatial, got both"):
        PFedPrompt(2, ["a"], method.clip, lfa="both")  # type: ignore[arg-type]
