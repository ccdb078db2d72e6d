"""FedRoD: what each of its two terms trains, and what the counts of classes do."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit
from oracle import Images, Values, descend, federate, images_at, mini_batches, values_of
from torch import nn

from benchmark.contract import Client, MiniBatch
from benchmark.errors import ConfigurationError
from benchmark.federation import Round
from methods.fedrod import FedRoD, balanced_logits

ZERO = "--model.init_args.personal_init=zero"


def test_balanced_logits_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    made = balanced_logits(logits, torch.tensor([2, 1, 0]))
    torch.testing.assert_close(made, torch.tensor([[1 + 0.693147, 2.0, 0.5 - 18.420681]]))
    # p(0) = 2 e^1 / (2 e^1 + e^2): the class without images takes no part.
    p = 2 * torch.e / (2 * torch.e + torch.e**2)
    torch.testing.assert_close(made.softmax(1)[0, 0].item(), p, rtol=1e-6, atol=0)
    assert made.isfinite().all()


def test_equal_counts_are_plain_cross_entropy() -> None:
    logits, y = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 4, 0])
    balanced = F.cross_entropy(balanced_logits(logits, torch.full((5,), 7)), y)
    torch.testing.assert_close(balanced, F.cross_entropy(logits, y))


def terms(method: Any, data: Any) -> dict[str, torch.Tensor]:
    """Both losses of some images, with gradients into the method's own parameters."""
    data.setup()
    method.requires_grad_(True)
    with torch.no_grad():  # away from where both heads are one
        method.personal_head.weight += 0.1 * torch.randn(8, 192, generator=torch.Generator().manual_seed(1))
    x, y = data.transform(data.pool.images[:4], None), data.pool.labels[:4]
    counts = torch.tensor([5, 1, 0, 2, 9, 9, 1, 4])
    client = Client({}, {}, counts, Round(1, (), 0))
    return method.client_loss(client, MiniBatch(x, y, torch.ones(4, dtype=torch.bool)))[1]


def test_each_term_trains_its_own_parameters_alone() -> None:
    method, data = build("FedRoD")
    losses = terms(method, data)
    for loss, trains in (("generic_loss", ("backbone", "head.")), ("personal_loss", ("personal_head",))):
        method.zero_grad()
        losses[loss].backward(retain_graph=True)
        for name, parameter in method.named_parameters():
            moved = parameter.grad is not None and bool(parameter.grad.any())
            assert moved == name.startswith(trains), (loss, name)


def test_agrees_with_two_optimizers_client_by_client() -> None:
    everybody = "--data.clients_per_round=11"
    method, data = build("FedRoD", everybody)
    fit(method, data, 2)
    fresh, _ = build("FedRoD", everybody)
    model = nn.ModuleDict({"backbone": fresh.backbone, "head": fresh.head}).requires_grad_(True)
    personal = [copy.deepcopy(fresh.head).requires_grad_(True) for _ in range(11)]

    def train(client: int, round: int, shared: Values) -> Values:
        local, p = copy.deepcopy(model), personal[client]
        local.load_state_dict(shared)
        generic = torch.optim.SGD(local.parameters(), 0.02, momentum=0.5)
        own = torch.optim.SGD(p.parameters(), 0.02, momentum=0.5)
        counts = torch.bincount(data.pool.labels[torch.from_numpy(data.splits.train[client])], minlength=8)
        for batch in mini_batches(data, client, round, 2):
            z = local["backbone"](batch.x)
            logits = local["head"](z)
            generic.zero_grad()
            F.cross_entropy(logits + counts.clamp(min=1e-8).log(), batch.y).backward()
            own.zero_grad()
            F.cross_entropy(logits.detach() + p(z.detach()), batch.y).backward()
            generic.step()
            own.step()
        return values_of(local)

    expected = federate(method, data, 2, values_of(model), train)
    assert set(expected) == set(method.roles.shared)
    for name, value in expected.items():
        torch.testing.assert_close(method.get_parameter(name), value, rtol=1e-3, atol=5e-6)
    rows = method.store.all_rows("personal_head.weight")
    for client in range(11):
        torch.testing.assert_close(rows[client], personal[client].weight.detach(), rtol=1e-3, atol=5e-6)


