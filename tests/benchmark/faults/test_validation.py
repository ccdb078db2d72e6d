"""Broken uploads are refused by name, and dropouts happen where they should."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import StopAfterTwo, build, fit, learned, terms
from over_ranks import WholeStore, over_ranks

import methods
from benchmark.compression import Quantized, TopK
from benchmark.delivery import Delivery
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.faults import Dropouts, InjectedFaults, Validation, VirtualClock
from benchmark.faults.validation import fault_of
from benchmark.federation import Round, Uploads, Values
from benchmark.ranks.strategy import RanksStrategy
from benchmark.robust import Byzantine
from benchmark.server import ServerRule

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*eval mode.*", "ignore:.*is refused.*", "ignore:.*is void.*"
)
ROUND = Round(1, (0, 1, 2), 0)


def uploads(values: list[float], weights: list[float] | None = None) -> Uploads:
    """Uploads of one number each, which was 0."""
    rows = torch.tensor(values)[:, None]
    w = torch.tensor(weights or [1.0] * len(values), dtype=torch.float64)
    return Uploads(tuple(range(len(values))), {"a": rows}, w, {"a": torch.zeros(len(values), 1)})


def mean(delivery: Delivery, sent: Uploads) -> float:
    arrived = delivery.arrive(ROUND, sent)
    return float(ServerRule().aggregate(ROUND, {"a": torch.zeros(1)}, arrived)["a"])


def started(delivery: Delivery, clients: int = 3) -> Any:
    delivery.start(terms(clients))
    return delivery


def test_a_broken_upload_is_dropped_zeroed_or_raised() -> None:
    sent = uploads([1.0, math.nan, 3.0])
    assert mean(started(Validation("drop")), sent) == 2.0
    assert mean(started(Validation("zero")), sent) == pytest.approx(4 / 3)
    with pytest.raises(ConfigurationError, match="round 1: the upload of client 1 is refused: 'a' is not finite"):
        mean(started(Validation("raise")), sent)


def test_updates_that_are_too_long_are_refused() -> None:
    sent = uploads([1.0, 100.0, 3.0])
    assert mean(started(Validation(max_norm=10.0)), sent) == 2.0
    assert mean(started(Validation(max_ratio=4.0)), sent) == 2.0
    assert mean(started(Validation(max_ratio=40.0)), sent) == pytest.approx(104 / 3)
    assert mean(started(Validation(max_ratio=2.0)), uploads([1.0, 3.0])) == 2.0  # of two norms the mean is the median
    delivery = started(Validation(max_norm=10.0))
    with pytest.warns(UserWarning, match="client 1 is refused: its update has norm 100, at most 10 is let through"):
        delivery.arrive(ROUND, sent)
    assert delivery.report(ROUND)["refused"].tolist() == [0, 1, 0]


def test_too_few_valid_uploads_are_none() -> None:
    delivery = started(Validation(min_valid=3))
    with pytest.warns(UserWarning, match="2 valid uploads are less than 3"):
        assert delivery.arrive(ROUND, uploads([1.0, math.inf, 3.0])).clients == ()


def test_messages_are_told_by_their_first_fault() -> None:
    expected = {"a": torch.zeros(2), "b": torch.zeros(1)}
    good = {"a": torch.ones(2), "b": torch.ones(1)}
    assert fault_of(good, expected) is None
    assert fault_of({"a": torch.ones(2)}, expected) == "'b' is missing"
    assert fault_of(good | {"c": torch.ones(1)}, expected) == "'c' was not asked for"
    assert fault_of(good | {"a": torch.ones(3)}, expected) == "'a' has shape (3,), expected (2,)"
    assert fault_of(good | {"a": torch.ones(2).double()}, expected) == "'a' is torch.float64, expected torch.float32"
    assert fault_of(good | {"a": torch.tensor([1.0, math.inf])}, expected) == "'a' is not finite"


KINDS = ("nan", "inf", "huge", "wrong_shape", "missing_tensor", "extra_tensor", "wrong_dtype")


def run(delivery: Delivery) -> Any:
    """One round of FedVPT with all clients."""
    method, data = build("FedVPT", "--data.clients_per_round=11")
    fit(method, data, 1, [Server(None, delivery)], evaluate=False)
    return method


@cache
def without_client_three() -> Values:
    """The shared values where the upload of client 3 is lost."""
    return dict(run(Dropouts(table={1: [3]})).simulation.shared())


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_upload_is_as_one_that_was_lost(kind: Any) -> None:
    broken = run(Validation(max_norm=1e4, inner=InjectedFaults(kind, clients=[3])))
    for name, value in without_client_three().items():
        assert torch.equal(value, broken.simulation.shared()[name]), name
    assert broken.server.facts["refused_in_all"] == {1: 1.0}
    assert broken.server.facts[f"broken_{kind}"] == {1: 1.0}


def own_values(rounds: int, delivery: Delivery | None, *options: str) -> dict[str, torch.Tensor]:
    """Train FedVPT for some rounds; return what all clients keep of their own, momenta included, by row."""
    method, data = build("FedVPT", "--data.clients_per_round=11", *MOMENTUM, *options)
    fit(method, data, rounds, [Server(method.make_server(), delivery)], evaluate=False)
    return {name: method.store.all_rows(name).clone() for name in method.store.names}


MOMENTUM = ("--model.init_args.training={lr: 0.05, momentum: 0.9, epochs: 1, optimizer_state: client}",)


def test_a_refused_client_keeps_its_own_or_goes_back() -> None:
    def refusing(fault: Any) -> Delivery:
        return Validation(personal_fault=fault, inner=InjectedFaults("nan", clients=[3], rounds=[2]))

    before, plain = own_values(1, None), own_values(2, None)
    kept, back = own_values(2, refusing("keep")), own_values(2, refusing("revert"))
    assert any(name.startswith("momentum.") for name in before)
    others = [client for client in range(11) if client != 3]
    for name, rows in back.items():
        assert torch.equal(kept[name][3], plain[name][3]), name
        assert torch.equal(rows[3], before[name][3]), name
        assert torch.equal(rows[others], kept[name][others]), name
    assert any(not torch.equal(before[name][3], plain[name][3]) for name in before)
    one_by_one = own_values(2, refusing("revert"), "--data.clients_at_once=1")
    for name, rows in back.items():
        torch.testing.assert_close(one_by_one[name][3], rows[3], rtol=1e-5, atol=1e-6)


def test_clients_go_back_wherever_they_are_stepped() -> None:
    def work(strategy: RanksStrategy, count: int = 2) -> dict[str, torch.Tensor]:
        method, data = build("FedVPT", "--data.clients_per_round=11", "--data.clients_at_once=1", *MOMENTUM)
        delivery, store = Validation(personal_fault="revert", inner=InjectedFaults("nan", clients=[3, 8])), WholeStore()
        callbacks = [Server(method.make_server(), delivery), store]
        fit(method, data, 1, callbacks, settings={"devices": count, "strategy": strategy}, evaluate=False)
        return store.rows

    expected, (first, _) = work(RanksStrategy(), count=1), over_ranks(2, work)
    for name, value in expected.items():
        assert torch.equal(value, first[name]), name


def test_where_the_run_ends_nobody_goes_back() -> None:
    with pytest.raises(ConfigurationError, match="with on_invalid raise the run ends; leave personal_fault out"):
        Validation("raise", "revert")


def test_an_unreadable_message_without_validation_ends_the_run_by_its_client() -> None:
    method, data = build("FedVPT", "--data.clients_per_round=11")
    with pytest.raises(ConfigurationError, match=r"the message of client 3 in round 1 can't be read.*Validation"):
        fit(method, data, 1, [Server(None, InjectedFaults("wrong_shape", clients=[3]))], evaluate=False)


@pytest.mark.parametrize("delivery", [InjectedFaults("nan", clients=[2]), Byzantine("nan", 0.2)])
def test_a_mean_that_is_not_finite_ends_the_run_by_its_delivery(delivery: Delivery) -> None:
    method, data = build("FedVPT", "--data.clients_per_round=11")
    said = rf"made of what {delivery.title} hands over were not finite in round 1; .*--delivery Validation"
    with pytest.raises(ConfigurationError, match=said):
        fit(method, data, 1, [Server(None, delivery)], evaluate=False)


def test_a_shared_number_is_delivered_as_a_tensor_is() -> None:
    now = {"a": torch.tensor(1.0)}
    rows, one = torch.tensor([1.5, 3.0, 2.0]), torch.ones(3, dtype=torch.float64)
    sent = Uploads((0, 1, 2), {"a": rows}, one, {"a": now["a"].expand(3)}, now=now, common=frozenset("a"))
    expected = {
        Validation: [1.5, 3.0, 2.0],
        TopK: [1.5, 3.0, 2.0],
        Quantized: [1.5, 3.0, 2.0],
        VirtualClock: [1.5, 3.0, 2.0],
        Byzantine: [1.0, 1.0, 1.0],
    }
    for kind, values in expected.items():
        delivery: Any = started(kind(**{"attack": "zero", "fraction": 1.0} if kind is Byzantine else {}))
        assert delivery.arrive(ROUND, sent).values["a"].tolist() == pytest.approx(values), kind
    assert started(Validation(max_norm=1.5)).arrive(ROUND, sent).values["a"].tolist() == [1.5, 2.0]
    assert started(Validation()).arrive(ROUND, sent.of([])).clients == ()


def test_faults_of_clients_that_do_not_train_are_refused() -> None:
    said = "InjectedFaults: clients names client 99, which does not train; expected some of the 3 clients"
    with pytest.raises(ConfigurationError, match=said):
        started(InjectedFaults("nan", clients=[1, 99]))


def test_an_upload_may_be_the_one_before() -> None:
    delivery = started(InjectedFaults("repeat_last", clients=[0]))
    first = delivery.arrive(ROUND, uploads([1.0, 2.0]))
    assert first.values["a"].flatten().tolist() == [1.0, 2.0]
    again = delivery.arrive(Round(2, (0, 1), 0), uploads([5.0, 6.0]))
    assert again.values["a"].flatten().tolist() == [1.0, 6.0]


def test_the_upload_before_is_the_last_one_that_was_sent() -> None:
    delivery, sent = started(InjectedFaults("repeat_last", clients=[0], rounds=[2, 5, 6])), []
    for number in range(1, 8):
        arrived = delivery.arrive(Round(number, (0, 1), 0), uploads([float(number), 10.0 * number]))
        sent.append(arrived.values["a"].flatten().tolist())
    assert [of_faulty for of_faulty, _ in sent] == [1, 1, 3, 4, 4, 4, 7]
    assert [of_other for _, of_other in sent] == [10, 20, 30, 40, 50, 60, 70]


def test_weights_are_those_of_the_survivors() -> None:
    sent = uploads([1.0, 5.0, 3.0], [1.0, 2.0, 1.0])
    assert mean(Delivery(), sent) == 3.5
    assert mean(Delivery(), sent.of([0, 2])) == 2.0


@pytest.mark.parametrize("point", ["before_download", "after_download", "after_training"])
def test_dropouts_lose_what_they_should(point: Any) -> None:
    method, data = build("FedPer", "--data.clients_per_round=11")
    start, _ = build("FedPer", "--data.clients_per_round=11")
    fit(method, data, 1, [Server(None, Dropouts(table={1: [2, 5]}, point=point))], evaluate=False)
    fit(start, build("FedPer")[1], 0, [], evaluate=False)
    name = next(name for name in method.store.names if name.startswith("head"))
    unmoved = (method.store.all_rows(name) == start.store.all_rows(name)).flatten(1).all(1)
    kept = [client for client, same in enumerate(unmoved.tolist()) if same]
    assert kept == ([] if point == "after_training" else [2, 5])
    assert method.server.facts["dropped_out"] == {1: 2.0}
    row = method.server.traffic.rounds[0]
    plain, data = build("FedPer", "--data.clients_per_round=11")
    fit(plain, data, 1, evaluate=False)
    down, up = (_bytes(row), _bytes(plain.server.traffic.rounds[0]))
    assert down["up"] / up["up"] == pytest.approx(9 / 11)
    assert down["down"] / up["down"] == pytest.approx(9 / 11 if point == "before_download" else 1)


def _bytes(row: list[int]) -> dict[str, int]:
    """Bytes of a round's row of the counter: clients, then down and up."""
    _, down, up = row[:3]
    return {"down": down, "up": up}


