"""Compressed updates by hand, their bytes as sent, and that runs with them repeat."""

from pathlib import Path
from typing import Any

import pytest
import torch
from federation import StopAfterTwo, build, fit, learned, terms
from over_ranks import WholeStore, over_ranks

from benchmark.compression import Quantized, TopK
from benchmark.compression.compressed import Compressed
from benchmark.delivery import Delivery
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.faults import InjectedFaults, Validation, VirtualClock
from benchmark.federation import Round, Uploads
from benchmark.ranks.strategy import RanksStrategy

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def arrived(delivery: Compressed, update: list[float], number: int = 1) -> list[float]:
    """Deliver one client's update of tensors ``a`` [2] and ``b`` [rest], all 10 before; return the arriving update."""
    rows = 10 + torch.tensor([update])
    values = {"a": rows[:, :2], "b": rows[:, 2:]}
    received = {name: torch.full_like(value, 10.0) for name, value in values.items()}
    sent = Uploads((3,), values, torch.ones(1, dtype=torch.float64), received)
    made = delivery.arrive(Round(number, (3,), 0), sent).values
    return [*(made["a"] - 10).flatten().tolist(), *(made["b"] - 10).flatten().tolist()]


def started(delivery: Compressed) -> Compressed:
    delivery.start(terms(5))
    return delivery


def test_the_largest_entries_arrive_and_the_rest_comes_later() -> None:
    delivery = started(TopK(0.5))
    assert arrived(delivery, [1.0, -4.0, 3.0, 2.0]) == pytest.approx([0, -4, 3, 0])
    assert arrived(delivery, [1.0, 0.0, 0.0, 0.5], 2) == pytest.approx([2, 0, 0, 2.5])
    assert arrived(delivery, [0.25, 0.5, 0.0, 0.0], 3) == pytest.approx([0.25, 0.5, 0, 0])
    forgetful = started(TopK(0.5, error_feedback=False))
    arrived(forgetful, [1.0, -4.0, 3.0, 2.0])
    assert arrived(forgetful, [1.0, 0.0, 0.0, 0.5], 2) == pytest.approx([1, 0, 0, 0.5])


def test_shares_count_as_they_are_written() -> None:
    kept = {(0.07, 100): 7, (0.29, 100): 29, (0.1, 30): 3, (0.5, 3): 2, (1e-9, 10): 1, (1.0, 4): 4}
    for (share, entries), count in kept.items():
        assert TopK(share).size([torch.zeros(entries)]) == (8 * count, 2 * count), share


@pytest.mark.filterwarnings("ignore:.*is refused.*")
def test_a_client_that_goes_back_has_left_to_send_what_it_had() -> None:
    compressing = TopK(0.5)
    delivery = Validation(personal_fault="revert", inner=InjectedFaults("nan", [0], rounds=[2], inner=compressing))
    delivery.start(terms(2))
    weights, left = torch.ones(2, dtype=torch.float64), []
    for number in (1, 2, 3):
        round, rows = Round(number, (0, 1), 0), torch.tensor([[1.0, 2.0], [1.0, 2.0]])
        delivery.arrive(round, Uploads((0, 1), {"a": rows}, weights, {"a": torch.zeros(2, 2)}))
        delivery.close(round, False, delivery.reverted)
        left.append([compressing.get_extra_state()["left"][client].tolist() for client in (0, 1)])
    assert left == [[[1, 0], [1, 0]], [[1, 0], [0, 2]], [[0, 2], [1, 0]]]


def carrying(conf: str, delivery: Delivery) -> None:
    method, data = build(conf, "--data.partition=federation.Few", "--data.clients_per_round=6")
    fit(method, data, 2, [Server(method.make_server(), delivery)], evaluate=False)


@pytest.mark.parametrize("conf", ["FLoRA", "HiLoRA", "PLAN"])
def test_nothing_is_carried_over_between_rounds_of_other_values(conf: str) -> None:
    for delivery in (TopK(0.3), InjectedFaults("repeat_last", [0]), Delivery(TopK(0.3))):
        said = (
            r"adds a part of a client's update to a later one.* to \w+Rule that means nothing.*error_feedback to false"
        )
        with pytest.raises(ConfigurationError, match=said):
            carrying(conf, delivery)
    carrying(conf, TopK(0.3, error_feedback=False))


