"""The invariants of MOON, FedPer, FedRep and FedBABU."""

import math
from typing import Any

import pytest
import torch
from federation import Witness, build, fit
from lightning.pytorch.callbacks import Callback
from torch import nn

from benchmark.contract import Group, Phase
from methods.fedavg import FedAvg
from methods.losses import model_contrast


def test_contrast_by_hand() -> None:
    z = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    received, previous = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 3.0], [-1.0, 0.0]])
    # Cosines: 1 and 0, then 0 and -1; each contrast is log(1 + e^{-1/tau}).
    expected = math.log(1 + math.exp(-1 / 0.5))
    assert model_contrast(z, received, previous, 0.5).tolist() == pytest.approx([expected, expected])


def test_contrast_is_log_2_without_gradient_where_received_and_previous_agree() -> None:
    z = torch.randn(5, 7, requires_grad=True)
    other = torch.randn(5, 7)
    contrast = model_contrast(z, other, other.clone(), 0.5)
    torch.testing.assert_close(contrast, torch.full((5,), math.log(2)))
    contrast.sum().backward()
    assert z.grad is not None
    assert z.grad.abs().max() < 1e-7


def test_contrast_keeps_its_bounds() -> None:
    z = torch.randn(1000, 3)
    contrast = model_contrast(z, -z, z, 0.5)
    assert contrast.max() <= math.log(1 + math.exp(2 / 0.5)) + 1e-5
    assert model_contrast(z, z, -z, 0.5).min() > 0


def values(method: Any) -> dict[str, torch.Tensor]:
    return {n: method.get_parameter(n).clone() for n in method.roles.shared}


def run(conf: str, *overrides: str, rounds: int = 2) -> Any:
    method, data = build(conf, *overrides)
    fit(method, data, rounds)
    return method


def test_moon_without_mu_is_fedavg_bit_for_bit() -> None:
    moon, avg = values(run("MOON", "--model.init_args.mu=0")), values(run("FedAvg"))
    assert all(torch.equal(moon[n], avg[n]) for n in avg)


def test_moon_is_fedavg_in_its_first_round_and_not_in_its_third() -> None:
    everybody = "--data.clients_per_round=11"
    for rounds, same in ((1, True), (3, False)):
        moon, avg = values(run("MOON", everybody, rounds=rounds)), values(run("FedAvg", everybody, rounds=rounds))
        differences = [(moon[n] - avg[n]).abs().max().item() for n in avg]
        assert (max(differences) < 1e-6) == same


def test_moon_remembers_each_clients_own_last_model() -> None:
    method, data = build("MOON", "--data.clients_per_round=11", "--data.clients_at_once=4")
    witness = Witness()
    method.make_server = lambda: witness
    fit(method, data, 2)
    for client, message in witness.last.items():
        kept = method.store.all_rows("last.backbone.linear.0.weight")[client]
        assert torch.equal(kept, message["backbone.linear.0.weight"])


def test_fedper_sends_the_body_only() -> None:
    method = run("FedPer")
    body = sum(p.numel() for p in method.backbone.parameters())
    assert method.server.traffic.per_client()["up_floats"] == body


@pytest.mark.parametrize(
    ("resting", "moving", "rests"),
    [("head_training", "training", "store.head.weight"), ("training", "head_training", "backbone.linear.0.weight")],
)
def test_fedrep_without_a_phase_leaves_its_part_alone(resting: str, moving: str, rests: str) -> None:
    method = run("FedRep", f"--model.init_args.{resting}.epochs=0")
    fresh, data = build("FedRep")
    fit(fresh, data, 0)

    def state(of: Any) -> dict[str, torch.Tensor]:
        return values(of) | {f"store.{n}": of.store.all_rows(n) for n in of.store.names}

    before, after = state(fresh), state(method)
    part = "store.head" if rests.startswith("store") else "backbone"
    assert all(torch.equal(before[n], after[n]) for n in before if n.startswith(part))
    assert any(not torch.equal(before[n], after[n]) for n in before if not n.startswith(part))


