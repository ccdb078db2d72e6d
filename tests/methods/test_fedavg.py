"""FedAvg, FedProx and Local against plain PyTorch loops that know nothing of the engine."""

import copy

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit
from oracle import Images, Values, descend, federate, mini_batches, values_of
from torch import nn

from methods.losses import cross_entropy, masked_mean, squared_distance


def one_after_another(conf: str, rounds: int, mu: float = 0.0, share: bool = True) -> tuple[Values, list[nn.Module]]:
    """The shared model and every client's own, with whole copies of the model."""
    method, data = build(conf)
    data.setup()
    group = method.local_phases()[0].groups[0]
    model = nn.Sequential(method.backbone, method.head)
    clients = [copy.deepcopy(model) for _ in range(11)]

    def train(client: int, round: int, shared: Values) -> Values:
        local = copy.deepcopy(clients[client])
        if share:
            local.load_state_dict(shared)
        received = values_of(local)

        def loss(batch: Images) -> torch.Tensor:
            pull = sum(((p - received[name]) ** 2).sum() for name, p in local.named_parameters())
            return F.cross_entropy(local(batch.x), batch.y) + (mu / 2 * pull if mu else 0)

        optimizer = torch.optim.SGD(local.parameters(), group.lr, group.momentum, weight_decay=group.weight_decay)
        descend(local, optimizer, loss, mini_batches(data, client, round, 2))
        clients[client] = local
        return values_of(local)

    return federate(method, data, rounds, values_of(model), train), clients


@pytest.mark.parametrize(("conf", "mu"), [("FedAvg", 0.0), ("FedProx", 0.3)])
def test_agrees_with_a_sequential_simulation(conf: str, mu: float) -> None:
    expected, _ = one_after_another(conf, 2, mu)
    method, data = build(conf)
    fit(method, data, 2)
    for name, value in zip(method.roles.shared, expected.values(), strict=True):
        torch.testing.assert_close(method.get_parameter(name), value, rtol=1e-4, atol=1e-6)


def test_local_continues_from_its_own_state_and_sends_nothing() -> None:
    _, clients = one_after_another("Local", 2, share=False)
    method, data = build("Local")
    fit(method, data, 2)
    for k, client in enumerate(clients):
        for name, value in zip(method.roles.personal, client.parameters(), strict=True):
            torch.testing.assert_close(method.store.all_rows(name)[k], value.detach(), rtol=1e-4, atol=1e-6)
    assert method.server.traffic.per_client() == dict.fromkeys(
        ("down_bytes", "up_bytes", "down_floats", "up_floats"), 0
    )


