"""PEP-FedPT's weights and prototypes by hand, and what its prompts do and do not depend on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import EACH_ROUND, build, fit, learned
from torch import Tensor

from benchmark.contract import Stage
from benchmark.federation import Round, Terms, Uploads
from methods.prototypes import PrototypeRule, mixing_weights

FEW = ("--data.partition=federation.Few", "--data.clients_per_round=6")
COSINES = torch.tensor([[0.9, 0.7, 0.8]])
THERE = torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("prior", "tau", "expected"),
    [
        ((0.5, 0.5, 0.0), 0.1, (0.880797, 0.119203, 0.0)),
        ((0.8, 0.2, 0.0), 0.1, (0.967273, 0.032727, 0.0)),
        ((0.8, 0.2, 0.0), 1.0, (0.830094, 0.169906, 0.0)),
        ((1 / 3, 1 / 3, 1 / 3), 0.1, (0.665241, 0.090031, 0.244728)),
        ((0.8, 0.2, 0.0), 1e6, (0.8, 0.2, 0.0)),
        ((0.5, 0.5, 0.0), 1e-4, (1.0, 0.0, 0.0)),
    ],
)
def test_weights_by_hand(prior: tuple[float, ...], tau: float, expected: tuple[float, ...]) -> None:
    made = mixing_weights(COSINES, THERE, torch.tensor(prior), tau)
    torch.testing.assert_close(made, torch.tensor([expected]), atol=2e-6, rtol=0)


def test_without_prototypes_the_prior_mixes() -> None:
    prior = torch.tensor([0.7, 0.3, 0.0])
    torch.testing.assert_close(mixing_weights(COSINES, ~THERE, prior, 0.1), prior.unsqueeze(0))
    one = mixing_weights(COSINES, torch.tensor([True, False, True]), prior, 0.1)
    assert one.tolist() == [[1.0, 0.0, 0.0]], "a class without a prototype takes no part beside one that has some"


def uploads() -> tuple[dict[str, Tensor], Uploads]:
    sent = {
        "class_prompts": torch.tensor([[[[1.0]], [[5.0]], [[8.0]]], [[[4.0]], [[7.0]], [[8.0]]]]),
        "prototypes": torch.tensor([[[2.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [3.0, 0.0], [0.0, 0.0]]]),
        "prototype_counts": torch.tensor([[2.0, 0.0, 0.0], [1.0, 3.0, 0.0]]),
    }
    shared = {name: torch.zeros_like(rows[0]) for name, rows in sent.items()} | {"class_prompts": torch.ones(3, 1, 1)}
    return shared, Uploads((0, 1), sent, torch.tensor([2.0, 4.0], dtype=torch.float64))


@pytest.mark.parametrize(("average", "prompts"), [("fedavg", [3.0, 6.333333, 8.0]), ("by_count", [2.0, 7.0, 1.0])])
def test_prototypes_and_class_prompts_by_hand(average: Any, prompts: list[float]) -> None:
    shared, given = uploads()
    rule = PrototypeRule(average)
    rule.start(shared, Terms(0, 2, (0, 1), (), 2, 4, False, 4, 3, 4, 4))
    for _ in range(2):  # sums that are sent again count once
        made = rule.aggregate(Round(1, (0, 1), 0), shared, given)
        expected = F.normalize(torch.tensor([[2 / 3, 1 / 3], [1.0, 0.0], [0.0, 0.0]]), dim=-1)
        torch.testing.assert_close(made["prototypes"], expected)
        assert made["prototype_counts"].tolist() == [3.0, 3.0, 0.0]
        torch.testing.assert_close(made["class_prompts"].flatten(), torch.tensor(prompts))


def trained(*options: str, rounds: int = 2, **settings: Any) -> tuple[Any, Any]:
    method, data = build("PEPFedPT", *FEW, *(f"--model.init_args.{option}" for option in options))
    fit(method, data, rounds, settings=settings)
    return method, data


def test_prototypes_are_the_means_of_all_training_images() -> None:
    method, data = trained(rounds=1)
    rows = torch.cat([torch.from_numpy(data.splits.train[k]) for k in data.federation.terms.training_clients])
    query = F.normalize(method.backbone(data.transform(data.pool.images[rows], None)), dim=-1).detach()
    labels = data.pool.labels[rows]
    for c in labels.unique().tolist():
        expected = F.normalize(query[labels == c].sum(0), dim=0)
        torch.testing.assert_close(method.prototypes[c], expected, atol=1e-5, rtol=1e-4)
    again, _ = trained(rounds=2)
    torch.testing.assert_close(again.prototypes, method.prototypes), "all clients were seen"


def test_equal_class_prompts_make_the_weights_idle() -> None:
    scores = []
    for options in (("tau=0.1",), ("tau=10.0", "prior=uniform")):
        method, _ = trained(*options, rounds=1, **EACH_ROUND)
        values = learned(method)
        scores.append({n: v for n, v in values.items() if n.startswith("metric.0/")})
    assert scores[0]
    for name, value in scores[0].items():
        torch.testing.assert_close(value, scores[1][name], atol=1e-6, rtol=1e-5, equal_nan=True)


def test_a_class_that_no_client_holds_keeps_its_prompt() -> None:
    method, data = trained("class_average=by_count", rounds=1)
    start, _ = build("PEPFedPT", *FEW)
    held = data.federation.holdings.class_counts[list(data.federation.terms.training_clients)].sum(0) > 0
    moved = (method.class_prompts != start.class_prompts).flatten(1).any(1)
    assert not (moved & ~held).any()
    assert moved.any()
    assert method.roles.personal == ()


def test_a_block_that_the_tower_has_not_is_named_by_its_option() -> None:
    with pytest.raises(ValueError, match=r"PEPFedPT: mix_block=9, but the tower \(vit\) has 3 blocks; give 1 to 3"):
        build("PEPFedPT", *FEW, "--model.init_args.mix_block=9")


def test_shared_late_prompts_take_kept_tokens_and_give_the_same_numbers() -> None:
    kept, _ = trained("first_block=2", rounds=1)
    assert kept.inputs == ("features", "own_images")
    anew, data = build("PEPFedPT", *FEW, "--model.init_args.first_block=2", "--data.cache_features=false")
    fit(anew, data, 1)
    for name, value in learned(kept).items():
        torch.testing.assert_close(value, learned(anew)[name], equal_nan=True)
    x = torch.randn(3, 3, 32, 32)
    inputs = kept.frozen_features(x)
    mixed = kept.mixed(inputs["query"], torch.full((kept.num_classes,), 1 / kept.num_classes))
    late = kept.backbone.from_tokens(inputs["tokens"].float(), mixed, kept.shared_prompt, first_layer=1)
    torch.testing.assert_close(kept.head(late), kept(x), atol=5e-3, rtol=1e-2)


@pytest.mark.parametrize("first_block", [1, 2])
def test_kept_features_have_the_query_of_a_pass_from_the_images(first_block: int) -> None:
    method, _ = build("PEPFedPT", f"--model.init_args.first_block={first_block}", "--model.init_args.mix_block=2")
    backbone = method.backbone
    x = torch.randn(3, 3, *backbone.image_size, generator=torch.Generator().manual_seed(0))
    kept = method.frozen_features(x)
    assert torch.equal(kept["query"], F.normalize(backbone(x), dim=-1))
    assert kept.keys() == ({"query"} if first_block == 1 else {"query", "tokens"})


def test_a_client_without_images_has_a_uniform_prior() -> None:
    method, _ = build("PEPFedPT")
    for counts, prior in (([0] * 8, [1 / 8] * 8), ([3, 0, 1, 0, 0, 0, 0, 0], [3 / 4, 0, 1 / 4, 0, 0, 0, 0, 0])):
        client: Any = SimpleNamespace(class_counts=torch.tensor(counts))
        assert method.prepare(client, Stage.EVALUATE, "test")["prior"].tolist() == pytest.approx(prior)


def test_images_are_not_mixed_before_the_shared_prompts_stand() -> None:
    with pytest.raises(ValueError, match=r"mix_block must be first_block \(3\) or later; got 2"):
        build("PEPFedPT", *FEW, "--model.init_args.first_block=3")
