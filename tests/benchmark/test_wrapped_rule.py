"""A server rule around any other one: what clients upload is clipped before the inner rule sees it."""

from dataclasses import replace
from typing import Any

import fedprompt
import pytest
import torch
from federation import build, fit, learned

import methods
from benchmark.delivery import Delivery
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Terms, Uploads, Values
from benchmark.run.callbacks import check_replaceable
from benchmark.server import Declared, ServerRule, WrappedRule
from methods.servers import FedAdam

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


class ClippedRule(WrappedRule):
    """Scales each client's update, all its tensors together, to at most a norm; all else is the inner rule's.

    Args:
        inner: None for the method's own.
        norm: the largest.
    """

    def __init__(self, inner: ServerRule | None = None, norm: float = 1.0) -> None:
        super().__init__(inner)
        self.norm = norm

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        # Of shared parameters their change is what a client tells, of all else the value itself.
        away = {name: rows - shared[name] if name in shared else rows for name, rows in uploads.values.items()}
        norms = torch.stack([rows.flatten(1).square().sum(1) for rows in away.values()]).sum(0).sqrt()
        scale = (self.norm / norms.clamp(min=1e-12)).clamp(max=1.0)
        clipped = {name: torch.einsum("s,s...->s...", scale, rows) for name, rows in away.items()}
        values = {name: shared[name] + rows if name in shared else rows for name, rows in clipped.items()}
        return self.wrapped.aggregate(round, shared, replace(uploads, values=values))


def joint_norms(shared: Values, uploads: Uploads) -> torch.Tensor:
    away = [(uploads.values[name] - value).flatten(1) for name, value in shared.items()]
    return torch.cat(away, dim=1).norm(dim=1)


def test_tensors_are_clipped_together_by_hand() -> None:
    # Client 0 moved by (3, 4), norm 5, and client 4 by (0, 0.5): it stays. Weights 1 and 3.
    shared = {"a": torch.tensor([1.0]), "b": torch.tensor([[2.0]])}
    values = {"a": torch.tensor([[4.0], [1.0]]), "b": torch.tensor([[[6.0]], [[2.5]]])}
    uploads = Uploads((0, 4), values, torch.tensor([1.0, 3.0], dtype=torch.float64))
    made = ClippedRule(ServerRule(), 1.0).aggregate(Round(1, (0, 4), 0), shared, uploads)
    torch.testing.assert_close(made, {"a": torch.tensor([1.15]), "b": torch.tensor([[2.575]])})


@pytest.mark.parametrize("conf", ["FedAvg", "PFedMoAP"])
def test_in_a_federation_no_update_is_longer(conf: str) -> None:
    method, data = build(conf)
    inner = method.make_server()
    seen: list[torch.Tensor] = []
    aggregate = inner.aggregate

    def noting(round: Round, shared: Values, uploads: Uploads) -> Any:
        seen.append(joint_norms(shared, uploads))
        return aggregate(round, shared, uploads)

    inner.aggregate = noting
    fit(method, data, 2, [Server(ClippedRule(inner, 0.01))])
    assert len(seen) == 2
    for norms in seen:
        assert len(norms) == 7
        assert norms.max().item() == pytest.approx(0.01, rel=1e-3)
    state = method.server.state_dict()["rule"]
    assert set(state) == {f"inner.{name}" for name in inner.state_dict()}


def test_a_norm_that_nobody_reaches_changes_nothing() -> None:
    method, data = build("FedAvg")
    fit(method, data, 2)
    wrapped, data = build("FedAvg")
    fit(wrapped, data, 2, [Server(ClippedRule(ServerRule(), 1e6))])
    expected, made = learned(method), learned(wrapped)
    assert set(expected) == set(made)
    for name, value in expected.items():
        torch.testing.assert_close(made[name], value, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_the_record_names_the_whole_chain_and_its_code() -> None:
    method, data = build("FedAvg", "--data.clients_per_round=2")
    rule = ClippedRule(ClippedRule(FedAdam(lr=0.1), 1.0), 2.0)
    record = fedprompt.fit(method, data, rounds=1, server=rule, accelerator="cpu", enable_progress_bar=False).record
    clipped = f"{ClippedRule.__module__}.ClippedRule"
    assert record.server == record.other_server == f"{clipped}({clipped}(methods.servers.FedAdam))"
    assert record.default_server == "benchmark.server.ServerRule"
    assert {ClippedRule.__module__, "methods.servers"} < set(record.code or ())


class Passes(Delivery):
    """Hands on what is sent, as if it had looked at it."""

    def arrive(self, round: Round, sent: Uploads) -> Uploads:
        return sent.of(range(len(sent.clients)))


@pytest.mark.parametrize("conf", sorted(set(methods.__all__) - {"ZeroShotCLIP"}))
def test_an_idle_wrapped_rule_and_an_idle_delivery_change_no_bit(conf: str) -> None:
    method, data = build(conf)
    fit(method, data, 1, evaluate=False)
    wrapped, data = build(conf)
    own = type(wrapped.make_server())
    fit(wrapped, data, 1, [Server(WrappedRule(WrappedRule()), Passes())], evaluate=False)
    assert wrapped.server.rule.title == f"WrappedRule(WrappedRule({own.__name__}))"
    expected, made = learned(method), learned(wrapped)
    renamed = {name.replace(".inner.inner.", "."): value for name, value in made.items()}
    assert set(expected) == set(renamed)
    for name, value in expected.items():
        # Without a delivery that looks at uploads the mean takes a few parameters at a time; its sums are the same.
        torch.testing.assert_close(renamed[name], value, rtol=0, atol=0, equal_nan=True)


def test_a_rule_around_any_takes_the_place_of_a_methods_own_server() -> None:
    method, _ = build("PFedPG")
    check_replaceable(method, ClippedRule(), [])
    with pytest.raises(ConfigurationError, match="PFedPG has a server of its own, GeneratorRule"):
        check_replaceable(method, ClippedRule(ServerRule()), [])


class Choosy(ServerRule):
    """Serves no method with personal parameters."""

    def accept(self, method: Declared) -> str | None:
        return f"{', '.join(method.personal)} stays with its client" if method.personal else None


def test_a_rule_that_cannot_serve_a_method_says_so_before_training() -> None:
    method, data = build("FedPer")
    with pytest.raises(
        ConfigurationError, match=r"ClippedRule\(Choosy\) cannot serve FedPer: .* stays with its client"
    ):
        fit(method, data, 1, [Server(ClippedRule(Choosy()))])


class SelectsByResult(ServerRule):
    """Selects by how far the last round has moved the first shared value."""

    def start(self, initial: Values, terms: Terms) -> None:
        super().start(initial, terms)
        self.register_buffer("moved", torch.zeros(()))
        self.order: list[str] = []

    def select(self, number: int) -> list[int]:
        self.order.append(f"select {number} after {self.moved.item():.6f}")
        return [0, 3] if self.moved > 0 else [1, 5, 7]

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        new = super().aggregate(round, shared, uploads)
        name = next(iter(new))
        self.moved.copy_((new[name] - shared[name]).abs().sum())
        return new


def test_a_wrapped_rule_that_selects_by_the_result_is_asked_after_aggregation() -> None:
    method, data = build("FedAvg")
    rule = SelectsByResult()
    fit(method, data, 3, [Server(WrappedRule(rule))])
    assert [said.partition(" after ")[0] for said in rule.order] == ["select 1", "select 2", "select 3"]
    assert rule.order[0].endswith("0.000000")
    assert not rule.order[1].endswith("0.000000")
    assert [row[0] for row in method.server.traffic.rounds] == [3, 2, 2]
