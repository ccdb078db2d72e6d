"""Delivery between clients and a server's rule: which clients train and send, and which uploads arrive when."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fedprompt
import pytest
import torch
from federation import build, fit, learned
from over_ranks import WholeStore, over_ranks
from torch import Tensor

from benchmark.delivery import Delivery, Departure
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.faults import Dropouts
from benchmark.federation import Facts, Parcel, Round, Terms, Uploads, Values
from benchmark.ranks.strategy import RanksStrategy
from benchmark.server import ServerRule, WrappedRule

POINTS = ("before_download", "after_download", "after_training")


class OneLate(Delivery):
    """The last client's upload comes a round later, from where the server is by then; its client keeps its weight."""

    def start(self, terms: Terms) -> None:
        super().start(terms)
        self.waiting: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.waiting)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.waiting = dict(state)

    def arrive(self, round: Round, sent: Uploads) -> Uploads:
        now, late = sent.of(range(len(sent.clients) - 1)), sent.of([len(sent.clients) - 1])
        before, self.waiting = self.waiting, {"client": late.clients[0], **late.updates()}
        if not before or before["client"] in now.clients:
            return now
        at = sum(client < before["client"] for client in now.clients)

        def with_row(rows: Tensor, row: Tensor) -> Tensor:
            return torch.cat([rows[:at], row, rows[at:]])

        return Uploads(
            (*now.clients[:at], before["client"], *now.clients[at:]),
            {n: with_row(rows, sent.received[n][:1] + before[n]) for n, rows in now.values.items()},
            with_row(now.weights, torch.ones(1, dtype=torch.float64)),
            {n: with_row(rows, sent.received[n][:1]) for n, rows in now.received.items()},
            with_row(now.started, torch.tensor([round.number - 1])),
        )


def run(conf: str, delivery: Delivery | None, rounds: int = 2, rule: ServerRule | None = None) -> Any:
    method, data = build(conf)
    fit(method, data, rounds, [Server(rule or method.make_server(), delivery)])
    return method


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("conf", ["FedPer", "PFedPG"])
def test_nobody_who_drops_out_leaves_the_run_as_it_is(conf: str, point: str) -> None:
    plain, made = run(conf, None), run(conf, Dropouts(0.0, point=point))
    expected = learned(plain)
    for name, value in learned(made).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, equal_nan=True)
    assert made.server.traffic.rounds == plain.server.traffic.rounds
    assert made.server.facts == {"dropped_out": {1: 0.0, 2: 0.0}}


@pytest.mark.parametrize("point", POINTS)
def test_a_round_in_which_nothing_arrives_is_void(point: str) -> None:
    start = run("FedPer", None, rounds=0)
    with pytest.warns(UserWarning, match="round 1 is void: n"):
        made = run("FedPer", Dropouts(1.0, point=point))
    for name in made.roles.shared:
        assert torch.equal(made.get_parameter(name), start.get_parameter(name))
    assert made.server.facts["void"] == {1: 1.0, 2: 1.0}
    assert made.server.finished_rounds == 2
    counted = [(row[1] > 0, row[2] > 0) for row in made.server.traffic.rounds]
    assert counted == [(point != "before_download", False)] * 2, "bytes down, bytes up"
    own, before = made.store.all_rows(made.roles.personal[0]), start.store.all_rows(start.roles.personal[0])
    assert torch.equal(own, before) is (point != "after_training"), "who trains keeps what it has learned"


