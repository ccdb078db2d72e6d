"""Robust aggregation and attacks: ByzFL's numbers by hand, what is refused, and that runs repeat."""

import math
from typing import Any

import fedprompt
import pytest
import torch
from federation import build, fit, learned, terms
from over_ranks import WholeStore, over_ranks
from torch import Tensor

from benchmark.delivery import Delivery
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.faults import Validation
from benchmark.federation import Round, Uploads, Values
from benchmark.hostile import hostile_clients
from benchmark.privacy import UserLevelPrivacy
from benchmark.ranks.strategy import RanksStrategy
from benchmark.robust import Byzantine, RobustAggregation
from benchmark.robust.byzfl import aggregator, attack, byzfl, caf, pre_aggregator
from benchmark.server import ServerRule

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")
ROWS = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0], [2.0, 2.0], [100.0, -100.0]])
AGGREGATES = {
    "average": (21.6, -18.4),
    "median": (2, 2),
    "krum": (2, 2),
    "multikrum": (2, 2),
    "mda": (2, 2),
    "meamed": (2, 2),
    "trmean": (2.3333, 1.6667),
    "geometric_median": (2.0204, 1.9460),
    "centered_clipping": (1.7640, 1.2591),
}


def round_of(clients: int, number: int = 1) -> Round:
    return Round(number, tuple(range(clients)), 0)


def uploads(rows: Tensor, origin: Tensor) -> Uploads:
    """Uploads of one tensor ``a``, whose update is a row."""
    count = len(rows)
    began = origin.expand(count, *origin.shape)
    weights = torch.arange(1, count + 1, dtype=torch.float64)
    return Uploads(
        tuple(range(count)), {"a": began + rows}, weights, {"a": began}, torch.ones(count, dtype=torch.int64)
    )


def started(rule: RobustAggregation, shared: Values, clients: int = 5) -> RobustAggregation:
    rule.complete(ServerRule)
    rule.start(shared, terms(clients))
    return rule


@pytest.mark.parametrize("name", AGGREGATES)
@pytest.mark.parametrize("scope", ["joint", "per_tensor"])
def test_aggregates_are_byzfls_of_the_updates_and_around_the_present_value(name: Any, scope: Any) -> None:
    origin = torch.tensor([10.0, -20.0])
    rule = started(RobustAggregation(1, aggregator=name, scope=scope), {"a": origin})
    made = rule.aggregate(round_of(5), {"a": origin}, uploads(ROWS, origin))["a"] - origin
    assert made.tolist() == pytest.approx(AGGREGATES[name], abs=1e-4)


def test_centered_clipping_goes_on_from_its_last_result() -> None:
    origin = torch.zeros(2)
    rule = started(RobustAggregation(1, aggregator="centered_clipping"), {"a": origin})
    rule.aggregate(round_of(5), {"a": origin}, uploads(ROWS, origin))
    state = {name: value.clone() for name, value in rule.state_dict().items()}
    assert state["momentum"].tolist() == pytest.approx((1.7640, 1.2591), abs=1e-4)
    second = rule.aggregate(round_of(5, 2), {"a": origin}, uploads(ROWS, origin))["a"]
    other = started(RobustAggregation(1, aggregator="centered_clipping"), {"a": origin})
    other.load_state_dict(state)
    assert torch.equal(other.aggregate(round_of(5, 2), {"a": origin}, uploads(ROWS, origin))["a"], second)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nnm", [(2, 2)] * 4 + [(26.75, -23.5)]),
        ("clipping", [(0.8944, 1.7889), (1.7889, 0.8944), (1.4142, 1.4142), (1.4142, 1.4142), (1.4142, -1.4142)]),
        ("arc", [(1, 2), (2, 1), (3, 3), (2, 2), (3, -3)]),
    ],
)
def test_pre_aggregators(name: Any, expected: list[tuple[float, float]]) -> None:
    made = pre_aggregator(name, 1)(ROWS.clone())
    torch.testing.assert_close(torch.as_tensor(made), torch.tensor(expected, dtype=torch.float32), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sign_flipping", (-2, -2)),
        ("ipm", (-4, -4)),
        ("alie", (3.2247, 3.2247)),
        ("mimic", (1, 2)),
        ("zero", (0, 0)),
        ("huge", (2e8, 2e8)),
    ],
)
def test_attacks_on_honest_updates(name: Any, expected: tuple[float, float]) -> None:
    made = attack(name, None, "average", (), 1)(ROWS[:4].clone())
    assert torch.as_tensor(made).tolist() == pytest.approx(expected, rel=1e-4)


