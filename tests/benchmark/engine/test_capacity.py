"""The memory that one more client takes, and the clients at once that ``auto`` makes of it."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import build, fit, learned
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmark.contract import LocalTraining
from benchmark.engine.device import capacity
from benchmark.engine.device.capacity import bytes_per_client, widest
from benchmark.engine.device.memory import HeldBytes
from benchmark.engine.simulation import Simulation
from benchmark.federation import Broadcast
from benchmark.speed import measure
from benchmark.speed.workloads import Workload, cnn, fedvpt, tiny_vit
from methods.fedavg import FedAvg

CPU = torch.device("cpu")


def allocated(work: Callable[[], Any]) -> int:
    """Peak bytes that torch's allocator gave out meanwhile, as its profiler tells."""
    gc.collect()  # else what an earlier call left could be given back, and counted, in this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def common(simulation: Simulation) -> dict[int, Broadcast]:
    """Return what the server of a weighted mean sends in the first round."""
    return {1: Broadcast(common=simulation.shared())}


def trained(work: Workload, clients: int) -> tuple[Any, int]:
    """The method after a round in which all clients are stepped together, and the round's peak bytes."""
    method, data = work.method(clients), work.data(clients, 2 * work.batch, clients)
    return method, allocated(lambda: measure.fit(method, data, 1, precision=work.precision))


@pytest.mark.parametrize("work", [cnn(), tiny_vit(), fedvpt("micro_vit", 32)], ids=lambda work: work.name)
def test_what_is_counted_is_what_a_client_adds_to_a_round(work: Workload) -> None:
    (method, two), (_, four) = trained(work, 2), trained(work, 4)
    assert bytes_per_client(method.simulation, common(method.simulation), work.batch)[0] == pytest.approx(
        (four - two) / 2, rel=0.1
    )


def test_in_bfloat16_it_is_the_trainers_own() -> None:
    work = replace(fedvpt("micro_vit", 32), precision="bf16-mixed")
    (method, two), (_, four) = trained(work, 2), trained(work, 4)
    # Frozen weights are cast once for all clients, and count for none.
    assert bytes_per_client(method.simulation, common(method.simulation), work.batch)[0] == pytest.approx(
        (four - two) / 2, rel=0.1
    )


def test_the_first_cast_of_frozen_weights_leaves_no_client_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without autocast nothing is cast; in bfloat16 what the first look casts takes more than there is room for."""
    found = {}
    for precision in ("32-true", "bf16-mixed"):
        work = replace(fedvpt("micro_vit", 32), batch=1, precision=precision)
        method, data = work.method(4), work.data(4, 2, "auto")
        casts = sum(p.numel() * 2 for p in method.backbone.parameters())
        monkeypatch.setattr(capacity, "CPU_STEP", casts)
        measure.fit(method, data, 1, precision=precision)
        assert data.loaders is not None
        found[precision] = data.loaders.width
        need, _ = bytes_per_client(method.simulation, common(method.simulation), 1)
        assert found[precision] == min(4, casts // need)
    assert found["bf16-mixed"] > 1


@pytest.mark.parametrize(("settings", "times"), [({"momentum": 0.9}, 1), ({"optimizer": "adam"}, 2)])
def test_an_optimizers_state_counts(settings: dict[str, Any], times: int) -> None:
    found = []
    for given in ({"momentum": 0.0}, settings):
        method, data = build("FedAvg", *(f"--model.init_args.training.{name}={value}" for name, value in given.items()))
        data.setup()
        simulation = method.join(data)
        found.append(bytes_per_client(simulation, common(simulation), 12)[0])
    model = sum(method.get_parameter(name).nbytes for name in method.roles.slots)
    assert found[1] - found[0] == pytest.approx(times * model, abs=0.3 * model)


def test_every_storage_counts_once_as_long_as_it_lives() -> None:
    before = torch.zeros(1000)
    with HeldBytes(CPU) as held:
        one = torch.zeros(100)
        views = [one[:10], one.view(10, 10), before[:5], before.add_(1)]
        assert held.most == 400
        two = one + 1
        assert held.most == 800
        del one, two, views
        three = torch.zeros(150)
        assert held.most == 800
        four = torch.zeros(100)
    assert held.most == 1000
    assert three.shape != four.shape
    torch.zeros(10_000)
    assert held.most == 1000


def test_uploads_are_those_of_shared_parameters_and_what_is_sent_besides() -> None:
    method, data = build("FedVPT")
    data.setup()
    simulation = method.join(data)
    expected = sum(method.get_parameter(name).nbytes for name in method.roles.shared)
    assert bytes_per_client(simulation, common(simulation), 4)[1] == expected > 0


class AsksInside(Callback):
    """Asks for the width while a cohort is in training."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def asks(cohort: Any, step: Any) -> None:
            assert widest(pl_module.simulation, pl_module.server.rule) >= 1

        pl_module.simulation.local_steps.on_step.append(asks)


