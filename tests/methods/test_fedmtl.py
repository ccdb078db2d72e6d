"""FedMTL: the penalty against dense matrices, the whole method against a plain loop, its messages."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit
from oracle import Images, descend, mini_batches, selected
from torch import nn

from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round, Uploads, Values
from methods import FedMTL
from methods.losses import column_relation, squared_norm

FEW = ["--data.partition.init_args.num_clients=5", "--data.clients_per_round=3"]


def dense_trace(columns: torch.Tensor) -> torch.Tensor:
    """``tr(W Omega W^T)`` by matrices, W [P, m]."""
    m = columns.shape[1]
    omega = torch.eye(m) - torch.ones(m, 1) @ torch.ones(1, m) / m
    return torch.trace(columns @ omega @ columns.T)


def relation(columns: torch.Tensor, t: int) -> torch.Tensor:
    """Ours of column t, the parameters in two tensors."""
    others = [j for j in range(columns.shape[1]) if j != t]
    mean = columns[:, others].mean(1) if others else torch.zeros(len(columns))
    own = {"a": columns[:2, t], "b": columns[2:, t].reshape(-1, 1)}
    return column_relation(own, {"a": mean[:2], "b": mean[2:].reshape(-1, 1)}, columns.shape[1])


def test_relation_by_hand() -> None:
    # Columns (3, 0) and (1, 4): their mean is (2, 2), the squared distances to it 5 + 5; (1 - 1/2) * (2^2 + 4^2) = 10.
    columns = torch.tensor([[3.0, 1.0], [0.0, 4.0]])
    assert dense_trace(columns).item() == pytest.approx(10)
    own, other = {"w": columns[:, 0]}, {"w": columns[:, 1]}
    assert column_relation(own, other, 2).item() == 10
    assert squared_norm(own).item() == 9


@pytest.mark.parametrize("m", [1, 2, 5])
def test_relation_is_the_trace_but_for_a_constant(m: int) -> None:
    torch.manual_seed(0)
    columns, moved = torch.randn(6, m), torch.randn(6)
    for t in range(m):
        after = columns.clone()
        after[:, t] = moved
        dense = dense_trace(after) - dense_trace(columns)
        torch.testing.assert_close(relation(after, t) - relation(columns, t), dense, rtol=1e-4, atol=1e-5)
        leaf = columns.clone().requires_grad_()
        (expected,) = torch.autograd.grad(dense_trace(leaf), leaf)
        (ours,) = torch.autograd.grad(relation(leaf, t), leaf)
        torch.testing.assert_close(ours[:, t], expected[:, t], rtol=1e-4, atol=1e-5)


def test_equal_columns_have_no_relation_and_no_gradient() -> None:
    columns = torch.randn(6, 1).expand(6, 4)
    own, others = {"w": columns[:, 0].clone().requires_grad_()}, {"w": columns[:, 1]}
    value = column_relation(own, others, 4)
    value.backward()
    assert value.item() == 0
    assert own["w"].grad is not None
    assert not own["w"].grad.any()


def test_relation_does_not_know_what_all_columns_share() -> None:
    columns, shift = torch.randn(6, 4), torch.randn(6, 1)
    torch.testing.assert_close(relation(columns + shift, 1), relation(columns, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("classes", "scale"), [(10, 1e-7), (1000, 1e-8)])
def test_scale_of_the_penalty(classes: int, scale: float) -> None:
    # 815,892 and 1,006,962 parameters: floor(log10(P) + 1) is 6 and 7.
    backbone = build("FedAvg", "--model.init_args.backbone.init_args.image_size=32")[0].backbone
    assert FedMTL(classes, 3, backbone).scale == pytest.approx(scale, rel=1e-12)


def test_an_unknown_gradient_is_refused() -> None:
    backbone = build("FedAvg")[0].backbone
    with pytest.raises(ConfigurationError, match="mtl_grad: expected live or detached, got dead"):
        FedMTL(8, 3, backbone, mtl_grad="dead")  # type: ignore[arg-type]


def models_of(method: Any) -> dict[str, torch.Tensor]:
    return {n: method.store.all_rows(n).clone() for n in method.store.names}


def test_detached_is_local_training_bit_for_bit_and_live_is_not() -> None:
    local, data = build("Local", *FEW)
    fit(local, data, 2)
    expected = models_of(local)
    for kind, same in (("detached", True), ("live", False)):
        method, data = build("FedMTL", *FEW, f"--model.init_args.mtl_grad={kind}")
        method.scale = 0.01
        fit(method, data, 2)
        found = models_of(method)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n], expected[n]) for n in expected) == same


def by_hand(rounds: int, scale: float) -> list[nn.Module]:
    """Client after client, with all m columns of the penalty in every step."""
    method, data = build("FedMTL", *FEW)
    data.setup()
    group = method.local_phases()[0].groups[0]
    clients: list[nn.Module] = [nn.Sequential(method.backbone, method.head)] * 5
    for round in range(1, rounds + 1):
        chosen = selected(method, data, round)
        columns = [nn.utils.parameters_to_vector(clients[c].parameters()).detach() for c in chosen]
        trained = {}
        for t, client in enumerate(chosen):
            local = copy.deepcopy(clients[client])

            def loss(batch: Images, local: nn.Module = local, t: int = t, columns: list = columns) -> torch.Tensor:
                own = nn.utils.parameters_to_vector(local.parameters())
                w = torch.stack([*columns[:t], own, *columns[t + 1 :]], dim=1)
                omega = torch.eye(3) - torch.ones(3, 3) / 3
                return F.cross_entropy(local(batch.x), batch.y) + scale * ((w**2).sum() + ((w @ omega) * w).sum())

            optimizer = torch.optim.SGD(local.parameters(), group.lr, group.momentum)
            trained[client] = descend(local, optimizer, loss, mini_batches(data, client, round, 2))
        for client, model in trained.items():
            clients[client] = model
    return clients


def test_agrees_with_a_sequential_simulation() -> None:
    expected = by_hand(3, 0.05)
    method, data = build("FedMTL", *FEW)
    method.scale = 0.05
    fit(method, data, 3)
    for name, *values in zip(method.roles.uploaded, *(c.parameters() for c in expected), strict=True):
        rows = torch.stack([value.detach() for value in values])
        torch.testing.assert_close(method.store.all_rows(name), rows, rtol=1e-3, atol=2e-6)


def test_messages_are_the_columns_of_the_rounds_clients() -> None:
    method, data = build("FedMTL", *FEW)
    rule, name = method.make_server(), "backbone.linear.0.weight"
    method.make_server = lambda: rule
    send, collect = rule.broadcast, rule.aggregate
    last = {client: method.get_parameter(name).detach().clone() for client in range(5)}
    start, uploads = last[0], {}
    rounds: list[int] = []

    def broadcast(round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        sent = send(round, shared, clients)
        if round.clients:
            if round.number not in rounds:  # the round before is over
                rounds.append(round.number)
                last.update(uploads)
            selected = rule.select(round.number)
            columns = sent.common[f"columns.{name}"]
            assert len(columns) == 3
            assert all(torch.equal(columns[j], last[other]) for j, other in enumerate(selected))
            assert [selected[place] for place in sent.own["column"]] == list(clients)
        return sent

    def aggregate(round: Round, shared: Values, sent: Uploads) -> Values:
        uploads.update({client: sent.values[name][k].clone() for k, client in enumerate(sent.clients)})
        return collect(round, shared, sent)

    rule.broadcast, rule.aggregate = broadcast, aggregate
    fit(method, data, 3)
    assert rounds == [1, 2, 3]
    assert any(not torch.equal(value, start) for value in last.values())
    floats = sum(p.numel() for p in (*method.backbone.parameters(), *method.head.parameters()))
    assert method.server.traffic.per_client() == {
        "down_bytes": 4 * 3 * floats + 8,
        "up_bytes": 4 * floats,
        "down_floats": 3 * floats + 1,
        "up_floats": floats,
    }
    for client, message in uploads.items():
        assert torch.equal(method.store.all_rows(name)[client], message), "its own model is never overwritten"


def test_the_models_on_the_server_are_restored(tmp_path: Any) -> None:
    method, data = build("FedMTL", *FEW)
    fit(method, data, 1, save_to=tmp_path)
    resumed, data = build("FedMTL", *FEW)
    fit(resumed, data, 1, ckpt_path=f"{tmp_path}/checkpoints/last.ckpt")
    for name in method.roles.uploaded:
        rows = resumed.server.rule.models.all_rows(name)
        assert torch.equal(rows, method.server.rule.models.all_rows(name))
        assert not torch.equal(rows, method.get_parameter(name).expand_as(rows))