def test_attacks_that_know_the_aggregator() -> None:
    made = attack("optimal_alie", None, "trmean", (), 1)(ROWS[:4].clone())
    assert torch.as_tensor(made).tolist() == pytest.approx((10.1650, 10.1650), rel=1e-4)


def test_the_strength_is_searched_for_the_hostile_rows_that_there_are() -> None:
    honest = torch.randn(8, 30, generator=torch.Generator().manual_seed(0))
    known = aggregator("trmean", 2)

    def moved(hostile: int) -> float:
        made = torch.as_tensor(attack("optimal_alie", None, "trmean", (), 2, hostile)(honest.clone()))
        found = torch.as_tensor(known(torch.cat([honest, made.expand(2, -1)])))
        return float((found - honest.mean(0)).norm())

    assert moved(2) >= max(moved(1), moved(4))
    origin, sent = torch.zeros(2), []
    for tolerated in (1, 2, 4):  # of which a median knows nothing
        delivery = Byzantine("optimal_alie", 0.2, against="median", tolerated=tolerated)
        delivery.start(terms(10))
        arrived = delivery.arrive(round_of(10), uploads(ROWS[:4].repeat(3, 1)[:10], origin))
        sent.append(arrived.values["a"][delivery.hostile[0]].tolist())
    assert sent[0] == sent[1] == sent[2] != [0, 0]


def test_an_aggregator_that_cannot_be_asked_is_not_attacked() -> None:
    delivery = Byzantine("optimal_alie", 0.4, against="trmean", tolerated=2)
    with pytest.raises(ConfigurationError, match="trmean with tolerated=2 needs more than 4 rows, and of 4 clients"):
        delivery.start(terms(4))
    halved = Byzantine("optimal_ipm", 0.4, against="trmean", pre=["bucketing"], tolerated=3)
    with pytest.raises(ConfigurationError, match=r"of 11 clients in a round pre=.'bucketing'. leaves 6"):
        halved.start(terms(11))
    delivery.start(terms(5))
    origin = torch.tensor([10.0, 10.0])
    few = uploads(ROWS, origin).of([0, delivery.hostile[0]] if delivery.hostile[0] else [0, 1])
    made = delivery.arrive(round_of(5), few)
    hostile = made.clients.index(next(client for client in made.clients if client in delivery.hostile))
    assert torch.equal(made.values["a"][hostile], origin)


@pytest.mark.parametrize("name", ["alie", "optimal_alie"])
def test_a_single_honest_update_has_no_spread(name: Any) -> None:
    assert torch.as_tensor(attack(name, None, "average", (), 1)(ROWS[:1].clone())).tolist() == [1, 2]


@pytest.mark.parametrize("name", ["alie", "huge", "zero"])
def test_caf_ends_also_where_nothing_moves_any_more(name: Any) -> None:
    rows = torch.randn(10, 300, generator=torch.Generator().manual_seed(0))
    rows[:2] = torch.as_tensor(attack(name, None, "average", (), 2)(rows[2:].clone()))
    origin = torch.zeros(300)
    for pre in ([], ["nnm"]):
        rule = started(RobustAggregation(2, aggregator="caf", pre=pre), {"a": origin}, 10)  # type: ignore[arg-type]
        made = rule.aggregate(round_of(10), {"a": origin}, uploads(rows, origin))["a"]
        assert (made - rows[2:].mean(0)).norm() < 0.6 * rows[2:].mean(0).norm()
    for tolerated in (0, 2):
        torch.testing.assert_close(caf(torch.ones(5, 4), tolerated), torch.ones(4))
    torch.testing.assert_close(caf(ROWS, 0), ROWS.mean(0))