def test_fedreps_body_rests_while_the_head_is_trained() -> None:
    method, data = build("FedRep")
    seen: dict[int, list[bool]] = {0: [], 1: []}

    class Spy(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            take, slots = method.simulation.local_steps.take, method.slots

            def spy(cohort: Any, step: Any, *others: Any) -> None:
                before = {n: v.clone() for n, v in slots.detached().items()}
                take(cohort, step, *others)
                resting = "backbone" if step.phase == 0 else "head"
                for name, value in before.items():
                    if name.startswith(resting):
                        seen[step.phase].append(torch.equal(value, slots.of(name)))

            method.simulation.local_steps.take = spy

    fit(method, data, 1, [Spy()])
    assert all(seen[0])
    assert all(seen[1])
    assert seen[0]
    assert seen[1]


def test_fedbabus_head_never_moves_and_its_body_is_fedavgs_with_a_resting_head() -> None:
    class RestingHead(FedAvg):
        def local_phases(self) -> list[Phase]:
            body = self.training_settings
            return [Phase((Group(("backbone",), body.lr, body.momentum), Group(("head",), 0.0)), body.epochs)]

    babu = run("FedBABU")
    template, data = build("FedAvg")
    start = template.head.weight.detach().clone()
    avg = RestingHead(8, 11, template.backbone, training=template.training_settings)
    avg.frozen = nn.Parameter(torch.zeros(()))  # so that it is stepped as FedBABU is, by the same arithmetic
    fit(avg, data, 2)
    assert torch.equal(babu.head.weight, start)
    for name, value in values(babu).items():
        assert torch.equal(value, avg.get_parameter(name))


def test_fedbabu_without_fine_tuning_gives_all_clients_one_model() -> None:
    method, data = build("FedBABU", "--model.init_args.finetuning.epochs=0")
    trainer = fit(method, data, 2)
    rows = torch.from_numpy(data.splits.test[4])
    logits = method(data.transform(data.pool.images[rows], None))
    loss = torch.nn.functional.cross_entropy(logits, data.pool.labels[rows])
    assert trainer.callbacks[0].values[2, "server", "test", "loss"][4].item() == pytest.approx(loss.item(), rel=1e-5)


def test_fedbabu_fine_tunes_the_parts_that_are_asked_for_on_a_copy() -> None:
    losses = {}
    for parts in ("all", "head"):
        method, data = build("FedBABU", f"--model.init_args.finetuned={parts}")
        trainer = fit(method, data, 1)
        losses[parts] = trainer.callbacks[0].values[1, "server", "test", "loss"]
        assert torch.equal(method.head.weight, build("FedBABU")[0].head.weight)
    assert not torch.allclose(losses["all"], losses["head"])


@pytest.mark.parametrize(("conf", "rate"), [("FedPer", "training_settings"), ("FedRep", "head_training")])
def test_who_never_trains_fits_its_own_head_before_its_test(
    conf: str, rate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, data = build(conf, "--data.new_clients=0.3", "--data.clients_per_round=4")
    assert method.finetune_phases(new=False) == []
    (phase,) = method.finetune_phases(new=True)
    (group,) = phase.groups
    assert (group.parameters, phase.epochs, group.lr) == (("head",), 5, getattr(method, rate).lr)
    fitted = fit(method, data, 1).callbacks[0].values[1, "server", "new", "loss"]
    assert (~fitted.isnan()).nonzero().flatten().tolist() == data.new_clients
    monkeypatch.setattr(type(method), "finetune_phases", FedAvg.finetune_phases)
    method, data = build(conf, "--data.new_clients=0.3", "--data.clients_per_round=4")
    drawn = fit(method, data, 1).callbacks[0].values[1, "server", "new", "loss"]
    assert (fitted != drawn)[data.new_clients].all()
