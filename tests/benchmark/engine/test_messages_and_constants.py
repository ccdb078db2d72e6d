"""Messages of a method's own, the server's answer that clients take, and what tells clients apart."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import build, fit, learned
from over_ranks import WholeStore, over_ranks
from torch import Tensor, nn

from benchmark.checks.methods import CHECKS, MethodUnderCheck
from benchmark.contract import Client, LocalTraining, Message, MiniBatch, Stage
from benchmark.engine.simulation import Simulation
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Parcel, Round, Terms, Uploads, Values
from benchmark.masked import cross_entropy
from benchmark.method import FederatedMethod
from benchmark.ranks.strategy import RanksStrategy
from benchmark.seeds import torch_generator
from benchmark.server import ServerRule, weighted_mean

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")

GROUPS, SENT, LONGEST = 4, 2, 5


def pooled(x: Tensor) -> Tensor:
    """Features [B, 12] of images [B, 3, H, W]."""
    return nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)


class SlotMean(ServerRule):
    """Keeps the mean of what clients send in each slot; sends it when a round begins and, new, when it ends."""

    def start(self, initial: Values, terms: Terms) -> None:
        super().start(initial, terms)
        self.register_buffer("slots", torch.zeros(SENT, 8, 12))

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        return Broadcast({"slots": self.slots.clone()})

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        assert set(uploads.values) == {"chosen groups"}
        self.slots = weighted_mean(uploads.values, uploads.weights)["chosen groups"]
        return {}

    def answer(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        return Broadcast({"slots": self.slots.clone()})


class Groups(FederatedMethod):
    """FedMGP's protocol with linear groups: a client sends those that it draws, and puts the slots' means there."""

    personal = ("groups",)

    def __init__(self) -> None:
        super().__init__(11)
        self.groups = nn.Parameter(torch.linspace(-0.1, 0.1, GROUPS * 8 * 12).view(GROUPS, 8, 12))
        self.training_settings = LocalTraining(lr=0.1, epochs=1)

    def forward(self, x: Tensor) -> Tensor:
        weights = 1.0 + torch.arange(GROUPS, device=x.device)
        return torch.einsum("g,gcf,bf->bc", weights, self.groups, pooled(x))

    def draw_noise(self, generator: torch.Generator, batch_size: int, stage: Stage) -> Values:
        drawn = torch.rand(GROUPS, generator=generator, device=generator.device)
        return {"uniform": drawn} if stage is Stage.MESSAGE else {}

    def message(self, client: Client, noise: Values) -> Message:
        likeness = torch.einsum("gcf,scf->gs", client.parameters["groups"], client.received["slots"]).amax(1)
        chosen = (likeness - torch.log(-torch.log(noise["uniform"]))).topk(SENT).indices
        return {"chosen groups": client.parameters["groups"][chosen]}, {"chosen": chosen}

    def take(self, client: Client, kept: Values) -> Values:
        groups = client.parameters["groups"]
        return {"groups": groups.index_copy(0, kept["chosen"], client.received["slots"])}

    def make_server(self) -> ServerRule:
        return SlotMean()


class Ragged(FederatedMethod):
    """FedPHA's ragged prompts: a linear layer [5, ...] of which a client has as many parts as its own constant says."""

    personal = ("parts",)

    def __init__(self) -> None:
        super().__init__(11)
        self.parts = nn.Parameter(torch.linspace(-0.1, 0.1, LONGEST * 8 * 12).view(LONGEST, 8, 12))
        self.training_settings = LocalTraining(lr=0.1, epochs=1)

    def client_constants(self, number: int, terms: Terms) -> Values:
        return {"length": torch.randint(1, LONGEST + 1, (), generator=torch_generator(terms.seed, "length", number))}

    def logits(self, client: Client, x: Tensor) -> Tensor:
        has = torch.arange(LONGEST, device=x.device) < client.constants["length"]
        return torch.einsum("p,pcf,bf->bc", has.to(x.dtype), self.parts, pooled(x))

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        return cross_entropy(self.logits(client, batch.x), batch.y, batch.mask)

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        return self.logits(client, batch.x)


def made(kind: type[Any], *options: str) -> tuple[Any, Any]:
    return kind(), build("FedAvg", *options)[1]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", [Groups, Ragged])
def test_the_contract_holds(kind: type[Any], check: Callable[[MethodUnderCheck], None]) -> None:
    check(MethodUnderCheck(partial(made, kind)))


def test_a_client_puts_the_answer_where_its_message_was_from(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Parcel, Tensor, Tensor]] = []
    take = Simulation.take

    def noting(self: Simulation, parcel: Parcel, round: Round, answer: Broadcast) -> None:
        before = self.store.rows("groups", parcel.clients, self.device)
        take(self, parcel, round, answer)
        asked.append((parcel, before, self.store.rows("groups", parcel.clients, self.device)))

    monkeypatch.setattr(Simulation, "take", noting)
    method, data = made(Groups)
    fit(method, data, 1)
    slots = method.server.rule.slots
    sizes = method.simulation.holdings.train_sizes
    total, weight = torch.zeros_like(slots), 0.0
    for parcel, before, after in asked:
        for row, client in enumerate(parcel.clients):
            chosen = parcel.kept["chosen"][row].tolist()
            assert torch.equal(parcel.values["chosen groups"][row], before[row][chosen])
            assert torch.equal(after[row][chosen], slots)
            others = [group for group in range(GROUPS) if group not in chosen]
            assert torch.equal(after[row][others], before[row][others])
            total, weight = total + sizes[client] * before[row][chosen], weight + sizes[client]
    torch.testing.assert_close(slots, total / weight)
    trained = [client for parcel, _, _ in asked for client in parcel.clients]
    resting = sorted(set(range(11)) - set(trained))
    assert len(trained) == 7
    assert torch.equal(method.store.all_rows("groups")[resting], method.groups.expand(4, *method.groups.shape))
    assert len({tuple(row.tolist()) for parcel, _, _ in asked for row in parcel.kept["chosen"]}) > 1


