"""FedMGP: the draw and the likeness by hand, slots in a round, and what it is with one group."""

import math
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit
from live_client import client_of, constructed, mini_batch
from text_prompts import open_clip_text, run

from benchmark.contract import Stage
from benchmark.engine.simulation import Simulation
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Parcel, Round
from benchmark.seeds import torch_generator
from methods.prompt_slots import drawn_groups, likeness, similarities

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")

PROMPTS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1 / math.sqrt(2), 1 / math.sqrt(2)]])
#: softmax of the cosines to (1, 0), which are 1, 0 and 0.707107
CHANCES = (0.473041, 0.174022, 0.352937)


def test_similarity_to_the_slots_by_hand() -> None:
    found = similarities(PROMPTS, torch.tensor([[2.0, 0.0], [-1.0, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0, 0.707107]), rtol=0, atol=1e-6)
    assert not similarities(PROMPTS, torch.zeros(2, 2)).any()
    torch.testing.assert_close(found.softmax(0), torch.tensor(CHANCES), rtol=0, atol=1e-6)


def test_draws_have_the_chances_of_one_after_the_other_without_replacement() -> None:
    scores = similarities(PROMPTS, torch.tensor([[1.0, 0.0]]))
    uniform = torch.rand(20000, 3, generator=torch_generator("draws"))
    drawn = torch.vmap(lambda u: drawn_groups(scores, u, 2))(uniform)
    for first, second in permutations(range(3), 2):
        chance = CHANCES[first] * CHANCES[second] / (1 - CHANCES[first])
        found = ((drawn[:, 0] == first) & (drawn[:, 1] == second)).double().mean().item()
        assert found == pytest.approx(chance, abs=0.012)
    assert ((drawn == 0).any(1)).double().mean().item() == pytest.approx(0.830722, abs=0.012)


@pytest.mark.parametrize(("scale", "first"), [(1e4, CHANCES), (1e-6, (1 / 3, 1 / 3, 1 / 3))])
def test_a_low_temperature_takes_the_likest_and_a_high_one_anyone(scale: float, first: tuple[float, ...]) -> None:
    scores = similarities(PROMPTS, torch.tensor([[1.0, 0.0]])) * scale
    uniform = torch.rand(6000, 3, generator=torch_generator("draws"))
    drawn = torch.vmap(lambda u: drawn_groups(scores, u, 1))(uniform)[:, 0]
    found = [float((drawn == group).double().mean()) for group in range(3)]
    assert found == pytest.approx([1.0, 0.0, 0.0] if scale > 1 else list(first), abs=0.025)


@pytest.mark.parametrize(("measure", "expected"), [("cos", 0.0), ("l1", -1.0), ("l2", -1.414214)])
def test_the_likeness_by_hand(measure: str, expected: float) -> None:
    apart = torch.eye(2)[:, None]
    assert likeness(apart, measure).item() == pytest.approx(expected, abs=1e-5)
    equal = torch.tensor([[1.0, 0.0]]).expand(3, 1, 2)
    assert likeness(equal, measure).item() == pytest.approx(1.0 if measure == "cos" else 0.0, abs=1e-3)
    assert likeness(apart[:1], measure).item() == 0.0


def written_out(method: Any, batch: Any) -> torch.Tensor:
    """The objective, group by group and pair by pair."""
    clip, names = method.clip, [f"of a class{c}" for c in range(8)]
    texts = [open_clip_text(clip, names, context) for context in method.context]
    images = [clip.image_features(batch.x, prompt) for prompt in method.image_prompts]
    pairs = [(0, 1), (0, 2), (1, 2)]
    losses = [F.cross_entropy(clip.logit_scale * f @ w.T, batch.y) for f, w in zip(images, texts, strict=True)]
    alike = [sum(float((each[i] * each[j]).sum(-1).mean()) for i, j in pairs) / 3 for each in (texts, images)]
    return sum(losses) / 3 + method.sign * method.diversity * sum(alike) / 2


@pytest.mark.parametrize("attract", [False, True])
def test_the_objective_written_out(attract: bool) -> None:
    method = constructed("FedMGP", attract=attract, diversity=2.0)
    batch = mini_batch(method, 0, 5)
    found = method.client_loss(client_of(method), batch)
    torch.testing.assert_close(found, written_out(method, batch), rtol=1e-4, atol=1e-4)


def test_one_group_has_the_plain_cross_entropy() -> None:
    method = constructed("FedMGP", groups=1, share=1)
    batch = mini_batch(method, 0, 5)
    images = method.clip.image_features(batch.x, method.image_prompts[0])
    logits = method.clip.logit_scale * images @ method.text_features("train")[0].T
    expected = F.cross_entropy(logits, batch.y)
    torch.testing.assert_close(method.client_loss(client_of(method), batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inference", ["average", "largest", "features"])
def test_a_client_classifies_with_its_groups_together(inference: str) -> None:
    method = constructed("FedMGP", inference=inference)
    batch = mini_batch(method, 0, 5)
    images = [method.clip.image_features(batch.x, prompt) for prompt in method.image_prompts]
    texts, scale = list(method.text_features("test")), method.clip.logit_scale
    single = torch.stack([scale * f @ w.T for f, w in zip(images, texts, strict=True)])
    expected = single.mean(0)
    if inference == "largest":
        expected = torch.stack([single[single[:, b].max(1).values.argmax(), b] for b in range(5)])
    if inference == "features":
        expected = scale * sum(images) @ sum(texts).T / 9
    found = method.client_logits(client_of(method, stage=Stage.EVALUATE), batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(method(batch.x), expected, rtol=1e-4, atol=1e-4)


def test_slots_are_put_where_the_groups_were_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Parcel, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    take = Simulation.take

    def noting(self: Simulation, parcel: Parcel, round: Round, answer: Broadcast) -> None:
        names = ("context", "image_prompts")
        before = {name: self.store.rows(name, parcel.clients, self.device).clone() for name in names}
        take(self, parcel, round, answer)
        asked.append((parcel, before, {n: self.store.rows(n, parcel.clients, self.device).clone() for n in names}))

    monkeypatch.setattr(Simulation, "take", noting)
    method, data = build("FedMGP", "--data.partition=federation.Few", "--data.clients_per_round=4")
    fit(method, data, 1, evaluate=False)
    rule, sizes = method.server.rule, method.simulation.holdings.train_sizes
    for name in ("context", "image_prompts"):
        total, weight, draws = 0.0, 0.0, set()
        for parcel, before, after in asked:
            for row, client in enumerate(parcel.clients):
                places = parcel.kept[name][row].tolist()
                draws.add(tuple(places))
                total = total + sizes[client] * before[name][row][places]
                weight += sizes[client]
                assert torch.equal(after[name][row][places], rule.slots[f"{name}_slots"])
                (other,) = {0, 1, 2} - set(places)
                assert torch.equal(after[name][row][other], before[name][row][other])
        torch.testing.assert_close(rule.slots[f"{name}_slots"], total / weight, rtol=1e-5, atol=1e-6)
        assert len(draws) > 1  # not all clients draw the same
    text, visual = (
        [tuple(p.kept[n][r].tolist()) for p, *_ in asked for r in range(len(p.clients))] for n in rule_names()
    )
    assert text != visual


def rule_names() -> tuple[str, str]:
    return "context", "image_prompts"


@pytest.mark.parametrize(
    ("select", "expected"),
    [("highest", [0, 2]), ("lowest", [1, 2]), ("fixed", [0, 1]), ("all", [0, 1, 2])],
)
def test_other_ways_to_select(select: str, expected: list[int]) -> None:
    method = constructed("FedMGP", select=select)
    assert method.chosen(PROMPTS, torch.tensor([[1.0, 0.0]]), {}, 0).tolist() == expected


def test_with_all_groups_in_their_order_it_is_fedavg_of_everything() -> None:
    method = run("FedMGP", "--model.init_args.select=all", "--data.clients_per_round=11", rounds=1)
    for name in rule_names():
        rows = method.store.all_rows(name)
        assert torch.equal(rows, rows[:1].expand_as(rows))


def test_with_one_group_and_no_visual_prompt_it_is_promptfl() -> None:
    """PromptFL whose prompts begin with the same words, and have "of a" before the name."""
    rate = ("--model.init_args.training={lr: 0.05, epochs: 1, momentum: 0.9}", "--data.clients_per_round=11")
    one = ("groups=1", "share=1", "num_visual=0", "init_words=null", "num_context=3")
    method = run("FedMGP", *(f"--model.init_args.{option}" for option in one), *rate)
    promptfl, data = build("PromptFL", *rate)
    start = build("FedMGP", *(f"--model.init_args.{option}" for option in one), *rate)[0].context[0]
    promptfl.context.data.copy_(start)
    fit(promptfl, data, 2)
    found = method.store.all_rows("context")[:, 0]
    torch.testing.assert_close(found, promptfl.context.expand_as(found), rtol=1e-4, atol=1e-5)


def test_what_is_sent_is_counted_by_when() -> None:
    method = run("FedMGP", rounds=2)
    floats = 2 * (2 * method.clip.text_width + method.clip.vision_width)
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["end_floats"] == floats
    assert 2 * (2 * 512 + 2 * 768) == 5120  # the published size


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"share": 4}, "share=4 of groups=3"),
        ({"init_words": "extraordinarily a"}, "must be one token each"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        constructed("FedMGP", **settings)