@pytest.mark.parametrize("point", POINTS)
def test_a_client_that_drops_out_changes_nothing_for_the_others(point: str) -> None:
    seen: list[Uploads] = []

    class Noting(ServerRule):
        def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
            seen.append(uploads)
            return super().aggregate(round, shared, uploads)

    plain, made = run("FedPer", None, 1, Noting()), run("FedPer", Dropouts(0.4, point=point), 1, Noting())
    every, some = seen
    assert set(some.clients) < set(every.clients)
    places = [every.clients.index(client) for client in some.clients]
    for name, value in some.values.items():
        assert torch.equal(value, every.values[name][places])
    shared = {name: plain.server.rule.terms and value for name, value in some.received.items()}
    assert all(torch.equal(rows[0], rows[-1]) for rows in shared.values())
    assert made.server.facts["dropped_out"][1] == len(every.clients) - len(some.clients)
    trained = made.store.all_rows("participated").bool()
    assert trained.sum() == (len(every.clients) if point == "after_training" else len(some.clients))


def test_late_uploads_join_from_where_the_server_is_and_survive_a_resume(tmp_path: Path) -> None:
    method = run("FedAvg", OneLate(), 4)
    half, data = build("FedAvg")
    fit(half, data, 2, [Server(half.make_server(), OneLate())], save_to=tmp_path)
    again, data = build("FedAvg")
    fit(again, data, 4, [Server(again.make_server(), OneLate())], str(tmp_path / "checkpoints/last.ckpt"), tmp_path)
    expected = learned(method)
    assert not torch.equal(expected["head.weight"], learned(run("FedAvg", None, 4))["head.weight"])
    for name, value in learned(again).items():
        if not name.startswith("metric."):
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0, equal_nan=True)


#: Three cohorts of two clients at most, or of five in a round.
FEW = ("--data.clients_at_once=2", "--data.partition.init_args.num_clients=7", "--data.clients_per_round=5")


@pytest.mark.parametrize(
    "delivery", [lambda: Dropouts(0.4), lambda: Dropouts(0.4, None, "before_download", OneLate()), OneLate]
)
def test_the_number_of_ranks_changes_no_bit_of_what_arrives(delivery: Callable[[], Delivery]) -> None:
    def work(strategy: RanksStrategy, count: int = 2) -> Any:
        whole = WholeStore()
        method, data = build("FedPer", *FEW)
        callbacks = [Server(WrappedRule(), delivery()), whole]
        fit(method, data, 3, callbacks, settings={"devices": count, "strategy": strategy})
        return learned(method) | whole.rows, method.server.traffic.rounds, method.server.facts

    expected = work(RanksStrategy(), count=1)
    first, second = over_ranks(2, work)
    assert isinstance(first, tuple), first
    assert first[1:] == second[1:] == expected[1:]
    for name, value in first[0].items():
        assert torch.equal(value.nan_to_num(7), expected[0][name].nan_to_num(7)), name


class NobodyEverySecond(ServerRule):
    """Selects nobody in even rounds, and moves what is shared by one where it may."""

    def __init__(self, empty: str = "void") -> None:
        super().__init__()
        self.empty_rounds = "aggregate" if empty == "aggregate" else "void"

    def select(self, number: int) -> list[int]:
        return [] if number % 2 == 0 else super().select(number)

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        if uploads.clients:
            return super().aggregate(round, shared, uploads)
        assert {name: rows.shape for name, rows in uploads.values.items()} == {
            name: (0, *value.shape) for name, value in shared.items()
        }
        return {name: value + 1 for name, value in shared.items()}


@pytest.mark.parametrize("empty", ["void", "aggregate"])
def test_a_rule_may_select_nobody(empty: str) -> None:
    one = run("FedVPT", None, 1, NobodyEverySecond(empty))
    two = run("FedVPT", None, 2, NobodyEverySecond(empty))
    for name in one.roles.shared:
        moved = two.get_parameter(name) - one.get_parameter(name)
        torch.testing.assert_close(moved, torch.full_like(moved, float(empty == "aggregate")), rtol=0, atol=1e-6)
    assert two.server.facts == ({} if empty == "aggregate" else {"void": {2: 1.0}})


class Reports(ServerRule):
    """Reports a number of its own, and one of each client."""

    def report(self, round: Round) -> Facts:
        return {"epsilon": 0.5 * round.number, "weight": torch.arange(self.terms.num_clients) / 2.0}