def test_bytes_of_messages_and_answers_are_counted_apart() -> None:
    method, data = made(Groups)
    fit(method, data, 2)
    slot_bytes = SENT * 8 * 12 * 4
    traffic = method.server.traffic
    assert traffic.rounds == [[7, 2 * 7 * slot_bytes, 7 * slot_bytes, 7 * slot_bytes // 2, 7 * slot_bytes // 4]] * 2
    assert traffic.ends == {1: [7 * slot_bytes, 7 * slot_bytes // 4], 2: [7 * slot_bytes, 7 * slot_bytes // 4]}
    assert traffic.per_client()["end_bytes"] == slot_bytes


@pytest.mark.parametrize("kind", [Groups, Ragged])
def test_the_number_of_ranks_changes_no_bit(kind: type[Any]) -> None:
    def work(strategy: RanksStrategy, count: int = 2) -> Any:
        whole = WholeStore()
        method, data = made(kind, "--data.clients_at_once=2", "--data.clients_per_round=5")
        fit(method, data, 2, [whole], settings={"devices": count, "strategy": strategy})
        return learned(method) | whole.rows, method.server.traffic.rounds, method.server.traffic.ends

    expected = work(RanksStrategy(), count=1)
    first, second = over_ranks(2, work)
    assert isinstance(first, tuple), first
    assert first[1:] == second[1:] == expected[1:]
    for name, value in first[0].items():
        assert torch.equal(value.nan_to_num(7), expected[0][name].nan_to_num(7)), name


def test_a_resumed_run_counts_answers_on(tmp_path: Path) -> None:
    whole, data = made(Groups)
    fit(whole, data, 3)
    fit(*made(Groups), 1, save_to=tmp_path)
    resumed, data = made(Groups)
    fit(resumed, data, 3, ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"))
    assert resumed.server.traffic.state_dict() == whole.server.traffic.state_dict()
    assert torch.equal(resumed.store.all_rows("groups"), whole.store.all_rows("groups"))


def test_clients_have_the_parts_that_their_constant_says() -> None:
    method, data = made(Ragged, "--data.clients_per_round=null", "--data.participation=1.0")
    fit(method, data, 1)
    rows = method.store.all_rows("parts")
    moved = (rows != method.parts).flatten(2).any(2)
    lengths = [int(method.client_constants(client, method.simulation.terms)["length"]) for client in range(11)]
    assert moved.sum(1).tolist() == lengths
    assert all(moved[client, :length].all() for client, length in enumerate(lengths))
    assert len(set(lengths)) > 1
    assert method.server.traffic.rounds == [[11, 0, 0, 0, 0]]


class Leaks(Groups):
    def message(self, client: Client, noise: Values) -> Message:
        return {"groups": client.parameters["groups"]}


class LeavesOut(Groups):
    shared = ("groups",)
    personal = ()

    def message(self, client: Client, noise: Values) -> Message:
        return {"half": client.parameters["groups"][:1]}

    def make_server(self) -> ServerRule:
        return ServerRule()


class TakesAnother(Groups):
    def take(self, client: Client, kept: Values) -> Values:
        return {"groups": client.received["slots"]}


class TakesNoNumber(Groups):
    def take(self, client: Client, kept: Values) -> Values:
        return {"groups": client.parameters["groups"] / 0}


class SaysNothing(Groups):
    def message(self, client: Client, noise: Values) -> Any:
        return [client.parameters["groups"]]


class Unequal(Ragged):
    def client_constants(self, number: int, terms: Terms) -> Values:
        return {"length": torch.tensor(1), "own": torch.zeros(number)}


MISTAKES = [
    (Leaks, "Leaks.message gives 'groups', which is personal; name it in uploads, or send less"),
    (
        LeavesOut,
        "LeavesOut.message leaves out 'groups', of which ServerRule takes the mean; send it, or have make_server",
    ),
    (TakesAnother, r"TakesAnother.take gives 'groups' of shape \(2, 8, 12\); expected \(4, 8, 12\)"),
    (TakesNoNumber, "TakesNoNumber.take gives 'groups' with numbers that are not finite"),
    (SaysNothing, "SaysNothing.message must return a dict of tensors; it returns list"),
    (Unequal, r"Unequal.client_constants gives client \d+ {'length': .* expected the same names and shapes for all"),
]


@pytest.mark.parametrize(("kind", "said"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_is_named_in_one_line(kind: type[Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as error:
        fit(*made(kind), 1)
    assert "\n" not in str(error.value)


def test_a_method_that_takes_an_answer_is_not_scored_as_training_left_it() -> None:
    method, data = made(Groups, "--data.evaluate_local=true")
    with pytest.raises(ConfigurationError, match=r"Groups.take changes personal parameters .* data.evaluate_local to"):
        fit(method, data, 1)
