"""Head-Tune: a convex problem on features that never change."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import EACH_ROUND, build, fit, learned
from oracle import Values, descend, federate, mini_batches, values_of

from benchmark.contract import Client, LocalTraining, MiniBatch
from benchmark.errors import ConfigurationError
from benchmark.federation import Round
from methods.fedavg import FedAvg
from methods.headtune import HeadTune


def features_of(method: Any, data: Any) -> torch.Tensor:
    """The backbone's features of the whole pool."""
    with torch.no_grad():
        return method.backbone(data.transform(data.pool.images, None))


def test_it_is_fedavg_of_a_linear_model() -> None:
    method, data = build("HeadTune")
    trainer = fit(method, data, 3)
    fresh, _ = build("HeadTune")
    features, labels = features_of(fresh, data), data.pool.labels

    def train(client: int, round: int, shared: Values) -> Values:
        w, b = shared["weight"].clone(), shared["bias"].clone()
        moment = [torch.zeros_like(w), torch.zeros_like(b)]
        for batch in mini_batches(data, client, round, 2):
            z = features[batch.rows].double()
            # The gradient of softmax regression, by hand.
            error = (F.softmax(z @ w.T + b, 1) - F.one_hot(batch.y, 8)) / len(z)
            for i, (value, gradient) in enumerate(((w, error.T @ z), (b, error.sum(0)))):
                moment[i] = 0.9 * moment[i] + gradient
                value -= 0.02 * moment[i]
        return {"weight": w, "bias": b}

    start = {name: value.double() for name, value in values_of(fresh.head).items()}
    weight, bias = federate(method, data, 3, start, train).values()
    torch.testing.assert_close(method.get_parameter("head.weight").double(), weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(method.get_parameter("head.bias").double(), bias, rtol=1e-4, atol=1e-6)
    for client in (0, 5):
        rows = torch.from_numpy(data.splits.test[client])
        loss = F.cross_entropy(features[rows].double() @ weight.T + bias, labels[rows]).item()
        recorded = trainer.callbacks[0].values[3, "server", "test", "loss"][client].item()
        assert recorded == pytest.approx(loss, rel=1e-4), "the global head is evaluated"
    sent = weight.numel() + bias.numel()
    assert method.server.traffic.per_client()["up_floats"] == sent


@pytest.mark.parametrize("more", [[], ["--data.transform.augment=fedbn", "--data.new_clients=0.3"]])
def test_cached_features_change_nothing(more: list[str]) -> None:
    results = []
    for cached in ("true", "false"):
        method, data = build("HeadTune", f"--data.cache_features={cached}", *more)
        shapes: list[torch.Size] = []
        loss = method.client_loss

        def spy(client: Client, batch: MiniBatch, loss: Any = loss, shapes: Any = shapes) -> torch.Tensor:
            shapes.append(batch.x.shape)
            return loss(client, batch)

        method.client_loss = spy
        fit(method, data, 3)
        # Augmented images are other ones in each step, also where copies are fitted; they are needed themselves.
        assert all((shape[1] == 0) == (cached == "true" and not more) for shape in shapes)
        assert not more or any("/new/" in name for name in learned(method))
        results.append(learned(method))
    for name, value in results[0].items():
        # Images go through the backbone in other batches, so sums may be taken in another order.
        torch.testing.assert_close(value, results[1][name], rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_objective_is_convex_in_the_head() -> None:
    method, data = build("HeadTune")
    data.setup()
    rows = torch.arange(24)
    features, y, mask = features_of(method, data)[rows], data.pool.labels[rows], torch.ones(24, dtype=torch.bool)
    batch = MiniBatch(torch.zeros(24, 0), y, mask, features={"features": features})

    def loss(head: dict[str, torch.Tensor]) -> float:
        counts = torch.zeros(8, dtype=torch.int64)
        client = Client(head, {}, counts, Round(1, (), 0))
        return torch.func.functional_call(_Loss(method), {f"method.{n}": v for n, v in head.items()}, (client, batch))

    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        one, two = (
            {n: torch.randn(p.shape, generator=generator) for n, p in method.named_parameters() if n.startswith("head")}
            for _ in range(2)
        )
        middle = {n: 0.3 * one[n] + 0.7 * two[n] for n in one}
        assert loss(middle) <= 0.3 * loss(one) + 0.7 * loss(two) + 1e-6


class _Loss(torch.nn.Module):
    def __init__(self, method: torch.nn.Module) -> None:
        super().__init__()
        self.method = method

    def forward(self, client: Client, batch: MiniBatch) -> Any:
        return self.method.client_loss(client, batch).item()


def test_at_rate_0_fedavg_of_the_whole_vit_predicts_as_its_untrained_head_does() -> None:
    tune, data = build("HeadTune", "--model.init_args.training.lr=0")
    values = fit(tune, data, 1, settings=EACH_ROUND).callbacks[0].values
    template, data = build("HeadTune")
    average = FedAvg(8, 11, template.backbone, training=LocalTraining(lr=0.0, epochs=1))
    expected = fit(average, data, 1).callbacks[0].values
    for metric in ("accuracy", "loss"):
        torch.testing.assert_close(
            values[1, "server", "test", metric], expected[1, "server", "test", metric], rtol=1e-5, atol=1e-6
        )
        # All clients have one model.
        assert torch.equal(values[0, "server", "test", metric], values[1, "server", "test", metric])


def test_a_new_client_fits_a_copy_of_the_global_head() -> None:
    method, data = build("HeadTune", "--data.new_clients=0.3", "--data.clients_per_round=4")
    trainer = fit(method, data, 1)
    features, labels = features_of(method, data), data.pool.labels
    client = data.new_clients[0]
    start = method.get_parameter("head.weight").clone()
    w, b = (method.get_parameter(f"head.{n}").clone().requires_grad_() for n in ("weight", "bias"))
    optimizer = torch.optim.SGD([w, b], lr=0.02, momentum=0.9)
    for batch in mini_batches(data, client, 0, 5, stage="adapt"):
        optimizer.zero_grad()
        F.cross_entropy(features[batch.rows] @ w.T + b, batch.y).backward()
        optimizer.step()
    rows = torch.from_numpy(data.splits.test[client])
    expected = F.cross_entropy(features[rows] @ w.T + b, labels[rows]).item()
    recorded = trainer.callbacks[0].values[1, "server", "new", "loss"][client].item()
    assert recorded == pytest.approx(expected, rel=1e-4)
    assert torch.equal(method.get_parameter("head.weight"), start)


def test_a_personal_head_is_headtune_of_one_client_and_is_never_sent() -> None:
    one = ("--data.partition.init_args.num_clients=1", "--data.clients_per_round=1")
    heads = {}
    for head in ("shared", "personal"):
        method, data = build("HeadTune", *one, f"--model.init_args.head={head}")
        fit(method, data, 2)
        heads[head] = method
    rows, shared = heads["personal"].store.all_rows("head.weight")[0], heads["shared"].get_parameter("head.weight")
    assert torch.equal(rows, shared)
    method, data = build("HeadTune", "--model.init_args.head=personal")
    fit(method, data, 2)
    assert method.server.traffic.per_client()["up_bytes"] == 0
    rows = method.store.all_rows("head.weight")
    assert not torch.equal(rows[0], rows[1])


def test_head_mu_is_fedprox_of_the_head() -> None:
    more = ("--model.init_args.head_mu=0.5", "--model.init_args.training.momentum=0")
    method, data = build("HeadTune", *more)
    fit(method, data, 2)
    fresh, _ = build("HeadTune")
    features = features_of(fresh, data).double()

    def train(client: int, round: int, received: Values) -> Values:
        w, b = received["weight"].clone(), received["bias"].clone()
        for batch in mini_batches(data, client, round, 2):
            z = features[batch.rows]
            error = (F.softmax(z @ w.T + b, 1) - F.one_hot(batch.y, 8)) / len(z)
            w = w - 0.02 * (error.T @ z + 0.5 * (w - received["weight"]))
            b = b - 0.02 * (error.sum(0) + 0.5 * (b - received["bias"]))
        return {"weight": w, "bias": b}

    start = {name: value.double() for name, value in values_of(fresh.head).items()}
    for name, value in federate(method, data, 2, start, train).items():
        torch.testing.assert_close(method.get_parameter(f"head.{name}").double(), value, rtol=1e-4, atol=1e-6)
    without, data = build("HeadTune", more[1], "--model.init_args.head_mu=0")
    plain, _ = build("HeadTune", more[1])
    for each in (without, plain):
        fit(each, data, 2)
    assert torch.equal(without.head.weight, plain.head.weight)
    assert not torch.equal(without.head.weight, method.head.weight)


def test_finetuning_fits_a_copy_that_is_thrown_away() -> None:
    options = "--model.init_args.head_finetuning={lr: 0.1, epochs: 3}"
    method, data = build("HeadTune", options)
    values = fit(method, data, 1, settings=EACH_ROUND).callbacks[0].values
    plain, _ = build("HeadTune")
    fit(plain, data, 1)
    assert torch.equal(method.head.weight, plain.head.weight), "the federation does not notice"
    client = 5
    features = features_of(method, data)
    head = copy.deepcopy(method.head).requires_grad_(True)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    descend(
        head,
        optimizer,
        lambda batch: F.cross_entropy(head(features[batch.rows]), batch.y),
        mini_batches(data, client, 0, 3, stage="finetune"),
    )
    rows = torch.from_numpy(data.splits.test[client])
    expected = F.cross_entropy(head(features[rows]), data.pool.labels[rows]).item()
    assert values[1, "server", "test", "loss"][client].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("given", [{"head_mu": 0.1}, {"head_finetuning": LocalTraining(lr=0.1)}])
def test_a_personal_head_has_nothing_to_start_from(given: dict[str, Any]) -> None:
    backbone = build("HeadTune")[0].backbone
    with pytest.raises(ConfigurationError, match="need the head that all share; leave them out, or give head=shared"):
        HeadTune(8, 11, backbone, head="personal", **given)
