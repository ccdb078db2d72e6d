"""Per-FedAvg against plain PyTorch with two explicit backward passes a step."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from federation import EACH_ROUND, build, fit
from oracle import Values, federate, images_at, mini_batches, values_of
from torch import nn

from benchmark.contract import Client, LocalTraining, MiniBatch
from benchmark.engine.device.capacity import bytes_per_client
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round
from methods.fedavg import FedAvg
from methods.perfedavg import PerFedAvg

ARGUMENT = "--model.init_args"


def one_after_another(rounds: int, alpha: float) -> Values:
    """The shared model, client by client."""
    method, data = build("PerFedAvg")
    model = nn.Sequential(method.backbone, method.head).requires_grad_(True)

    def train(client: int, round: int, shared: Values) -> Values:
        local = copy.deepcopy(model)
        local.load_state_dict(shared)
        optimizer = torch.optim.SGD(local.parameters(), 0.02, momentum=0.5)
        for _, x, y, _ in mini_batches(data, client, round, 2):
            start = copy.deepcopy(local.state_dict())
            if len(y) > 1:
                local.zero_grad()
                F.cross_entropy(local(x[1::2]), y[1::2]).backward()
                with torch.no_grad():
                    for p in local.parameters():
                        p -= alpha * p.grad
            local.zero_grad()
            F.cross_entropy(local(x[0::2]), y[0::2]).backward()
            local.load_state_dict(start)
            nn.utils.clip_grad_norm_(local.parameters(), 1.0)
            optimizer.step()
        return values_of(local)

    return federate(method, data, rounds, values_of(model), train)


@pytest.mark.parametrize("width", [1, 4])
def test_agrees_with_two_backward_passes_client_by_client(width: int) -> None:
    expected = one_after_another(2, 0.05)
    method, data = build("PerFedAvg", f"--data.clients_at_once={width}")
    fit(method, data, 2)
    for name, value in zip(method.roles.shared, expected.values(), strict=True):
        torch.testing.assert_close(method.get_parameter(name), value, rtol=1e-4, atol=2e-6)


class SecondHalves(FedAvg):
    """FedAvg on every second image of a mini-batch."""

    def client_loss(self, client: Client, batch: MiniBatch) -> torch.Tensor:
        half = replace(batch, x=batch.x[::2], y=batch.y[::2], mask=batch.mask[::2])
        return super().client_loss(client, half)


def test_without_inner_steps_it_is_fedavg_on_the_second_halves() -> None:
    method, data = build("PerFedAvg", f"{ARGUMENT}.inner_lr=0")
    fit(method, data, 2)
    template, data = build("PerFedAvg")
    halves = SecondHalves(8, 11, template.backbone, training=template.training_settings)
    fit(halves, data, 2)
    for name in method.roles.shared:
        torch.testing.assert_close(method.get_parameter(name), halves.get_parameter(name), rtol=1e-5, atol=1e-7)


def test_an_inner_step_makes_a_difference_and_an_outer_rate_of_0_none() -> None:
    for arguments, moves in (((), True), ((f"{ARGUMENT}.training.lr=0",), False)):
        method, data = build("PerFedAvg", *arguments)
        start = {n: p.detach().clone() for n, p in method.named_parameters()}
        fit(method, data, 2)
        assert all(torch.equal(method.get_parameter(n), start[n]) != moves for n in method.roles.shared)
    with_step, data = build("PerFedAvg")
    fit(with_step, data, 1)
    without, data = build("PerFedAvg", f"{ARGUMENT}.inner_lr=0")
    fit(without, data, 1)
    assert (with_step.get_parameter("head.weight") - without.get_parameter("head.weight")).abs().max() > 1e-5


@pytest.mark.parametrize("images", [1, 2, 3, 4])
def test_the_halves_of_a_padded_batch(images: int) -> None:
    method, data = build("PerFedAvg")
    data.setup()
    x, y = data.transform(data.pool.images[:4], None), data.pool.labels[:4]
    mask = torch.arange(4) < images
    parameters = {n: p.detach().clone().requires_grad_() for n, p in method.named_parameters()}
    prepared = {"inner_lr": torch.tensor(0.05)}
    client = Client(parameters, {}, torch.zeros(8), Round(1, (), 0), prepared=prepared)
    loss = method.client_loss(client, MiniBatch(x, y.masked_fill(~mask, -100), mask))
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    # By hand: rows 1, 3 are b1 and rows 0, 2 are b2, as far as they hold images.
    first, second = ([i for i in rows if i < images] for rows in ((1, 3), (0, 2)))
    model = nn.Sequential(method.backbone, method.head).requires_grad_(True)
    if first:
        F.cross_entropy(model(x[first]), y[first]).backward()
        for p in model.parameters():
            p.data -= 0.05 * p.grad
        model.zero_grad()
    expected = F.cross_entropy(model(x[second]), y[second])
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("steps", ["step", "epoch"])
def test_a_copy_takes_its_steps_before_the_test_and_the_model_stays(steps: str) -> None:
    method, data = build("PerFedAvg", f"{ARGUMENT}.personal_steps={steps}")
    trainer = fit(method, data, 1, settings=EACH_ROUND)
    other, data = build("PerFedAvg")
    fit(other, data, 1)
    assert all(torch.equal(method.get_parameter(n), other.get_parameter(n)) for n in method.roles.shared)
    client = 7  # 10 images, three mini-batches
    local = nn.Sequential(copy.deepcopy(method.backbone), copy.deepcopy(method.head)).requires_grad_(True)
    batches = list(mini_batches(data, client, 0, 1, stage="finetune"))
    assert len(batches) == 3
    for batch in batches[: 1 if steps == "step" else 3]:
        local.zero_grad()
        F.cross_entropy(local(batch.x), batch.y).backward()
        for p in local.parameters():
            p.data -= 0.05 * p.grad
    tested = images_at(data, data.splits.test[client])
    loss = F.cross_entropy(local(tested.x), tested.y).item()
    recorded = trainer.callbacks[0].values[1, "server", "test", "loss"][client].item()
    assert recorded == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("width", [1, 2])
def test_mini_batches_of_one_image_are_fedavgs(width: int) -> None:
    results = []
    for conf in ("PerFedAvg", "FedAvg"):
        clip = "--model.init_args.training.clip=1"
        method, data = build(conf, "--data.batch_size=1", f"--data.clients_at_once={width}", clip)
        fit(method, data, 1)
        results.append(method)
    per, average = results
    for name in per.roles.shared:
        torch.testing.assert_close(per.get_parameter(name), average.get_parameter(name), rtol=1e-5, atol=1e-7)


def test_the_inner_rate_is_that_of_training_unless_given() -> None:
    template, _ = build("PerFedAvg")
    training = LocalTraining(lr=0.03)
    assert PerFedAvg(8, 11, template.backbone, training=training).inner_lr == 0.03
    assert PerFedAvg(8, 11, template.backbone, training=training, inner_lr=0.0).inner_lr == 0


def test_bad_arguments_are_refused() -> None:
    template, _ = build("PerFedAvg")
    with pytest.raises(ConfigurationError, match=r"inner_lr: expected a number from 0 on or null, got -0\.1"):
        PerFedAvg(8, 11, template.backbone, inner_lr=-0.1)
    with pytest.raises(ConfigurationError, match="personal_steps: expected step or epoch, got two"):
        PerFedAvg(8, 11, template.backbone, personal_steps="two")  # type: ignore[arg-type]


def test_memory_of_a_client_can_be_measured() -> None:
    method, data = build("PerFedAvg")
    data.setup()
    simulation = method.join(data)
    model = sum(p.numel() * p.element_size() for p in (*method.backbone.parameters(), *method.head.parameters()))
    assert bytes_per_client(simulation, {1: Broadcast(common=simulation.shared())}, 4)[0] > 4 * model