def test_one_full_batch_step_of_everybody_is_one_step_of_pooled_sgd() -> None:
    settings = ["--data.clients_per_round=11", "--data.batch_size=64", "--model.init_args.training.epochs=1"]
    method, data = build("FedAvg", *settings, "--model.init_args.training.momentum=0")
    fit(method, data, 1)
    fresh, data = build("FedAvg", *settings)
    data.setup()
    rows = torch.cat([torch.from_numpy(data.train_indices[c]) for c in range(11)])
    loss = F.cross_entropy(fresh(data.transform(data.pool.images[rows], None)), data.pool.labels[rows])
    fresh.requires_grad_(True)
    for name, gradient in zip(
        method.roles.shared,
        torch.autograd.grad(loss, [*fresh.backbone.parameters(), *fresh.head.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(
            method.get_parameter(name), fresh.get_parameter(name) - 0.02 * gradient, rtol=1e-4, atol=1e-7
        )


ONE = ["--data.partition.init_args.num_clients=1", "--data.clients_per_round=1"]


def test_with_one_client_fedavg_is_local_training_and_plain_sgd() -> None:
    avg, data = build("FedAvg", *ONE)
    fit(avg, data, 2)
    local, data = build("Local", *ONE)
    fit(local, data, 2)
    plain, data = build("FedAvg", *ONE)
    data.setup()
    model = nn.Sequential(plain.backbone, plain.head)
    for round in (1, 2):
        optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.5)
        batches = mini_batches(data, 0, round, 2)
        descend(model, optimizer, lambda batch: F.cross_entropy(model(batch.x), batch.y), batches)
    for name, value in zip(avg.roles.shared, model.parameters(), strict=True):
        assert torch.equal(avg.get_parameter(name), local.store.all_rows(name)[0])
        torch.testing.assert_close(avg.get_parameter(name), value.detach(), rtol=1e-4, atol=1e-6)


def test_a_client_of_local_does_not_know_the_others_data() -> None:
    # With cohorts of one: stacked clients are summed in another order.
    settings = ["--data.clients_at_once=1", "--data.clients_per_round=11"]
    method, data = build("Local", *settings)
    fit(method, data, 2)
    other, data = build("Local", *settings)
    data.setup()
    mine = torch.zeros(len(data.pool.labels), dtype=torch.bool)
    mine[torch.from_numpy(data.train_indices[2])] = True
    data.pool.images[~mine] = 255 - data.pool.images[~mine]
    fit(other, data, 2)
    for name in method.roles.personal:
        before, after = method.store.all_rows(name), other.store.all_rows(name)
        assert torch.equal(before[2], after[2])
        assert not torch.equal(before[3], after[3])


def test_fedproxs_step_by_hand() -> None:
    # w = 2, w^t = 1, g = 3, eta = 0.1, mu = 0.5: 2 - 0.1 * (3 + 0.5 * 1) = 1.65.
    w = torch.tensor([2.0], requires_grad=True)
    (3 * w.sum() + 0.5 / 2 * squared_distance({"w": w}, {"w": torch.tensor([1.0])})).backward()
    assert w.grad is not None
    assert (w - 0.1 * w.grad).item() == pytest.approx(1.65)


def test_fedproxs_first_step_is_fedavgs_and_its_second_is_not() -> None:
    for epochs, same in ((1, True), (2, False)):
        settings = ["--data.batch_size=64", f"--model.init_args.training.epochs={epochs}"]
        prox, data = build("FedProx", *settings)
        fit(prox, data, 1)
        avg, data = build("FedAvg", *settings, "--model.init_args.training.momentum=0")
        fit(avg, data, 1)
        assert all(torch.equal(prox.get_parameter(n), avg.get_parameter(n)) for n in avg.roles.shared) == same


def test_fedprox_without_mu_is_fedavg_bit_for_bit() -> None:
    prox, data = build("FedProx", "--model.init_args.mu=0", "--model.init_args.training.momentum=0.5")
    fit(prox, data, 2)
    avg, data = build("FedAvg")
    fit(avg, data, 2)
    for name in avg.roles.shared:
        assert torch.equal(prox.get_parameter(name), avg.get_parameter(name))


def test_fedproxs_pull_is_zero_at_the_received_model_and_shrinks_the_distance() -> None:
    anchor = {"w": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.5])}
    w = {"w": torch.tensor([2.0, 0.0], requires_grad=True), "b": torch.tensor([0.5], requires_grad=True)}
    distance = squared_distance(w, anchor)
    assert distance.item() == 1 + 4
    eta, mu = 0.1, 2.0
    (mu / 2 * distance).backward()
    after = {n: (v - eta * v.grad).detach() for n, v in w.items() if v.grad is not None}
    assert squared_distance(after, anchor).sqrt().item() == pytest.approx((1 - eta * mu) * 5**0.5)
    still = {n: v.clone().requires_grad_() for n, v in anchor.items()}
    squared_distance(still, anchor).backward()
    assert all(v.grad is not None and not v.grad.any() for v in still.values())


def test_cross_entropy_leaves_padded_rows_out() -> None:
    logits = torch.tensor([[0.0, 0.0], [5.0, -5.0], [1.0, 3.0]])
    mask = torch.tensor([True, False, True])
    y = torch.tensor([0, -100, 0])
    expected = (torch.log(torch.tensor(2.0)) + torch.log(1 + torch.exp(torch.tensor(2.0)))) / 2
    torch.testing.assert_close(cross_entropy(logits, y, mask), expected)
    assert masked_mean(torch.ones(2), torch.zeros(2, dtype=torch.bool)) == 0


def test_counts_of_a_message() -> None:
    method, data = build("FedAvg")
    fit(method, data, 1)
    floats = sum(p.numel() for p in (*method.backbone.parameters(), *method.head.parameters()))
    assert method.server.traffic.per_client() == {
        "down_bytes": 4 * floats,
        "up_bytes": 4 * floats,
        "down_floats": floats,
        "up_floats": floats,
    }