def test_tables_of_dropouts_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="table names client 7, which does not train"):
        started(Dropouts(table={1: [7]}))
    with pytest.raises(ConfigurationError, match="either a probability or a table"):
        Dropouts(0.5, {1: [0]})


def storm() -> Delivery:
    """Dropouts, late clients, a NaN, a wrong shape and two that flip signs."""
    flipping = Byzantine("sign_flipping", 0.2, inner=Dropouts(0.3))
    broken = InjectedFaults("wrong_shape", clients=[1], inner=InjectedFaults("nan", clients=[0], inner=flipping))
    late = VirtualClock("buffer", deadline=0.12, jitter=0.5, inner=Validation(inner=broken))
    return late


@pytest.mark.parametrize("conf", ["FedAvg", "PFedBayesPT", "PromptFL", "TPFL", "FedMTL"])
def test_every_family_rides_out_a_storm(conf: str) -> None:
    method, data = build(conf, "--data.clients_per_round=8")
    fit(method, data, 3, [Server(method.make_server(), storm())], evaluate=False)
    assert all(value.isfinite().all() for value in method.simulation.shared().values())
    assert set(method.server.facts) >= {"clock", "late", "dropped_out", "refused_in_all", "hostile_uploads"}
    assert method.server.facts["refused_in_all"][3] > 0