@pytest.mark.parametrize("huge", [1e10, 3e38])
def test_one_huge_upload_does_not_move_caf(huge: float) -> None:
    rows = torch.linspace(-1, 1, 400).reshape(8, 50).clone()
    rows[7] = huge
    assert caf(rows, 2).abs().max() <= 1


def test_caf_is_byzfls_where_that_ends() -> None:
    for hostile, seed in ((1, 0), (2, 1), (4, 2)):
        torch.manual_seed(seed)
        rows = torch.randn(10, 50)
        torch.manual_seed(seed)
        expected = byzfl().CAF(hostile)(rows)
        torch.manual_seed(seed)
        assert torch.equal(caf(rows, hostile), expected)
    torch.manual_seed(0)
    assert caf(ROWS, 1).tolist() == pytest.approx((1.9916, 1.9899), abs=1e-4)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["average", "median", "geometric_median", "krum"])
def test_updates_that_are_not_finite_are_left_out_first(name: Any, broken: float) -> None:
    rows = ROWS.clone()
    rows[4, 0] = broken
    origin = torch.zeros(2)
    rule = started(RobustAggregation(1, aggregator=name), {"a": origin})
    made = rule.aggregate(round_of(5), {"a": origin}, uploads(rows, origin))["a"]
    assert made.tolist() == pytest.approx((2, 2), abs=0.01)
    assert rule.report(round_of(5))["left_out"] == 1


def test_too_few_valid_updates_make_the_round_void() -> None:
    origin = torch.zeros(2)
    rule = started(RobustAggregation(2, aggregator="median"), {"a": origin})
    with pytest.warns(UserWarning, match="round 1 is void: 2 hostile clients cannot be borne among 4 valid uploads"):
        assert rule.aggregate(round_of(4), {"a": origin}, uploads(ROWS[:4], origin)) == {}
    assert rule.report(round_of(4))["void"] == 1


def test_more_hostile_clients_than_a_round_can_bear_are_refused_at_the_start() -> None:
    for participants in (3, 4):
        with pytest.raises(ConfigurationError, match=f"tolerated=2 .* need more than 4 in a round, .* {participants};"):
            RobustAggregation(2, ServerRule()).start({"a": torch.zeros(2)}, terms(9, participants))
    RobustAggregation(2, ServerRule()).start({"a": torch.zeros(2)}, terms(9, 5))


@pytest.mark.parametrize("name", ["trmean", "krum", "multikrum", "meamed", "caf", "mda"])
def test_bucketing_halves_the_rows_that_bear_hostile_clients(name: Any) -> None:
    rule, shared = RobustAggregation(3, ServerRule(), name, ["bucketing"]), {"a": torch.zeros(2)}
    said = "need more than 6 in a round, and it has 12, of which bucketing makes 6 rows; tolerate fewer"
    with pytest.raises(ConfigurationError, match=said):
        rule.start(shared, terms(12))
    rule = started(RobustAggregation(2, aggregator=name, pre=["bucketing"]), shared, 9)
    nine = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    assert rule.aggregate(round_of(9), shared, uploads(nine, shared["a"])).keys() == {"a"}
    with pytest.warns(UserWarning, match="cannot be borne among 8 valid uploads in 4 buckets"):
        assert rule.aggregate(round_of(9, 2), shared, uploads(nine[:8], shared["a"])) == {}


def test_a_round_that_is_not_aggregated_reports_nothing_of_the_one_before() -> None:
    rows, origin = ROWS.clone(), torch.zeros(2)
    rows[:3] = math.nan
    rule = started(RobustAggregation(1, aggregator="median"), {"a": origin})
    with pytest.warns(UserWarning, match="is void"):
        rule.aggregate(round_of(5), {"a": origin}, uploads(rows, origin))
    assert rule.report(round_of(5)) == {"left_out": 3, "void": 1}
    assert rule.report(round_of(5, 2)) == {"left_out": 0}


