"""The simulated clock by hand: who is late, what stale uploads weigh, and that waiting changes nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from federation import build, fit, learned, terms
from over_ranks import over_ranks

from benchmark.compression import Quantized, TopK
from benchmark.delivery import Delivery
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.faults import Dropouts, InjectedFaults, Validation, VirtualClock
from benchmark.federation import Parcel, Round, Uploads
from benchmark.ranks.strategy import RanksStrategy

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")
#: Seconds of each client's round.
SPEEDS = [4.0, 12.0, 7.0, 25.0]


def clock(policy: Any, deadline: float | None = 10.0, **given: Any) -> VirtualClock:
    made = VirtualClock(policy, deadline, seconds_per_image=1.0, speeds=SPEEDS, **given)
    made.start(terms(4))
    return made


def a_round(delivery: VirtualClock, number: int, now: float = 0.0) -> tuple[Uploads, tuple[int, ...]]:
    """A round of all clients that are idle; each moves what it received, ``now``, by its number plus one."""
    going = delivery.depart(Round(number, (0, 1, 2, 3), 0), (0, 1, 2, 3)).trained
    shared = {"a": torch.tensor([now])}
    received = shared["a"].expand(len(going), 1)
    values = received + torch.tensor([[client + 1.0] for client in going])
    weights = torch.ones(len(going), dtype=torch.float64)
    started = torch.full((len(going),), number)
    sent = Uploads(going, {"a": values}, weights, {"a": received}, started, now=shared, common=frozenset("a"))
    round = Round(number, (0, 1, 2, 3), 0)
    arrived = delivery.arrive(round, sent)
    delivery.close(round, not arrived.clients, frozenset())
    return arrived, going


def shares(arrived: Uploads) -> dict[int, float]:
    made = (arrived.weights / arrived.weights.sum()).tolist()
    return {client: round(share, 4) for client, share in zip(arrived.clients, made, strict=True)}


def test_late_uploads_join_when_they_arrive_with_less_weight() -> None:
    delivery = clock("buffer")
    first, going = a_round(delivery, 1)
    assert (going, delivery.now, shares(first)) == ((0, 1, 2, 3), 10, {0: 0.5, 2: 0.5})
    second, going = a_round(delivery, 2, now=100.0)
    assert (going, delivery.now) == ((0, 2), 17)
    assert shares(second) == {0: 0.3694, 1: 0.2612, 2: 0.3694}
    assert second.values["a"].flatten().tolist() == [101, 102, 103]  # the stale one from where the server is now
    assert second.started.tolist() == [2, 1, 2]
    third, going = a_round(delivery, 3)
    assert (going, delivery.now) == ((0, 1, 2), 27)
    assert shares(third) == {0: 0.388, 2: 0.388, 3: 0.224}
    assert delivery.report(Round(3, (), 0)) == {"clock": 27, "late": 1, "stale": 1, "discarded": 0}
    assert a_round(delivery, 4)[1] == (0, 2, 3)


def cohort(clients: tuple[int, ...], now: torch.Tensor) -> Parcel:
    """Clients that were stepped together and have moved what they received by one."""
    received = {"a": now.expand(len(clients), 2)}
    return Parcel(clients, {"a": received["a"] + 1}, received, {}, frozenset("a"))


@pytest.mark.filterwarnings("ignore:.*is refused.*")
@pytest.mark.parametrize(
    ("cohorts", "inner"),
    [
        ([(0, 1, 2, 3)], None),
        ([(1,)], None),  # one row has no neighbour from whom it could be told that its value is common
        ([(0, 1), (2, 3)], None),  # of two ranks, each with a copy
        ([(0, 1, 2, 3)], Validation(inner=InjectedFaults("nan", clients=[2]))),
    ],
)
def test_a_late_upload_joins_as_an_update(cohorts: list[tuple[int, ...]], inner: Delivery | None) -> None:
    delivery = clock("buffer", inner=inner)
    now, later, sizes = torch.zeros(2), torch.full((2,), 100.0), dict.fromkeys(range(4), 1)
    first = Uploads.gathered([cohort(clients, now.clone()) for clients in cohorts], sizes, 1)
    delivery.arrive(Round(1, first.clients, 0), replace(first, now={"a": now}))
    second = Uploads.gathered([cohort((0, 2), later)], sizes, 2)
    arrived = delivery.arrive(Round(2, (0, 2), 0), replace(second, now={"a": later}))
    row = arrived.clients.index(1)
    assert arrived.values["a"][row].tolist() == [101, 101]
    assert arrived.received["a"][row].tolist() == [100, 100]


def test_late_uploads_are_the_same_over_ranks() -> None:
    def work(strategy: RanksStrategy, count: int = 2) -> Any:
        method, data = build("FedVPT", "--data.clients_at_once=1", "--data.clients_per_round=11")
        settings = {"devices": count, "strategy": strategy}
        fit(method, data, 3, [Server(None, VirtualClock("buffer", 0.05))], settings=settings, evaluate=False)
        return dict(method.simulation.shared()), method.server.facts

    (expected, facts), (found, found_facts) = work(RanksStrategy(), count=1), over_ranks(2, work)[0]
    assert sum(facts["stale"].values()) > 0
    assert found_facts == facts
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_void_round_makes_no_version_of_the_server() -> None:
    method, data = build("FedVPT", "--data.clients_per_round=11")
    late = VirtualClock("buffer", 100.0)
    voided = [Server(None, Validation(min_valid=12, inner=late))]
    fit(method, data, 2, voided, evaluate=False)
    assert late.version == 0


def test_a_round_whose_uploads_are_all_lost_lasts_until_the_deadline() -> None:
    for policy in ("drop", "buffer"):
        delivery = clock(policy, inner=Dropouts(table={1: [0, 1, 2, 3]}))
        delivery.arrive(Round(1, (0, 1, 2, 3), 0), Uploads.nobody({"a": torch.zeros(1)}))
        assert delivery.now == 10


def test_a_late_upload_counts_less_also_where_clients_count_alike() -> None:
    delivery = clock("buffer")
    a_round(delivery, 1)
    arrived, _ = a_round(delivery, 2)
    fresh = [place for place, started in enumerate(arrived.started.tolist()) if started == 2]
    (stale,) = (place for place in range(len(arrived.clients)) if place not in fresh)
    assert arrived.equal_weights[fresh].tolist() == [1.0] * len(fresh)
    assert arrived.equal_weights[stale].item() == pytest.approx(2**-delivery.staleness)
    assert arrived.weights[stale].item() == pytest.approx(arrived.weights[fresh[0]].item() * 2**-delivery.staleness)
    assert arrived.of([stale]).equal_weights.tolist() == [arrived.equal_weights[stale].item()]


def test_late_uploads_are_lost() -> None:
    delivery = clock("drop")
    for number in (1, 2, 3):
        arrived, going = a_round(delivery, number)
        assert (going, arrived.clients, delivery.now) == ((0, 1, 2, 3), (0, 2), 10 * number)


def test_all_are_waited_for() -> None:
    for delivery in (clock("wait", None), clock("buffer", None)):
        for number in (1, 2):
            arrived, going = a_round(delivery, number)
            assert (arrived.clients, going, delivery.now) == ((0, 1, 2, 3), (0, 1, 2, 3), 25 * number)


def test_uploads_that_are_too_old_are_discarded() -> None:
    delivery = clock("buffer", max_staleness=0)
    a_round(delivery, 1)
    assert a_round(delivery, 2)[0].clients == (0, 2)
    assert delivery.report(Round(2, (), 0))["discarded"] == 1


def test_where_all_are_busy_the_clock_jumps_to_the_next_arrival() -> None:
    delivery = clock("buffer", 1.0)
    assert a_round(delivery, 1)[0].clients == ()
    arrived, going = a_round(delivery, 2)
    assert going == ()
    assert (arrived.clients, delivery.now) == ((0,), 4)


def held_up(conf: str) -> Any:
    """A run whose clients are all late in the first round and busy in the second."""
    method, data = build(conf, "--data.partition=federation.Few", "--data.clients_per_round=6")
    fit(method, data, 2, [Server(method.make_server(), VirtualClock("buffer", 0.001))], evaluate=False)
    return method.server


@pytest.mark.parametrize("conf", ["SGPT", "FedMGP", "PFedPG", "FedRoD", "FedMTL", "PromptAMP"])
def test_a_round_may_have_late_uploads_alone(conf: str) -> None:
    server = held_up(conf)
    assert server.facts["late"] == {1: 6, 2: 0}
    assert server.facts["stale"] == {1: 0, 2: 1}


@pytest.mark.parametrize("conf", ["FLoRA", "HiLoRA", "PLAN"])
def test_where_uploads_of_earlier_rounds_mean_nothing_they_are_refused(conf: str) -> None:
    said = r"VirtualClock hands over uploads of earlier rounds, and to \w+Rule they mean nothing.* wait or drop"
    with pytest.raises(ConfigurationError, match=said):
        held_up(conf)


@pytest.mark.parametrize("conf", ["FederatedRidge", "NearestClassMean", "PEPFedPT"])
@pytest.mark.parametrize(
    "delivery",
    [VirtualClock("buffer", 10.0), TopK(0.5, error_feedback=False), Quantized(8), Validation(on_invalid="zero")],
    ids=lambda each: type(each).__name__,
)
def test_sums_are_refused_what_takes_them_for_updates(conf: str, delivery: Delivery) -> None:
    method, data = build(conf)
    with pytest.raises(
        ConfigurationError, match=r"takes what a client sends for .* clients send sums over their images"
    ):
        fit(method, data, 1, [Server(method.make_server(), delivery)], evaluate=False)


def test_late_uploads_of_other_values_are_refused() -> None:
    delivery = clock("buffer")
    a_round(delivery, 1)
    two = {name: torch.zeros(2, 1) for name in ("b", "c")}
    sent = Uploads((0, 2), two, torch.ones(2, dtype=torch.float64), now={})
    with pytest.raises(ConfigurationError, match=r"late upload of round 1 holds \['a'\], others hold \['b', 'c'\]"):
        delivery.arrive(Round(2, (0, 2), 0), sent)


def test_time_is_of_bytes_images_and_latency() -> None:
    delivery = VirtualClock(seconds_per_image=0.5, speeds=[2.0], latency=3.0, bandwidth_down=10.0, bandwidth_up=5.0)
    delivery.start(terms(1))
    assert delivery.seconds(Round(1, (0,), 0), 0, images=6, down=40, up=20) == 2 * 3 + 4 + 6 * 0.5 * 2 + 4


@pytest.mark.parametrize(("inner", "sent"), [(None, 4 * 8), (TopK(0.25), 8 + 8), (Quantized(8), 8 + 4)])
def test_compressed_uploads_take_the_time_of_what_is_sent(inner: Delivery | None, sent: int) -> None:
    delivery = VirtualClock(seconds_per_image=0.0, bandwidth_up=2.0, inner=inner)
    delivery.start(terms(1))
    values, received = torch.arange(8.0)[None], torch.zeros(1, 8)
    one = torch.ones(1, dtype=torch.float64)
    delivery.arrive(Round(1, (0,), 0), Uploads((0,), {"a": values}, one, {"a": received}))
    assert delivery.now == sent / 2


def test_to_wait_changes_no_bit() -> None:
    plain, data = build("FedAvg")
    fit(plain, data, 2)
    waited, data = build("FedAvg")
    fit(waited, data, 2, [Server(None, VirtualClock("wait", jitter=0.3))])
    made = learned(waited)
    for name, value in learned(plain).items():
        torch.testing.assert_close(made[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
    times = waited.server.facts["clock"]
    assert 0 < times[1] < times[2]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="policy wait has no deadline"):
        VirtualClock("wait", 3.0)
    with pytest.raises(ConfigurationError, match="policy drop needs a deadline"):
        VirtualClock("drop")
    with pytest.raises(ConfigurationError, match="1 speeds for 4 clients"):
        VirtualClock(speeds=[1.0]).start(terms(4))