@pytest.mark.parametrize("conf", ["PFedPG", "FedVPT"])
def test_a_storm_goes_on_from_a_kill(conf: str, tmp_path: Path) -> None:
    given = ("--data.clients_per_round=8", "--data.clients_at_once=1")
    method, data = build(conf, *given)
    fit(method, data, 4, [Server(method.make_server(), storm())], evaluate=False)
    whole = learned(method)
    assert method.server.facts["refused_in_all"][4] > 0
    other, data = build(conf, *given)
    callbacks = [Server(other.make_server(), storm()), StopAfterTwo()]
    fit(other, data, 4, callbacks, save_to=tmp_path, evaluate=False)
    assert other.server.finished_rounds == 2
    again, data = build(conf, *given)
    path = str(tmp_path / "checkpoints" / "last.ckpt")
    fit(again, data, 4, [Server(again.make_server(), storm())], path, evaluate=False)
    for name, value in learned(again).items():
        assert torch.equal(torch.nan_to_num(value, 7), torch.nan_to_num(whole[name], 7)), name


@pytest.mark.slow
@pytest.mark.parametrize("conf", sorted(set(methods.__all__) - {"ZeroShotCLIP"}))
def test_twenty_rounds_of_storm_end_with_every_method(conf: str) -> None:
    method, data = build(conf)
    fit(method, data, 20, [Server(method.make_server(), storm())], evaluate=False)
    assert method.server.finished_rounds == 20
    assert all(value.isfinite().all() for value in method.simulation.shared().values())