def test_the_personal_head_starts_as_a_copy_or_at_zero() -> None:
    copied, _ = build("FedRoD")
    assert torch.equal(copied.personal_head.weight, copied.head.weight)
    assert torch.equal(copied.personal_head.bias, copied.head.bias)
    zero, data = build("FedRoD", ZERO)
    assert not zero.personal_head.weight.any()
    assert not zero.personal_head.bias.any()
    data.setup()
    x = data.transform(data.pool.images[:5], None)
    assert torch.equal(zero(x), zero.head(zero.backbone(x))), "personal and generic predictions agree"
    with pytest.raises(ConfigurationError, match="personal_init: expected copy or zero, got mean"):
        FedRoD(8, 11, copied.backbone, personal_init="mean")  # type: ignore[arg-type]


def test_it_sends_backbone_and_generic_head_and_is_tested_with_both_heads() -> None:
    method, data = build("FedRoD")
    trainer = fit(method, data, 2)
    model = sum(p.numel() for p in (*method.backbone.parameters(), *method.head.parameters()))
    assert method.server.traffic.per_client()["up_floats"] == model
    client = 4
    rows = torch.from_numpy(data.splits.test[client])
    z = method.backbone(data.transform(data.pool.images[rows], None))
    own = (method.store.all_rows(f"personal_head.{n}")[client] for n in ("weight", "bias"))
    loss = F.cross_entropy(method.head(z) + F.linear(z, *own), data.pool.labels[rows]).item()
    values = trainer.callbacks[0].values
    assert values[2, "server", "test", "loss"][client].item() == pytest.approx(loss, rel=1e-4)
    both = values[2, "local", "train", "generic_loss"] + values[2, "local", "train", "personal_loss"]
    torch.testing.assert_close(values[2, "local", "train", "loss"], both, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_new_client_fits_its_personal_head_on_the_shared_model() -> None:
    method, data = build("FedRoD", ZERO, "--data.new_clients=0.3", "--data.clients_per_round=4")
    trainer = fit(method, data, 1)
    client = data.new_clients[0]
    head = nn.Linear(192, 8)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.SGD(head.parameters(), 0.02, momentum=0.5)

    def loss(batch: Images) -> torch.Tensor:
        with torch.no_grad():
            z = method.backbone(batch.x)
        return F.cross_entropy(method.head(z).detach() + head(z), batch.y)

    descend(head, optimizer, loss, mini_batches(data, client, 0, 5, stage="adapt"))
    expected = loss(images_at(data, data.splits.test[client])).item()
    recorded = trainer.callbacks[0].values[1, "server", "new", "loss"][client].item()
    assert recorded == pytest.approx(expected, rel=1e-4)


def test_its_heads_alone_are_trained_on_kept_features() -> None:
    heads = ("--model.init_args.train_backbone=false", "--data.clients_per_round=11")
    method, data = build("FedRoD", *heads, "--data.cache_features=true")
    fit(method, data, 2)
    fresh, _ = build("FedRoD", *heads)
    for name, value in values_of(fresh.backbone).items():
        assert torch.equal(method.backbone.get_parameter(name), value), name
    with torch.no_grad():
        features = fresh.backbone(data.transform(data.pool.images, None))
    head, personal = copy.deepcopy(fresh.head).requires_grad_(True), [copy.deepcopy(fresh.head) for _ in range(11)]

    def train(client: int, round: int, received: Values) -> Values:
        local, p = copy.deepcopy(head), personal[client].requires_grad_(True)
        local.load_state_dict(received)
        both = torch.optim.SGD([*local.parameters(), *p.parameters()], 0.02, momentum=0.5)
        counts = torch.bincount(data.pool.labels[torch.from_numpy(data.splits.train[client])], minlength=8)
        for batch in mini_batches(data, client, round, 2):
            z = features[batch.rows]
            logits = local(z)
            balanced = F.cross_entropy(logits + counts.clamp(min=1e-8).log(), batch.y)
            both.zero_grad()
            (balanced + F.cross_entropy(logits.detach() + p(z), batch.y)).backward()
            both.step()
        return values_of(local)

    for name, value in federate(method, data, 2, values_of(head), train).items():
        torch.testing.assert_close(method.head.get_parameter(name), value, rtol=1e-3, atol=5e-6)
    rows = method.store.all_rows("personal_head.weight")
    for client in range(11):
        torch.testing.assert_close(rows[client], personal[client].weight.detach(), rtol=1e-3, atol=5e-6)
    assert method.server.traffic.per_client()["up_floats"] == sum(p.numel() for p in head.parameters())
