"""Check what every server's rule must keep, for every subclass of ``ServerRule``; and a rule alone."""

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from federation import CONF, build, terms

import methods
from benchmark.contract import Stage
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.engine.plan.work import Share
from benchmark.engine.simulation import Simulation
from benchmark.federation import Broadcast, Parcel, Round, Uploads, Values
from benchmark.live import Relay
from benchmark.privacy import UserLevelPrivacy
from benchmark.robust import RobustAggregation
from benchmark.server import ServerRule, WrappedRule
from methods import servers
from methods.context_matching import ContextMatching
from methods.flora import StackingRule
from methods.nearestclassmean import OwnMeansRule
from methods.tiers import TierRule
from methods.trajectory import TrajectoryRule


def subclasses(rule: type[ServerRule]) -> Iterator[type[ServerRule]]:
    """The rule and all that derive from it, without those of tests."""
    if rule.__module__.split(".")[0] in ("benchmark", "methods") and not rule.__name__.startswith("_"):
        yield rule
    for derived in rule.__subclasses__():
        yield from subclasses(derived)


#: Rules around another one, with arguments.
AROUND: dict[type[ServerRule], Callable[[], ServerRule]] = {
    UserLevelPrivacy: lambda: UserLevelPrivacy(ServerRule(), noise_multiplier=1.0),
    RobustAggregation: lambda: RobustAggregation(1, ServerRule()),
}
#: Rules that any method can be given.
FOR_ANY = [ServerRule, *(getattr(servers, name) for name in servers.__all__), *AROUND]
#: Bases, and the rule of a method that sends nothing.
NOT_BY_ITSELF = {servers.ServerOptimizer, TrajectoryRule, WrappedRule, Relay, OwnMeansRule}
RULES = sorted({*subclasses(ServerRule)} - NOT_BY_ITSELF, key=lambda rule: rule.__name__)
#: Rules that make other values of equal uploads: with noise, with new factors in every round, by mixing contexts, with
#: other factors of the same product.
MOVES = (UserLevelPrivacy, StackingRule, ContextMatching, TierRule)
#: Rules that keep FedAvg's mean.
AVERAGING = [rule for rule in RULES if rule.aggregate is ServerRule.aggregate]


class Part(NamedTuple):
    """One round of real clients as a rule sees it: all that a test of the rule needs."""

    method: Any
    new_rule: Callable[[], ServerRule]
    simulation: Simulation
    round: Round
    shared: Values
    #: ids and what they sent, [K, ...] each, as they arrived: not ascending
    arrived: Parcel

    def make(self) -> Any:
        """A new rule at the start."""
        rule = self.new_rule()
        rule.start(self.method.initial_values(), self.simulation.terms)
        return rule

    @property
    def uploads(self) -> Uploads:
        """Put in order what arrived."""
        return Uploads.gathered([self.arrived], self.simulation.holdings.train_sizes)


@cache
def bringers() -> dict[type[ServerRule], list[str]]:
    """Methods of ``tests/conf`` by the rule that they bring; all are built once, which takes most of the time here."""
    found: dict[type[ServerRule], list[str]] = {}
    for name in sorted(path.stem for path in CONF.glob("[A-Z]*.yaml")):
        found.setdefault(type(build(name)[0].make_server()), []).append(name)
    return found


@cache
def part_of(rule: type[ServerRule]) -> Part:
    """The first round of the first method of ``tests/conf`` that brings this rule; no Trainer runs it.

    Of FedAvg for those that any method can be given.
    """
    names = ["FedAvg"] if rule in FOR_ANY else bringers()[rule]
    name = min(names, key=lambda name: getattr(methods, name).__module__ != rule.__module__)
    method, data = build(name, "--data.clients_per_round=4")
    new_rule = AROUND.get(rule, rule) if rule in FOR_ANY else method.make_server
    data.setup()
    simulation = method.join(data)
    made = new_rule()
    made.start(method.initial_values(), simulation.terms)
    round = Round(1, tuple(made.select(1)), data.seed)
    facts, phases = simulation.federation, simulation.phases[Stage.TRAIN]
    plan = RoundPlan(round.clients, facts.holdings.train_rows, facts.terms, phases, Stage.TRAIN, 4, 1)
    (clients,) = plan.cohorts
    cohort = simulation.begin(clients, Stage.TRAIN, round, simulation.received(made, round, clients))
    optimizers = simulation.local_steps.optimizers(phases)
    (work,) = Share([plan])
    for part in work.parts:
        phase = simulation.start(cohort, part, optimizers[part.phase])
        for step, batch in simulation.steps(work, part):
            made = simulation.gradients(cohort, step, batch)
            simulation.local_steps.take(cohort, step, made, phase, optimizers[part.phase])
        simulation.finish(cohort, part, optimizers[part.phase])
    shared = {name: value.clone() for name, value in simulation.shared().items()}
    arrived = simulation.end(cohort)
    assert list(arrived[0]) != sorted(arrived[0]), "the largest client is first"
    return Part(method, new_rule, simulation, round, shared, arrived)


