"""The engine's offers to methods beyond the simple ones: phases, remembered values, fine-tuning, noise, clipping."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from federation import EACH_ROUND, Witness, build, fit
from oracle import Images, descend, images_at, mini_batches
from timm.layers import DropPath
from torch import nn

from benchmark.contract import Client, Group, LocalTraining, Loss, MiniBatch, Phase, Stage
from benchmark.engine.cohort import Cohort
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round
from benchmark.method import FederatedMethod
from benchmark.seeds import global_states
from methods.fedavg import FedAvg
from methods.losses import cross_entropy


def of_class(kind: type, *overrides: str, **arguments: Any) -> tuple[Any, Any]:
    """A method of this class with FedAvg's tiny backbone, and the tiny data."""
    template, data = build("FedAvg", *overrides)
    return kind(8, 11, template.backbone, training=LocalTraining(lr=0.02, epochs=1), **arguments), data


class TwoPhases(FedAvg):
    """First the head with momentum, then the backbone, each with its own epochs and rates."""

    shared = ("backbone",)
    personal = ("head",)

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
        method.store.all_rows("head.weight")[client], local["head"].weight.detach(), rtol=1e-4, atol=1e-6
    )


class Remembers(FedAvg):
    """Is pulled towards the head of its previous round, and reports it and whether there was one."""

    remembers = ("head",)

    def client_loss(self, client: Client, batch: MiniBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert set(client.previous) == {"head.weight", "head.bias"}
        previous = client.previous["head.weight"]
        away = (self.head.weight - previous).square().sum()
        loss = super().client_loss(client, batch) + 0.1 * away + 0 * client.received["head.weight"].sum()
        return loss, {"previous": previous.sum(), "participated": client.participated.float()}


def test_clients_remember_their_own_values_of_their_last_round() -> None:
    method, data = of_class(Remembers, "--data.clients_per_round=4")
    witness, (fresh, _) = Witness(), of_class(Remembers)
    initial = fresh.head.weight.detach()
    recorded = fit(method, data, 3, [Server(witness)], settings=EACH_ROUND).callbacks[0].values
    last: dict[int, torch.Tensor] = {}
    for round, uploads in enumerate(witness.seen, start=1):
        chosen = list(uploads.clients)
        assert chosen == method.server.rule.select(round)
        seen = {name: recorded[round, "local", "train", name] for name in ("previous", "participated")}
        assert seen["participated"][chosen].tolist() == [client in last for client in chosen]
        expected = [last.get(client, initial).sum().item() for client in chosen]
        assert seen["previous"][chosen].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        last |= dict(zip(chosen, uploads.values["head.weight"], strict=True))
    never = [client for client in range(11) if client not in last]
    assert never
    assert len(last) < 3 * 4, "somebody takes part twice"
    rows = method.store.all_rows("last.head.weight")
    assert method.store.all_rows("participated").tolist() == [client in last for client in range(11)]
    assert all(torch.equal(rows[client], last.get(client, initial)) for client in range(11))
    assert not any(torch.equal(rows[client], initial) for client in last)


class LastLayer(FederatedMethod):
    """Has a personal layer of any name, and reports whether the client has been there before."""

    shared = ("body",)

    def __init__(self, num_clients: int, name: str) -> None:
        super().__init__(num_clients)
        self.personal = (name,)
        self.body = nn.Linear(3 * 16 * 16, 4)
        self.add_module(name, nn.Linear(4, 8))
        self.training_settings = LocalTraining(lr=0.05, epochs=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.personal[0])(self.body(x.flatten(1)))

    def client_loss(self, client: Client, batch: MiniBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = super().client_loss(client, batch)
        assert isinstance(loss, torch.Tensor)
        return loss, {"participated": client.participated.float()}


def test_a_personal_layer_is_kept_whatever_its_name() -> None:
    rows = {}
    for name in ("head", "last", "momentum"):
        torch.manual_seed(0)
        _, data = build("FedAvg", "--data.clients_per_round=4")
        method = LastLayer(11, name)
        trainer = fit(method, data, 3)
        rows[name] = method.store.all_rows(f"{name}.weight")
        moved = (rows[name] != method.get_parameter(f"{name}.weight")).flatten(1).any(1)
        took_part = {client for number in (1, 2, 3) for client in method.server.rule.select(number)}
        assert {client for client in range(11) if moved[client]} == took_part
        assert torch.equal(rows[name], rows["head"])
        # What a client did before is known without remembering anything of it.
        known = trainer.callbacks[0].values[3, "local", "train", "participated"]
        before = {client for number in (1, 2) for client in method.server.rule.select(number)}
        assert {client: known[client].item() for client in method.server.rule.select(3)} == {
            client: float(client in before) for client in method.server.rule.select(3)
        }


def test_a_name_by_which_clients_keep_something_else_is_refused() -> None:
    class Twice(LastLayer):
        """Has the name of what is kept of another parameter."""

        remembers = ("body",)

        def __init__(self, num_clients: int) -> None:
            super().__init__(num_clients, "last")
            self.last.add_module("body", nn.Linear(2, 2))

    _, data = build("FedAvg")
    with pytest.raises(ConfigurationError, match=r"the personal parameter last\.body\.weight of Twice has the name of"):
        fit(Twice(11), data, 1)


def test_what_clients_report_is_summed_in_float32() -> None:
    cohort = Cohort((0, 1), Stage.TRAIN, Round(1, (0, 1), 0), {}, Broadcast(), {}, torch.zeros(2), torch.zeros(2, 8))
    for _ in range(1000):
        cohort.report({"near": torch.full((2,), 0.3, dtype=torch.bfloat16), "yes": torch.tensor([True, False])})
        cohort.report({"count": torch.full((1,), 2**24 + 1)})
    near, _ = cohort.totals["near"]
    assert near.tolist() == pytest.approx([1000 * float(torch.tensor(0.3, dtype=torch.bfloat16))] * 2, rel=1e-5)
    assert cohort.totals["yes"][0].tolist() == [1000, 0]
    assert cohort.totals["count"][0].tolist() == [1000 * (2**24 + 1), 0]


class FineTuned(FedAvg):
    """Fine-tunes a copy of the head before it is evaluated."""

    def finetune_phases(self, new: bool) -> list[Phase]:
        return [Phase((Group(("head",), 0.5),), epochs=3)]


def test_fine_tuning_happens_on_a_copy_that_is_evaluated() -> None:
    plain, data = of_class(FedAvg)
    fit(plain, data, 2)
    tuned, data = of_class(FineTuned)
    trainer = fit(tuned, data, 2, settings=EACH_ROUND)
    for name in plain.roles.shared:
        assert torch.equal(plain.get_parameter(name), tuned.get_parameter(name))
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

    def draw_noise(self, generator: torch.Generator, batch_size: int, stage: Stage) -> dict[str, torch.Tensor]:
        return {"pixels": torch.randn(batch_size, 1, 1, 1, generator=generator)}

    def client_loss(self, client: Client, batch: MiniBatch) -> torch.Tensor:
        return super().client_loss(client, MiniBatch(batch.x + batch.noise["pixels"], batch.y, batch.mask, batch.phase))


def test_noise_is_a_clients_own_whatever_the_cohort() -> None:
    values = []
    for width in (1, 4):
        method, data = of_class(Noisy, f"--data.clients_at_once={width}")
        fit(method, data, 1)
        values.append(method.get_parameter("head.weight").clone())
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=2e-5)
    plain, data = of_class(FedAvg)
    fit(plain, data, 1)
    assert (plain.get_parameter("head.weight") - values[0]).abs().max() > 1e-4


def dropping(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.5)


def shifted_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return x + float(np.random.rand())  # noqa: NPY002


def shifted_by_python(x: torch.Tensor) -> torch.Tensor:
    return x + random.random()


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("changed", [dropping, shifted_by_numpy, shifted_by_python])
def test_unkeyed_randomness_in_a_step_is_refused(changed: Callable[..., torch.Tensor], width: int) -> None:
    class Drawing(FedAvg):
        def client_loss(self, client: Client, batch: MiniBatch) -> torch.Tensor:
            return super().client_loss(client, replace(batch, x=changed(batch.x)))

    method, data = of_class(Drawing, f"--data.clients_at_once={width}")
    with pytest.raises(
        ConfigurationError, match=r"Drawing\.client_loss.* draws random numbers from a global generator"
    ):
        fit(method, data, 1)


def test_unkeyed_randomness_in_an_evaluation_is_refused() -> None:
    class Drawing(FedAvg):
        def client_logits(self, client: Client, batch: MiniBatch) -> torch.Tensor:
            return self(dropping(batch.x))

    for width in (1, 3):
        method, data = of_class(Drawing, f"--data.clients_at_once={width}", "--data.eval_batch_size=6")
        with pytest.raises(ConfigurationError, match="draws random numbers from a global generator"):
            fit(method, data, 1)


def test_draws_on_a_gpu_are_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state.clone())
    before = global_states(torch.device("cuda"))
    assert before == global_states(torch.device("cuda"))
    state[8] += 4  # the offset of a CUDA generator
    assert before != global_states(torch.device("cuda"))
    assert len(before) == len(global_states(torch.device("cpu"))) + 1