def test_asking_for_the_width_changes_no_cohort_in_progress() -> None:
    states = []
    for callbacks in ([], [AsksInside()]):
        method, data = build("FedPer", "--data.clients_at_once=2")
        fit(method, data, 1, callbacks=callbacks)
        states.append({n: method.store.all_rows(n).clone() for n in method.store.names} | method.simulation.shared())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


@pytest.mark.parametrize(("room", "width"), [(0, 1), (2.5, 2), (3.5, 3), (1e9, 7)])
def test_the_automatic_width_is_what_fits(room: float, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    method, data = build("FedAvg", "--data.clients_at_once=auto")
    data.setup()
    largest = min(data.batch_size, max(data.train_sizes.values()))
    simulation = method.join(data)
    need, _ = bytes_per_client(simulation, common(simulation), largest)
    assert data.participants == 7
    monkeypatch.setattr(capacity, "CPU_STEP", int(room * need))
    method, data = build("FedAvg", "--data.clients_at_once=auto")
    fit(method, data, 1)
    assert data.loaders is not None
    assert data.loaders.width == width


def test_a_kept_momentum_of_what_the_loss_does_not_use_can_be_counted() -> None:
    class Idle(FedAvg):
        """Has a shared layer that its loss does not use."""

        shared = (*FedAvg.shared, "idle")

        def __init__(self, backbone: nn.Module) -> None:
            super().__init__(8, 11, backbone, training=kept)
            self.idle = nn.Linear(2, 2)

    kept = LocalTraining(lr=0.1, epochs=1, momentum=0.9, optimizer_state="client")
    template, data = build("FedAvg", "--data.clients_at_once=auto")
    fit(Idle(template.backbone), data, 1)
    assert data.loaders is not None
    assert data.loaders.width == 7


def test_memory_of_a_client_counts_slots_and_saved_activations() -> None:
    method, data = build("FedAvg")
    fit(method, data, 1)
    simulation = method.simulation
    small, large = (bytes_per_client(simulation, common(simulation), images)[0] for images in (4, 64))
    slots = 2 * 4 * sum(p.numel() for p in (*method.backbone.parameters(), *method.head.parameters()))
    images = 64 * 3 * 16 * 16 * 4
    first_layer = 64 * 64 * 12 * 12 * 4
    assert large > slots + images + first_layer
    assert slots < small < large < 2 * slots + 60 * images


def test_what_is_kept_of_a_text_is_the_same_however_the_width_came_about(tmp_path: Path) -> None:
    """A method keeps what it has made once, and under autocast it would be another's."""
    half, few = {"precision": "bf16-mixed"}, ("--data.partition=federation.Few", "--data.clients_per_round=4")
    whole, data = build("FedKgCoOp", *few, "--data.clients_at_once=auto")
    fit(whole, data, 2, settings=half, evaluate=False)
    method, data = build("FedKgCoOp", *few, "--data.clients_at_once=auto")
    fit(method, data, 1, settings=half, evaluate=False, save_to=tmp_path)
    method, data = build("FedKgCoOp", *few, "--data.clients_at_once=auto")
    fit(method, data, 2, settings=half, evaluate=False, ckpt_path=str(tmp_path / "checkpoints/last.ckpt"))
    given, data = build("FedKgCoOp", *few, f"--data.clients_at_once={whole.trainer.datamodule.loaders.width}")
    fit(given, data, 2, settings=half, evaluate=False)
    for name, value in learned(whole).items():
        assert torch.equal(value, learned(method)[name]), name
        assert torch.equal(value, learned(given)[name]), name
