"""What the engine offers to methods beyond the simple ones: phases, kept state, fine-tuning, noise, clipping."""

import copy
from typing import Any

import pytest
import torch
from federation import build, fit
from oracle import Images, descend, images_at, mini_batches
from torch import nn

from benchmark.errors import ConfigurationError
from benchmark.method import Client, Group, LocalTraining, MiniBatch, Phase
from methods.fedavg import FedAvg


def of_class(kind: type, *overrides: str, **arguments: Any) -> tuple[Any, Any]:
    """A method of this class with FedAvg's tiny backbone, and the tiny data."""
    template, data = build("FedAvg", *overrides)
    return kind(8, 11, template.backbone, LocalTraining(lr=0.02, epochs=1), **arguments), data


class TwoPhases(FedAvg):
    """First the head with momentum, then the backbone, each with its own epochs and rates."""

    shared = ("backbone",)
    personal = ("head",)
    seen: list[tuple[int, set[str]]]

    def local_phases(self) -> list[Phase]:
        return [
            Phase((Group(("head",), 0.1, momentum=0.9),), epochs=2),
            Phase(
                (Group(("backbone.convolutions",), 0.02), Group(("backbone.linear",), 0.01, weight_decay=0.1)), epochs=1
            ),
        ]


def test_phases_train_their_own_parameters_with_their_own_settings() -> None:
    method, data = of_class(TwoPhases, "--data.clients_per_round=11")
    start = copy.deepcopy(nn.ModuleDict({"backbone": method.backbone, "head": method.head}))
    fit(method, data, 1)
    client = 5
    local = copy.deepcopy(start).requires_grad_(True)
    optimizers = [
        torch.optim.SGD(local["head"].parameters(), 0.1, 0.9),
        torch.optim.SGD(
            [
                {"params": local["backbone"].convolutions.parameters(), "lr": 0.02},
                {"params": local["backbone"].linear.parameters(), "lr": 0.01, "weight_decay": 0.1},
            ],
            0.0,
        ),
    ]
    for batch in mini_batches(data, client, 1, 2, 1):
        loss = nn.functional.cross_entropy(local["head"](local["backbone"](batch.x)), batch.y)
        local.zero_grad()
        loss.backward()
        optimizers[batch.phase].step()
    torch.testing.assert_close(
        method.bank.all_rows("head.weight")[client], local["head"].weight.detach(), rtol=1e-4, atol=1e-6
    )


class Remembers(FedAvg):
    """Keeps the head of its previous round, and counts its rounds."""

    def kept_state(self) -> dict[str, torch.Tensor]:
        return {"previous": self.head.weight.detach().clone(), "rounds": torch.zeros(())}

    def after_local_training(self, client: Client) -> dict[str, torch.Tensor]:
        return {"previous": client.parameters["head.weight"], "rounds": client.kept["rounds"] + 1}

    def client_loss(self, client: Client, batch: MiniBatch) -> torch.Tensor:
        away = (self.head.weight - client.kept["previous"]).square().sum()
        return super().client_loss(client, batch) + 0.1 * away + 0 * client.received["head.weight"].sum()


def test_clients_keep_state_of_their_own_between_rounds() -> None:
    method, data = of_class(Remembers, "--data.clients_per_round=4")
    fit(method, data, 3)
    took_part = [sum(c in method.server.select(r) for r in (1, 2, 3)) for c in range(11)]
    assert method.bank.all_rows("kept.rounds").tolist() == took_part
    rows = method.bank.all_rows("kept.previous")
    never = [c for c in range(11) if not took_part[c]]
    assert never
    fresh, _ = of_class(Remembers)
    assert all(torch.equal(rows[c], fresh.head.weight) for c in never)
    assert not any(torch.equal(rows[c], fresh.head.weight) for c in range(11) if took_part[c])


class FineTuned(FedAvg):
    """Fine-tunes a copy of the head before it is evaluated."""

    def finetune_phases(self) -> list[Phase]:
        return [Phase((Group(("head",), 0.5),), epochs=3)]


def test_fine_tuning_happens_on_a_copy_that_is_evaluated() -> None:
    plain, data = of_class(FedAvg)
    fit(plain, data, 2)
    tuned, data = of_class(FineTuned)
    trainer = fit(tuned, data, 2)
    for name in plain.shared_names:
        assert torch.equal(plain.template(name), tuned.template(name))
    before = trainer.callbacks[0].values[2, "server", "test", "loss"]
    without = plain.trainer.callbacks[0].values[2, "server", "test", "loss"]
    assert (before - without).abs().mean() > 0.01
    # Client 7 by hand: three epochs of head-only SGD from the final model.
    client, head = 7, copy.deepcopy(tuned.head).requires_grad_(True)
    optimizer = torch.optim.SGD(head.parameters(), 0.5)

    def loss(batch: Images) -> torch.Tensor:
        return nn.functional.cross_entropy(head(tuned.backbone(batch.x).detach()), batch.y)

    descend(head, optimizer, loss, mini_batches(data, client, 0, 3, stage="finetune"))
    expected = loss(images_at(data, data.splits.test[client])).item()
    assert before[client].item() == pytest.approx(expected, rel=1e-4)