class Drops(FedAvg):
    """Drops features before the head."""

    def __init__(self, *arguments: Any, p: float = 0.5, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.backbone(x)))


class KeyedDrops(FedAvg):
    """The same as the refusal of ``Drops`` says it."""

    p = 0.9

    def draw_noise(self, generator: torch.Generator, batch_size: int, stage: Stage) -> dict[str, torch.Tensor]:
        shape = (batch_size, self.head.in_features)
        if stage is Stage.EVALUATE:
            return {}
        return {"kept": torch.rand(shape, generator=generator, device=generator.device) >= self.p}

    def client_loss(self, client: Client, batch: MiniBatch) -> torch.Tensor:
        features = self.backbone(batch.x) * batch.noise["kept"] / (1 - self.p)
        return cross_entropy(self.head(features), batch.y, batch.mask)


def test_dropout_whose_draws_have_no_key_is_refused_and_a_keyed_mask_acts() -> None:
    method, data = of_class(Drops)
    with pytest.raises(ConfigurationError, match=r"^Drops: drop is Dropout of 0\.5, .*draw a mask in draw_noise"):
        fit(method, data, 1)
    learned = []
    for kind, width in ((FedAvg, 1), (KeyedDrops, 1), (KeyedDrops, 4)):
        method, data = of_class(kind, f"--data.clients_at_once={width}")
        fit(method, data, 1)
        learned.append(method.get_parameter("head.weight").clone())
    assert (learned[0] - learned[1]).abs().max() > 1e-3
    torch.testing.assert_close(learned[1], learned[2], rtol=0, atol=2e-5)