def test_a_shared_number_is_aggregated_as_a_tensor_is() -> None:
    shared = {"a": torch.tensor(1.0)}
    rule = started(RobustAggregation(1, aggregator="median"), shared, 3)
    made = rule.aggregate(round_of(3), shared, uploads(torch.tensor([2.0, 3.0, 100.0]), shared["a"]))
    assert made["a"].item() == 4


@pytest.mark.parametrize("name", ["median", "trmean", "multikrum", "meamed", "mda", "caf"])
def test_the_order_of_rows_the_input_and_the_generator_stay(name: Any) -> None:
    rows = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    kept, state = rows.clone(), torch.get_rng_state()
    origin = torch.zeros(12)
    rule = started(RobustAggregation(1, aggregator=name), {"a": origin}, 7)
    made = rule.aggregate(round_of(7), {"a": origin}, uploads(rows, origin))["a"]
    assert torch.equal(rows, kept)
    assert torch.equal(torch.get_rng_state(), state)
    if name != "caf":
        turned = rule.aggregate(round_of(7), {"a": origin}, uploads(rows.flip(0), origin))["a"]
        torch.testing.assert_close(turned, made)
    same = rule.aggregate(round_of(7), {"a": origin}, uploads(rows[:1].expand(7, 12), origin))["a"]
    torch.testing.assert_close(same, rows[0])


def test_none_tolerated_and_the_average_is_the_mean() -> None:
    rows = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    for name in ("average", "trmean", "multikrum"):
        made = torch.as_tensor(aggregator(name, 0)(rows.clone()))  # type: ignore[arg-type]
        torch.testing.assert_close(made, rows.mean(0))


def test_who_is_hostile_is_drawn_once_and_sends_one_vector() -> None:
    delivery = Byzantine("sign_flipping", 0.4)
    delivery.start(terms(5))
    assert len(delivery.hostile) == 2
    assert [len(hostile_clients(0, range(n), of)) for n, of in ((100, 0.29), (50, 0.58), (10, 0.39))] == [29, 29, 3]
    again = Byzantine("alie", 0.4)
    again.start(terms(5))
    assert again.hostile == delivery.hostile
    origin = torch.tensor([10.0, 10.0])
    sent = uploads(ROWS, origin)
    arrived = delivery.arrive(round_of(5), sent)
    honest = [client for client in range(5) if client not in delivery.hostile]
    assert torch.equal(arrived.values["a"][honest], sent.values["a"][honest])
    expected = origin - ROWS[honest].mean(0)
    for client in delivery.hostile:
        torch.testing.assert_close(arrived.values["a"][client], expected)
    assert delivery.report(round_of(5))["hostile_uploads"] == 2
    alone = delivery.arrive(round_of(5), sent.of([delivery.hostile[0]]))
    assert torch.equal(alone.values["a"][0], origin)


def test_attack_none_draws_the_same_clients_and_all_send_what_they_trained() -> None:
    attacking, peaceful = Byzantine("sign_flipping", 0.4), Byzantine("none", 0.4)
    for delivery in (attacking, peaceful):
        delivery.start(terms(5))
    assert peaceful.attackers == attacking.attackers
    sent = uploads(ROWS, torch.tensor([10.0, 10.0]))
    assert torch.equal(peaceful.arrive(round_of(5), sent).values["a"], sent.values["a"])
    assert peaceful.report(round_of(5))["hostile_uploads"] == 0


@pytest.mark.parametrize(
    ("conf", "rule", "said"),
    [
        ("PFedPG", RobustAggregation(1), "looks at single clients' uploads, not at an aggregate"),
        ("Local", RobustAggregation(1), "it shares nothing that could be aggregated"),
        ("FedVPT", UserLevelPrivacy(RobustAggregation(1), noise_multiplier=1.0), "looks at single clients' uploads"),
        (
            "FedVPT",
            RobustAggregation(1, UserLevelPrivacy(noise_multiplier=1.0)),
            "stands around UserLevelPrivacy|looks at single",
        ),
    ],
)
def test_what_cannot_go_together_is_refused(conf: str, rule: Any, said: str) -> None:
    method, data = build(conf)
    with pytest.raises(ConfigurationError, match=said):
        fit(method, data, 1, [Server(rule)], evaluate=False)