def test_over_rounds_everything_arrives_but_what_is_left() -> None:
    delivery = started(TopK(0.25))
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(20, 8, generator=generator)
    total = sum(torch.tensor(arrived(delivery, row.tolist(), n)) for n, row in enumerate(updates, 1))
    assert isinstance(total, torch.Tensor)
    left = delivery.get_extra_state()["left"][3]
    torch.testing.assert_close(total + left, updates.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_numbers_are_rounded_at_random_to_levels_of_their_tensor(bits: Any, levels: int) -> None:
    delivery = started(Quantized(bits))
    update = [0.0, 2.0, 0.3, -0.5, 0.05]
    drawn = torch.tensor([arrived(delivery, update, number) for number in range(1, 1201)])
    scaled = drawn * levels / torch.tensor([2.0, 2.0, 0.5, 0.5, 0.5])
    torch.testing.assert_close(scaled, scaled.round(), rtol=0, atol=2e-3)
    assert drawn[:, 1].min() == pytest.approx(2.0)
    assert drawn[:, 3].max() == pytest.approx(-0.5)
    step = torch.tensor([2.0, 2.0, 0.5, 0.5, 0.5]) / levels
    assert ((drawn - torch.tensor(update)).abs() <= step * 1.001).all()
    torch.testing.assert_close(drawn.mean(0), torch.tensor(update), rtol=0, atol=4 * 0.5 / levels / 1200**0.5 * 2)
    assert arrived(delivery, update, 7) == drawn[6].tolist()
    assert arrived(delivery, [0.0] * 5) == [0.0] * 5


@pytest.mark.parametrize("make", [lambda: Quantized(4), lambda: TopK(0.25)], ids=["quantized", "top_k"])
def test_what_arrives_of_a_client_does_not_depend_on_who_else_sends(make: Any) -> None:
    together, alone = started(make()), started(make())
    generator = torch.Generator().manual_seed(0)
    for number in (1, 2):
        rows, weights = torch.randn(5, 8, generator=generator), torch.ones(5, dtype=torch.float64)
        sent = Uploads((0, 1, 2, 3, 4), {"a": rows}, weights, {"a": torch.full((5, 8), 0.5)})
        whole = together.arrive(Round(number, sent.clients, 0), sent).values["a"]
        for client in (4, 0, 2):
            part = alone.arrive(Round(number, sent.clients, 0), sent.of([client]))
            assert torch.equal(part.values["a"][0], whole[client])


#: Tensors of 8 and 4 numbers from the server, and 3 numbers of the client's own, four bytes each.
SENT = {"a": torch.zeros(1, 2, 4), "b": torch.zeros(1, 4), "own": torch.zeros(1, 3)}


@pytest.mark.parametrize(
    ("delivery", "bytes_sent", "numbers"),
    [
        (Quantized(8), (8 + 4) + (4 + 4) + 12, 12 + 2 + 3),
        (Quantized(4), (4 + 4) + (2 + 4) + 12, 12 + 2 + 3),
        (TopK(0.2), 3 * (4 + 4) + 12, 2 * 3 + 3),
    ],
)
def test_bytes_are_counted_as_they_are_sent(delivery: Compressed, bytes_sent: int, numbers: int) -> None:
    assert delivery.upload_size(SENT, frozenset({"a", "b"})) == (bytes_sent, numbers)


def test_two_compressions_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="TopK: its inner delivery compresses already"):
        TopK(0.1, inner=Quantized(8))


@pytest.mark.parametrize("delivery", [lambda: Quantized(4), lambda: TopK(0.2)], ids=["quantized", "top_k"])
def test_a_resume_and_ranks_change_no_bit_and_fewer_bytes_are_sent(delivery: Any, tmp_path: Path) -> None:
    def work(strategy: RanksStrategy, count: int = 2) -> Any:
        store = WholeStore()
        method, data = build("FedPer", "--data.clients_at_once=1")
        settings = {"devices": count, "strategy": strategy}
        fit(method, data, 3, [Server(None, delivery()), store], settings=settings, evaluate=False)
        return learned(method) | store.rows, method.server.traffic.rounds

    (whole, sent), (over, sent_over) = work(RanksStrategy(), count=1), over_ranks(2, work)[0]
    stopped, data = build("FedPer", "--data.clients_at_once=1")
    fit(stopped, data, 3, [Server(None, delivery()), StopAfterTwo()], save_to=tmp_path, evaluate=False)
    assert stopped.server.finished_rounds == 2
    again, data = build("FedPer", "--data.clients_at_once=1")
    fit(again, data, 3, [Server(None, delivery())], str(tmp_path / "checkpoints" / "last.ckpt"), evaluate=False)
    resumed = learned(again)
    for name, value in whole.items():
        for other in (over, resumed):
            if name in other:
                assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(other[name])), name
    plain, data = build("FedPer", "--data.clients_at_once=1")
    fit(plain, data, 3, evaluate=False)
    assert sent == sent_over
    for row, whole_row in zip(sent, plain.server.traffic.rounds, strict=True):
        assert row[:2] == whole_row[:2]
        assert row[2] < 0.45 * whole_row[2]


def test_the_clock_counts_the_bytes_that_are_sent() -> None:
    update = torch.ones(1, 100)
    sent = Uploads((0,), {"a": update}, torch.zeros(1, dtype=torch.float64), {"a": torch.zeros(1, 100)})
    times = []
    for inner in (None, Quantized(8), TopK(0.1)):
        clock = VirtualClock(bandwidth_up=1.0, inner=inner)
        clock.start(terms(1))
        clock.arrive(Round(1, (0,), 0), sent)
        times.append(clock.now)
    assert times == [400, 100 + 4, 10 * 8]