def assert_equal(left: Values, right: Values) -> None:
    """The same names and, bit for bit, the same values."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def assert_same_sent(left: Broadcast, right: Broadcast) -> None:
    """Bit for bit the same messages."""
    assert_equal(left.common, right.common)
    assert_equal(left.rows(), right.rows())


def saved(rule: ServerRule) -> dict[str, Any]:
    """The rule's state, written as a checkpoint writes it and read again."""
    stream = io.BytesIO()
    torch.save(rule.state_dict(), stream)
    stream.seek(0)
    state: dict[str, Any] = torch.load(stream, weights_only=True)
    return state


def test_all_rules_are_found() -> None:
    assert ServerRule in RULES
    assert {rule.__name__ for rule in RULES} >= {"AttentiveRule", "ColumnRule", "GeneratorRule", "GroupRule"}
    assert set(FOR_ANY) < set(RULES)
    assert ServerRule in AVERAGING


@pytest.mark.parametrize("kind", RULES)
def test_the_order_of_arrival_changes_nothing(kind: type[ServerRule]) -> None:
    part = part_of(kind)
    clients, values, *_ = part.arrived
    single = [part.arrived.of([client]) for client in clients]
    results = []
    for arrived in ([part.arrived], single, single[::-1], single[2:] + single[:2]):
        uploads = Uploads.gathered(arrived, part.simulation.holdings.train_sizes)
        assert uploads.clients == part.round.clients == tuple(sorted(clients))
        assert uploads.weights.tolist() == [part.simulation.holdings.train_sizes[c] for c in uploads.clients]
        for row, client in enumerate(uploads.clients):
            assert_equal(
                {name: value[row] for name, value in uploads.values.items()},
                {name: value[clients.index(client)] for name, value in values.items()},
            )
        rule = part.make()
        new = rule.aggregate(part.round, part.shared, uploads)
        results.append((new, rule.broadcast(replace(part.round, number=2), part.shared | new, uploads.clients)))
    for new, sent in results[1:]:
        assert_equal(new, results[0][0])
        assert_same_sent(sent, results[0][1])


@pytest.mark.parametrize("kind", [kind for kind in RULES if kind not in MOVES])
def test_clients_that_return_what_they_received_change_no_shared_value(kind: type[ServerRule]) -> None:
    part = part_of(kind)
    uploads = part.uploads
    count = len(uploads.clients)
    same = {name: value.expand(count, *value.shape).clone() for name, value in part.shared.items()}
    new = part.make().aggregate(part.round, part.shared, replace(uploads, values=uploads.values | same))
    assert_equal(part.shared | new, part.shared)


@pytest.mark.parametrize("kind", AVERAGING)
def test_identical_updates_come_back_bit_for_bit(kind: type[ServerRule]) -> None:
    part = part_of(kind)
    uploads = part.uploads
    first = {name: value[0].clone() for name, value in uploads.values.items()}
    identical = {name: value.expand(len(uploads.clients), *value.shape).clone() for name, value in first.items()}
    new = part.make().aggregate(part.round, part.shared, replace(uploads, values=identical))
    assert_equal(new, {name: first[name] for name in part.shared})
    assert not torch.equal(new["head.weight"], part.shared["head.weight"])


@pytest.mark.parametrize("kind", RULES)
def test_a_round_writes_into_nothing_that_was_handed_in(kind: type[ServerRule]) -> None:
    part = part_of(kind)
    uploads, rule = part.uploads, part.make()
    shared, values = copy.deepcopy(part.shared), copy.deepcopy(uploads.values)
    rule.broadcast(part.round, part.shared, uploads.clients)
    rule.aggregate(part.round, part.shared, uploads)
    assert_equal(part.shared, shared)
    assert_equal(uploads.values, values)