def run(conf: str, rule: ServerRule | None, delivery: Delivery | None, *overrides: str) -> Any:
    method, data = build(conf, "--data.clients_per_round=11", *overrides)
    fit(method, data, 2, [Server(method.make_server() if rule is None else rule, delivery)], evaluate=False)
    return method


def moved(method: Any) -> Tensor:
    start, _ = build("FedVPT")
    before = dict(start.named_parameters())
    return torch.cat([(value - before[n]).flatten() for n, value in method.simulation.shared().items()])


def test_a_robust_rule_learns_what_honest_clients_teach_and_the_mean_does_not() -> None:
    honest = moved(run("FedVPT", RobustAggregation(0, aggregator="median"), None))
    attacked = moved(run("FedVPT", None, Byzantine("huge", 0.2)))
    robust = moved(run("FedVPT", RobustAggregation(2, aggregator="trmean", pre=["nnm"]), Byzantine("huge", 0.2)))
    assert attacked.norm() > 1e3 * honest.norm()
    assert robust.norm() < 3 * honest.norm()
    assert torch.cosine_similarity(robust, honest, dim=0) > 0.5


def test_the_number_of_ranks_changes_no_bit() -> None:
    def work(strategy: RanksStrategy, count: int = 2) -> Any:
        store = WholeStore()
        method, data = build("FedVPT", "--data.clients_at_once=1", "--data.clients_per_round=11")
        callbacks = [
            Server(RobustAggregation(2, aggregator="caf", pre=["bucketing"]), Byzantine("gaussian", 0.2)),
            store,
        ]
        fit(method, data, 2, callbacks, settings={"devices": count, "strategy": strategy}, evaluate=False)
        return learned(method) | store.rows

    expected, (first, _) = work(RanksStrategy(), count=1), over_ranks(2, work)
    for name, value in expected.items():
        assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(first[name])), name


def test_the_record_names_rule_delivery_and_who_is_hostile() -> None:
    method, data = build("FedVPT", "--data.clients_per_round=11")
    delivery = Byzantine("sign_flipping", 0.2)
    made = fedprompt.fit(
        method, data, rounds=1, server=RobustAggregation(2, aggregator="median"), delivery=Validation(inner=delivery),
        accelerator="cpu", enable_progress_bar=False,
    )  # fmt: skip
    assert made.record.delivery == "Validation(Byzantine)"
    assert made.record.facts is not None
    assert made.record.facts["hostile_uploads"] == {"1": 2.0}
    check_honest(made, delivery.hostile)


def test_a_run_with_flipped_labels_has_the_accuracy_of_honest_clients() -> None:
    method, data = build("FedVPT", "--data.label_flipping=0.3")
    made = fedprompt.fit(method, data, rounds=1, accelerator="cpu", enable_progress_bar=False)
    assert len(data.flipped_clients) == 3
    check_honest(made, data.flipped_clients)


def check_honest(made: Any, hostile: tuple[int, ...]) -> None:
    """See that the tables know who is hostile, and that statistics of honest clients leave them out."""
    table = made.metrics[made.metrics["point"] == "server"]
    rows = table[(table["metric"] == "hostile") & (table["round"] == 1)]
    assert tuple(rows[rows["value"] == 1]["client"]) == hostile
    last = table[(table["split"] == "test") & (table["round"] == 1)]
    accuracies = last[last["metric"] == "accuracy"].set_index("client")["value"]
    honest = accuracies.drop([*hostile])
    assert last[last["metric"] == "honest_accuracy"].set_index("client")["value"].to_dict() == honest.to_dict()
    found = made.record.summary["server"]["test"]["honest_accuracy"]
    assert found["clients"] == len(accuracies) - len(hostile)
    assert found["last"]["average"] == pytest.approx(honest.mean())
    assert found["last"]["worst"] == honest.min()
    assert made.record.summary["server"]["test"]["accuracy"]["last"]["average"] == pytest.approx(accuracies.mean())