class Noisy(FedAvg):
    """Adds keyed noise to the images."""

    def draw_noise(self, generator: torch.Generator, batch_size: int, kind: str) -> dict[str, torch.Tensor]:
        return {"pixels": torch.randn(batch_size, 1, 1, 1, generator=generator)}

    def client_loss(self, client: Client, batch: MiniBatch) -> torch.Tensor:
        return super().client_loss(client, MiniBatch(batch.x + batch.noise["pixels"], batch.y, batch.mask, batch.phase))


def test_noise_is_a_clients_own_whatever_the_cohort() -> None:
    values = []
    for width in (1, 4):
        method, data = of_class(Noisy, f"--data.cohort_width={width}")
        fit(method, data, 1)
        values.append(method.template("head.weight").clone())
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=2e-5)
    plain, data = of_class(FedAvg)
    fit(plain, data, 1)
    assert (plain.template("head.weight") - values[0]).abs().max() > 1e-4


@pytest.mark.parametrize("width", [1, 3])
def test_unkeyed_randomness_in_a_step_is_refused(width: int) -> None:
    class Dropping(FedAvg):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(nn.functional.dropout(self.backbone(x), 0.5))

    method, data = of_class(Dropping, f"--data.cohort_width={width}")
    with pytest.raises(RuntimeError, match="random"):
        fit(method, data, 1)


def test_clipping_is_per_client() -> None:
    class Clipped(FedAvg):
        def local_phases(self) -> list[Phase]:
            return [Phase((Group(("backbone", "head"), 1.0),), epochs=1, clip=0.01)]

    overrides = ["--data.clients_per_round=11", "--data.batch_size=64"]  # one step a client
    method, data = of_class(Clipped, *overrides)
    start = {n: p.detach().clone() for n, p in (*method.named_parameters(),)}
    uploads: dict[int, dict[str, torch.Tensor]] = {}
    end = method.end_cohort
    method.end_cohort = lambda clients: uploads.update(made := end(clients)) or made
    fit(method, data, 1)
    for message in uploads.values():
        moved = torch.cat([(message[n] - start[n]).flatten() for n in message])
        assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("shared", "personal", "message"),
    [
        (("nothing",), (), "shared names 'nothing', which has no parameter"),
        (("backbone", "head"), ("head",), "in two of the roles"),
        (("head",), (), "trains frozen parameters"),
        (("backbone",), (), "trains frozen parameters"),
    ],
)
def test_roles_that_make_no_sense_are_refused(shared: tuple, personal: tuple, message: str) -> None:
    method, data = of_class(FedAvg)
    method.shared, method.personal = shared, personal
    with pytest.raises(ConfigurationError, match=message):
        fit(method, data, 1)


def test_a_trained_batch_norm_is_refused_and_a_frozen_one_is_not() -> None:
    method, data = of_class(FedAvg)
    method.backbone.linear.append(nn.BatchNorm1d(192))
    with pytest.raises(ConfigurationError, match="batch normalisation"):
        fit(method, data, 1)
    method, data = of_class(FedAvg)
    method.backbone.linear.append(nn.BatchNorm1d(192))
    method.shared = ("head",)
    method.local_phases = lambda: [LocalTraining(lr=0.1, epochs=1).phase("head")]
    mean = method.backbone.linear[-1].running_mean
    before = mean.clone()
    fit(method, data, 1)
    assert torch.equal(before, method.backbone.linear[-1].running_mean)


def test_frozen_parts_stay_in_evaluation_mode_while_training() -> None:
    method, data = build("FedVPT")
    modes: list[tuple[bool, bool]] = []
    loss = method.client_loss

    def spy(client: Client, batch: MiniBatch) -> torch.Tensor:
        modes.append((method.backbone.training, method.head.training))
        return loss(client, batch)

    method.client_loss = spy
    fit(method, data, 1)
    assert set(modes) == {(False, True)}


def test_adam_starts_empty_every_round() -> None:
    class WithAdam(FedAvg):
        def local_phases(self) -> list[Phase]:
            return [LocalTraining(lr=1e-3, epochs=1, optimizer="adam").phase("head")]

    method, data = of_class(WithAdam, "--data.clients_per_round=1", "--data.batch_size=64", "--data.cohort_width=1")
    before = method.head.weight.detach().clone()
    for rounds in (1, 2):
        method, data = of_class(WithAdam, "--data.clients_per_round=1", "--data.batch_size=64", "--data.cohort_width=1")
        fit(method, data, rounds)
        after = method.template("head.weight").clone()
        # Adam's very first step is lr times the sign of the gradient, whatever came before.
        step = (after - before).abs()
        moved = step[step > 1e-6]
        assert moved.median().item() == pytest.approx(1e-3, rel=1e-2)
        before = after