def tensors_in(state: Any, place: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a saved state, those of its extra state too, by where they stand."""
    if isinstance(state, torch.Tensor):
        return {place: state}
    parts = state.items() if isinstance(state, dict) else ()
    return {name: value for key, part in parts for name, value in tensors_in(part, f"{place}.{key}").items()}


@pytest.mark.parametrize("kind", RULES)
def test_a_rule_goes_on_from_its_saved_state(kind: type[ServerRule]) -> None:
    part = part_of(kind)
    rule, fresh = part.make(), part.make()
    assert rule is not fresh
    start = copy.deepcopy(saved(rule))
    shared = part.shared | rule.aggregate(part.round, part.shared, part.uploads)
    state = saved(rule)
    before, after = tensors_in(start), tensors_in(state)
    moved = before.keys() != after.keys() or any(not torch.equal(value, before[name]) for name, value in after.items())
    assert moved or any(not torch.equal(value, part.shared[name]) for name, value in shared.items())
    fresh.load_state_dict(state)
    everybody = tuple(range(part.simulation.terms.num_clients))
    for number in (2, 3):
        training = replace(part.round, number=number)
        for round, receivers in ((training, part.round.clients), (replace(training, clients=()), everybody)):
            sent = rule.broadcast(round, shared, receivers)
            assert_same_sent(fresh.broadcast(round, shared, receivers), sent)
        new = rule.aggregate(training, shared, part.uploads)
        assert_equal(fresh.aggregate(training, shared, part.uploads), new)
        shared = shared | new
    assert fresh.select(3) == rule.select(3)


@pytest.mark.parametrize("kind", RULES)
def test_a_client_receives_the_same_whoever_asks_with_it(kind: type[ServerRule]) -> None:
    part = part_of(kind)
    rule = part.make()
    rule.aggregate(part.round, part.shared, part.uploads)
    together = rule.broadcast(part.round, part.shared, part.round.clients)
    for row, client in enumerate(part.round.clients):
        alone = rule.broadcast(part.round, part.shared, (client,))
        assert_equal(alone.common, together.common)
        assert_equal(alone.rows(), {name: value[row : row + 1] for name, value in together.rows().items()})


@pytest.mark.parametrize("kind", RULES)
def test_one_client_makes_a_round(kind: type[ServerRule]) -> None:
    part = part_of(kind)
    rule, uploads = part.make(), part.uploads.of([1])
    round = Round(1, uploads.clients, part.round.seed)
    assert len(round.clients) == 1
    new = rule.aggregate(round, part.shared, uploads)
    assert set(new) <= set(part.shared)
    assert all(value.isfinite().all() and value.shape == part.shared[name].shape for name, value in new.items())
    if kind in AVERAGING:
        assert_equal(new, {name: uploads.values[name][0] for name in part.shared})
    sent = rule.broadcast(replace(round, number=2), part.shared | new, round.clients)
    assert all(len(value) == 1 and value.isfinite().all() for value in sent.own.values())


def test_a_rule_can_be_tested_alone() -> None:
    rule = ServerRule()
    rule.start({"w": torch.zeros(2)}, terms(3))
    round = Round(number=1, clients=(0, 2), seed=0)
    sent = rule.broadcast(round, {"w": torch.zeros(2)}, round.clients)
    arrived = [
        Parcel((2,), {"w": torch.tensor([[3.0, 6.0]])}, {}, {}),
        Parcel((0,), {"w": torch.tensor([[1.0, 2.0]])}, {}, {}),
    ]
    uploads = Uploads.gathered(arrived, {0: 1, 2: 3})
    new = rule.aggregate(round, sent.common, uploads)
    assert uploads.clients == (0, 2)
    assert new["w"].tolist() == [2.5, 5.0]


def test_rows_that_are_padding_do_not_travel() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    sent = Broadcast({"w": torch.zeros(2)}, {"others": torch.zeros(2, 3, 5)}, {"others": mask})
    assert [sum(part.numel() for part in sent.message(place)) for place in range(2)] == [12, 2]
    assert torch.equal(sent.rows()["others_mask"], mask)