def test_dropout_that_drops_nothing_or_lies_in_a_frozen_part_is_not_refused() -> None:
    method, data = of_class(Drops, p=0.0)
    fit(method, data, 1)
    method, data = build("FedVPT")
    method.backbone.drop = nn.Dropout(0.5)
    fit(method, data, 1)
    assert not method.backbone.drop.training


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.Sequential(nn.Linear(192, 192), nn.Dropout1d(0.2)), "head.extra.1 is Dropout1d of 0.2"),
        (nn.MultiheadAttention(192, 2, dropout=0.1), "head.extra is MultiheadAttention of 0.1"),
        (nn.GRU(192, 192, 2, dropout=0.3), "head.extra is GRU of 0.3"),
        (DropPath(0.4), "head.extra is DropPath of 0.4"),
        (nn.BatchNorm1d(192, affine=False), "head.extra is a trained batch normalisation"),
        (nn.InstanceNorm2d(3, track_running_stats=True), "head.extra is a trained instance normalisation"),
    ],
)
def test_layers_that_train_otherwise_than_they_are_tested_are_refused(layer: nn.Module, said: str) -> None:
    method, data = of_class(FedAvg)
    method.head.extra = layer
    with pytest.raises(ConfigurationError, match=said):
        fit(method, data, 1)


class Follows(nn.Module):
    """Keeps a running mean of what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x - self.mean


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(192, 192))


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(("layer", "moved"), [(Follows, "extra.mean"), (spectral, "extra.parametrizations.weight.0._")])
def test_a_buffer_that_moves_in_a_step_is_refused(layer: Callable[[], nn.Module], moved: str, width: int) -> None:
    class Moving(FedAvg):
        shared = ("backbone", "head", "extra")

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.extra = layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.extra(self.backbone(x)))

    if layer is Follows:
        Moving.shared = ("backbone", "head")
    method, data = of_class(Moving, f"--data.clients_at_once={width}")
    with pytest.raises(
        ConfigurationError, match=r"Moving\.client_l.*(changes '|into a tensor of all).*running statis"
    ) as error:
        fit(method, data, 1)
    assert width == 3 or moved in str(error.value)


@pytest.mark.parametrize("width", [1, 3])
def test_an_attribute_that_counts_calls_is_refused(width: int) -> None:
    class Counting(FedAvg):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.seen = 0

        def client_loss(self, client: Client, batch: MiniBatch) -> Loss:
            self.seen += 1
            return super().client_loss(client, batch)

    method, data = of_class(Counting, f"--data.clients_at_once={width}")
    words = r"Counting\.client_loss .*changes the attribute 'seen': it would cou.*make it a personal parameter, or what"
    with pytest.raises(ConfigurationError, match=words):
        fit(method, data, 1)


def test_what_prepare_finds_out_is_returned_not_kept() -> None:
    class Keeping(FedAvg):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.rate = 0.0

        def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, torch.Tensor]:
            self.rate = 1 / (1 + client.round.number)
            return {}

    method, data = of_class(Keeping)
    words = r"Keeping\.prepare .*changes the attribute 'rate'.*together; return it: it stands in client\.prepared then$"
    with pytest.raises(ConfigurationError, match=words):
        fit(method, data, 1)


def test_clipping_is_per_client() -> None:
    class Clipped(FedAvg):
        def local_phases(self) -> list[Phase]:
            return [Phase((Group(("backbone", "head"), 1.0),), epochs=1, clip=0.01)]

    overrides = ["--data.clients_per_round=11", "--data.batch_size=64"]  # one step a client
    method, data = of_class(Clipped, *overrides)
    start = {n: p.detach().clone() for n, p in (*method.named_parameters(),)}
    witness = Witness()
    fit(method, data, 1, [Server(witness)])
    assert len(witness.last) == 11
    for message in witness.last.values():
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

    method, data = of_class(WithAdam, "--data.clients_per_round=1", "--data.batch_size=64", "--data.clients_at_once=1")
    before = method.head.weight.detach().clone()
    for rounds in (1, 2):
        method, data = of_class(
            WithAdam, "--data.clients_per_round=1", "--data.batch_size=64", "--data.clients_at_once=1"
        )
        fit(method, data, rounds)
        after = method.get_parameter("head.weight").clone()
        # Adam's very first step is lr times the sign of the gradient, whatever came before.
        step = (after - before).abs()
        moved = step[step > 1e-6]
        assert moved.median().item() == pytest.approx(1e-3, rel=1e-2)
        before = after