def test_what_a_rule_reports_is_in_record_metrics_and_averages() -> None:
    method, data = build("FedAvg")
    run = fedprompt.fit(
        method, data, rounds=2, server=Reports(), delivery=Dropouts(0.3), accelerator="cpu", enable_progress_bar=False
    )
    assert run.record.facts is not None
    assert run.record.facts["epsilon"] == {"1": 0.5, "2": 1.0}
    assert set(run.record.facts) == {"epsilon", "dropped_out"}
    assert run.record.delivery == "Dropouts"
    table = run.metrics
    rows = table[(table["point"] == "server") & (table["split"] == "train") & (table["metric"] == "weight")]
    assert rows[rows["round"] == 2].sort_values("client")["value"].tolist() == [k / 2 for k in range(11)]
    assert method.trainer.callback_metrics["server/epsilon"].item() == 1.0
    assert method.trainer.callback_metrics["server/weight"].item() == 2.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epsilon": float("inf")}, "'epsilon' = inf; expected a finite number"),
        ({"weight": torch.zeros(3)}, r"'weight' of shape \(3,\); expected a number, or \(11,\): one a client"),
        ({"dropped_out": 1.0}, "'dropped_out' which another one reports, too"),
    ],
)
def test_reports_that_cannot_be_recorded_are_refused(given: Facts, said: str) -> None:
    class Reporting(ServerRule):
        def report(self, round: Round) -> Facts:
            return given

    with pytest.raises(ConfigurationError, match=said):
        run("FedAvg", Dropouts(0.0), 1, Reporting())


def test_updates_are_one_matrix_and_a_vector_is_taken_apart() -> None:
    values = {
        "b": torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]),
        "a": torch.tensor([[9.0], [8.0]]),
    }
    received = {"b": torch.ones(2, 2, 2), "a": torch.tensor([[1.0], [2.0]])}
    uploads = Uploads((0, 4), values, torch.ones(2, dtype=torch.float64), received)
    assert uploads.matrix(["b", "a"]).tolist() == [[8.0, 0.0, 1.0, 2.0, 3.0], [6.0, 4.0, 5.0, 6.0, 7.0]]
    apart = uploads.from_vector(["b", "a"], torch.arange(5.0))
    assert apart["a"].tolist() == [0.0]
    assert apart["b"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_what_all_have_received_is_kept_once() -> None:
    shared = torch.tensor([1.0, 2.0])
    parcels = [
        Parcel(clients, {"w": torch.ones(len(clients), 2)}, {"w": shared.expand(len(clients), 2)}, {})
        for clients in ((3, 1), (2,))
    ]
    uploads = Uploads.gathered(parcels, {1: 1, 2: 2, 3: 3}, number=7)
    assert uploads.clients == (1, 2, 3)
    assert uploads.received["w"].data_ptr() == shared.data_ptr()
    assert uploads.started.tolist() == [7, 7, 7]


class Strange(Delivery):
    """Hands over what no rule could read.

    Args:
        what: of it.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def depart(self, round: Round, clients: tuple[int, ...]) -> Departure:
        return Departure(clients, (99,), (99,)) if self.what == "stranger" else super().depart(round, clients)

    def arrive(self, round: Round, sent: Uploads) -> Uploads:
        changed = {
            "order": replace(sent, clients=sent.clients[::-1]),
            "rows": replace(sent, clients=sent.clients[:-1]),
            "names": sent.only(list(sent.values)[:1]),
        }
        return changed.get(self.what, sent)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("stranger", r"Strange.depart gives trained=\(99,\) in round 1; expected some of"),
        ("order", "Strange.arrive gives clients .* which do not ascend"),
        ("rows", "Strange.arrive gives 'weights' of shape"),
        ("names", "Strange.arrive gives .*, of "),
    ],
)
def test_a_delivery_that_hands_over_something_else_is_refused(what: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        run("FedAvg", Strange(what), 1)
