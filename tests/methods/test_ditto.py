"""Ditto: two optimizers side by side, a pull towards what was received, and heads on frozen features."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit
from oracle import Images, Values, descend, federate, images_at, mini_batches, values_of
from torch import Tensor, nn

EVERYBODY = "--data.clients_per_round=11"
HEADS = (
    "--model.init_args.backbone={class_path: federation.ShallowViT, init_args: {image_size: 32}}",
    "--model.init_args.train_backbone=false",
    EVERYBODY,
)


def pulled(model: nn.Module, received: Values, lam: float) -> Tensor:
    """The pull of a model to what its client received."""
    return lam / 2 * sum(((value - received[name]) ** 2).sum() for name, value in model.named_parameters())


def of_its_own(method: Any, client: int, part: str) -> Values:
    """Return what a client holds of a part of its own model, under the names that the part has."""
    names = [name for name in method.roles.personal if name.startswith(f"personal_{part}.")]
    return {name.removeprefix(f"personal_{part}."): method.store.all_rows(name)[client] for name in names}


def test_agrees_with_two_optimizers_client_by_client() -> None:
    method, data = build("Ditto", EVERYBODY)
    fit(method, data, 2)
    fresh, _ = build("Ditto", EVERYBODY)
    model = nn.ModuleDict({"backbone": fresh.backbone, "head": fresh.head}).requires_grad_(True)
    own = [copy.deepcopy(model) for _ in range(11)]

    def logits(of: Any, x: Tensor) -> Tensor:
        return of["head"](of["backbone"](x))

    def train(client: int, round: int, received: Values) -> Values:
        local = copy.deepcopy(model)
        local.load_state_dict(received)
        steps = [torch.optim.SGD(each.parameters(), 0.02, momentum=0.5) for each in (local, own[client])]
        for batch in mini_batches(data, client, round, 2):
            for optimizer, each, lam in zip(steps, (local, own[client]), (0.0, 0.5), strict=True):
                optimizer.zero_grad()
                (F.cross_entropy(logits(each, batch.x), batch.y) + pulled(each, received, lam)).backward()
                optimizer.step()
        return values_of(local)

    expected = federate(method, data, 2, values_of(model), train)
    assert set(expected) == set(method.roles.shared)
    for name, value in expected.items():
        torch.testing.assert_close(method.get_parameter(name), value, rtol=1e-3, atol=5e-6)
    for client in range(11):
        for part in ("backbone", "head"):
            for name, value in of_its_own(method, client, part).items():
                expected_value = own[client][part].get_parameter(name).detach()
                torch.testing.assert_close(value, expected_value, rtol=1e-3, atol=5e-6)


def test_its_heads_are_softmax_regressions_by_hand() -> None:
    method, data = build("Ditto", *HEADS)
    trainer = fit(method, data, 2)
    fresh, _ = build("Ditto", *HEADS)
    with torch.no_grad():
        features = fresh.backbone(data.transform(data.pool.images, None)).double()
    start = {name: value.double() for name, value in values_of(fresh.head).items()}
    own = [{name: value.clone() for name, value in start.items()} for _ in range(11)]

    def train(client: int, round: int, received: Values) -> Values:
        average = {name: value.clone() for name, value in received.items()}
        models, moments = (average, own[client]), [{name: 0.0 * v for name, v in start.items()} for _ in range(2)]
        for batch in mini_batches(data, client, round, 2):
            z = features[batch.rows]
            for values, moment, lam in zip(models, moments, (0.0, 0.5), strict=True):
                error = (F.softmax(z @ values["weight"].T + values["bias"], 1) - F.one_hot(batch.y, 8)) / len(z)
                gradients = {"weight": error.T @ z, "bias": error.sum(0)}
                for name, gradient in gradients.items():
                    moment[name] = 0.5 * moment[name] + gradient + lam * (values[name] - received[name])
                    values[name] -= 0.02 * moment[name]
        return average

    shared = federate(method, data, 2, start, train)
    for name, value in shared.items():
        torch.testing.assert_close(method.get_parameter(f"head.{name}").double(), value, rtol=1e-4, atol=1e-6)
    client = 4
    mine = of_its_own(method, client, "head")
    for name, value in own[client].items():
        torch.testing.assert_close(mine[name].double(), value, rtol=1e-4, atol=1e-6)
    rows = torch.from_numpy(data.splits.test[client])
    loss = F.cross_entropy(features[rows] @ own[client]["weight"].T + own[client]["bias"], data.pool.labels[rows])
    recorded = trainer.callbacks[0].values[2, "server", "test", "loss"][client].item()
    assert recorded == pytest.approx(loss.item(), rel=1e-4), "its own head is evaluated"
    assert method.server.traffic.per_client()["up_floats"] == sum(value.numel() for value in start.values())


def test_without_the_pull_each_client_trains_alone() -> None:
    method, data = build("Ditto", *HEADS, "--model.init_args.lam=0")
    fit(method, data, 2)
    of_one_size = "--data.source={class_path: federation.TinyImages, init_args: {size: 16}}"
    momentum = "--model.init_args.training.momentum=0.5"
    alone, data = build("HeadTune", "--model.init_args.head=personal", momentum, EVERYBODY, of_one_size)
    fit(alone, data, 2)
    rows = method.store.all_rows("personal_head.weight")
    torch.testing.assert_close(rows, alone.store.all_rows("head.weight"), rtol=1e-4, atol=1e-6)


def test_with_much_of_it_a_client_stays_near_what_it_received() -> None:
    received = build("Ditto", *HEADS)[0].head.weight
    distances = []
    for lam in (0.0, 5e3):
        method, data = build(
            "Ditto", *HEADS, "--model.init_args.training={lr: 1e-4, epochs: 8}", f"--model.init_args.lam={lam}"
        )
        fit(method, data, 1)
        distances.append((method.store.all_rows("personal_head.weight") - received).norm().item())
    assert 0 < distances[1] < 0.3 * distances[0]


def test_a_new_client_fits_its_own_head_pulled_to_the_average() -> None:
    method, data = build("Ditto", *HEADS[:2], "--data.new_clients=0.3", "--data.clients_per_round=4")
    trainer = fit(method, data, 1)
    fresh, _ = build("Ditto", *HEADS[:2])
    client = data.new_clients[0]
    head = copy.deepcopy(fresh.head).requires_grad_(True)
    received = values_of(method.head)

    def cross_entropy(batch: Images) -> Tensor:
        with torch.no_grad():
            z = method.backbone(batch.x)
        return F.cross_entropy(head(z), batch.y)

    optimizer = torch.optim.SGD(head.parameters(), 0.02, momentum=0.5)
    batches = mini_batches(data, client, 0, 5, stage="adapt")
    descend(head, optimizer, lambda batch: cross_entropy(batch) + pulled(head, received, 0.5), batches)
    expected = cross_entropy(images_at(data, data.splits.test[client])).item()
    recorded = trainer.callbacks[0].values[1, "server", "new", "loss"][client].item()
    assert recorded == pytest.approx(expected, rel=1e-4)
