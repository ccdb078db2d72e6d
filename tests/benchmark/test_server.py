"""The server callback: who takes part, what is aggregated, what is refused, and whose values are left out."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from federation import EACH_ROUND, Witness, build, fit, learned, terms
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from benchmark.contract import Client, Stage
from benchmark.engine import simulation
from benchmark.engine.batches import loaders
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads, Values
from benchmark.run.recorder import Recorder
from benchmark.server import ServerRule, weighted_mean
from methods import FedVPT


def test_weighted_mean_by_hand() -> None:
    updates = {"w": torch.tensor([[1.0, 2.0], [3.0, 6.0]])}
    assert weighted_mean(updates, torch.tensor([1.0, 3.0]))["w"].tolist() == [2.5, 5.0]


def test_identical_updates_come_back_bit_for_bit() -> None:
    value = torch.randn(1000) * 1e3
    mean = weighted_mean({"w": value.repeat(7, 1)}, torch.tensor([3.0, 1, 4, 1, 5, 9, 2]))
    assert torch.equal(mean["w"], value)
    assert torch.equal(weighted_mean({"w": value.unsqueeze(0)}, torch.tensor([0.3]))["w"], value)


@pytest.mark.parametrize("together", [2**18, 20, 1])
def test_the_mean_of_tensors_of_several_shapes_and_types(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmark.server.TOGETHER", together)
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 2), "b": (), "c": (5,), "d": (1, 1, 4)}
    values = {name: torch.randn(9, *shape, generator=generator) for name, shape in shapes.items()}
    values["c"] = values["c"].double()
    weights = torch.rand(9, generator=generator, dtype=torch.float64) + 0.1
    mean = weighted_mean(values, weights)
    assert [*mean] == [*values]
    for name, rows in values.items():
        expected = rows[0].clone()
        for share, row in zip((weights / weights.sum()).tolist()[1:], rows[1:], strict=True):
            expected.add_(row - rows[0], alpha=share)
        assert mean[name].dtype == rows.dtype
        assert torch.equal(mean[name], expected)


def test_the_mean_does_not_touch_the_updates() -> None:
    rows = torch.tensor([[1.0, 1, 1], [0, 0, 0]])
    weighted_mean({"w": rows}, torch.ones(2))
    assert rows.tolist() == [[1, 1, 1], [0, 0, 0]]


def test_one_selected_client_hands_its_state_to_the_server() -> None:
    method, data = build("FedAvg", "--data.clients_per_round=1")
    witness = Witness()
    fit(method, data, 1, [Server(witness)])
    (message,) = witness.last.values()
    assert set(message) == set(method.roles.shared)
    for name, value in message.items():
        assert torch.equal(method.get_parameter(name), value)


def test_selection_is_keyed_without_replacement_and_changes_with_the_round() -> None:
    rule = ServerRule()
    rule.start({}, terms(20, participants=6, seed=4))
    rounds = [rule.select(r) for r in range(1, 30)]
    assert rounds == [rule.select(r) for r in range(1, 30)]
    assert all(len(set(r)) == 6 for r in rounds)
    assert len(set(map(tuple, rounds))) > 20
    assert set().union(*map(set, rounds)) == set(range(20))
    rule.start({}, terms(20, participants=6, seed=5))
    assert sum(rule.select(r) == known for r, known in enumerate(rounds, 1)) < 3


class Loud(ServerRule):
    """Says in ``said`` when it has aggregated."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Say so."""
        self.said.append(f"aggregated {round.number}")
        return super().aggregate(round, shared, uploads)


class Chooses(Loud):
    """Selects by what came of the round before."""

    def select(self, number: int) -> list[int]:
        """Say so."""
        self.said.append(f"selected {number}")
        return [number % 3, 5]


def test_a_rule_selects_once_a_round_after_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    finite, plan = simulation.finite_rows_and, loaders.RoundPlan

    def fetched(*arguments: Any) -> Any:
        said.append("fetched")
        return finite(*arguments)

    def laid_out(*arguments: Any) -> Any:
        said.append(f"laid out {arguments[6]}")
        return plan(*arguments)

    monkeypatch.setattr(simulation, "finite_rows_and", fetched)
    monkeypatch.setattr(loaders, "RoundPlan", laid_out)
    method, data = build("FedAvg", "--data.clients_per_round=2", "--data.clients_at_once=2")
    fit(method, data, 3, [Server(Chooses(said))], evaluate=False)
    of_round = ("selected", "laid out", "fetched", "aggregated")
    assert said == [f"{what} {number}" if what != "fetched" else what for number in (1, 2, 3) for what in of_round]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"gradient_clip_val": 1.0}, "gradient clipping is not supported for manual optimization"),
        ({"precision": "bf16-true"}, "'bf16-true' is not supported"),
        ({"accumulate_grad_batches": 2}, "gradient accumulation is not supported for manual optimization"),
        ({"reload_dataloaders_every_n_epochs": 0}, "reload_dataloaders_every_n_epochs must be 1"),
        ({"limit_train_batches": 2}, "cut a round short"),
        ({"fast_dev_run": True}, "cut a round short"),
        ({"val_check_interval": 0.5}, "val_check_interval must be"),
        ({"max_epochs": -1, "max_steps": 5}, "give the number of rounds"),
    ],
)
def test_trainer_settings_that_couple_clients_are_refused(setting: dict, message: str) -> None:
    method, data = build("FedAvg")
    arguments = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 1, **setting}
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, **arguments
    )
    with pytest.raises((ConfigurationError, MisconfigurationException), match=message):
        trainer.fit(method, datamodule=data)


def test_a_server_given_to_the_trainer_wins() -> None:
    method, data = build("PFedPG")
    mine, made = Server(Witness()), []
    make = method.make_server
    method.make_server = lambda: made.append(make()) or made[-1]
    fit(method, data, 1, [mine])
    assert method.server is mine
    assert mine.finished_rounds == 1
    assert not made, "the method's own rule is not asked for"
    assert len(mine.rule.seen) == 1


def test_a_checkpoint_from_inside_a_round_is_refused(tmp_path: Any) -> None:
    class Midway(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 1 and batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    method, data = build("FedVPT")
    fit(method, data, 2, [Midway()])
    resumed, data = build("FedVPT")
    with pytest.raises(ConfigurationError, match="inside round 2"):
        fit(resumed, data, 3, ckpt_path=str(tmp_path / "mid.ckpt"))


def test_a_run_that_diverges_says_so_and_keeps_the_last_round(tmp_path: Any) -> None:
    method, data = build("FedAvg", "--model.init_args.training.lr=1e18", "--data.on_divergence=raise")
    with pytest.raises(ConfigurationError, match=r"training diverged: .* in round 1 .*lower the learning rate"):
        fit(method, data, 2)


class Damage(Callback):
    """Makes the images of some clients NaN: in training, or in their test."""

    def __init__(self, clients: tuple[int, ...], stage: Stage = Stage.TRAIN) -> None:
        self.clients = clients
        self.stage = stage

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        images = pl_module.simulation.images
        fill = images.fill

        def damaged(step: Any) -> Any:
            batch = fill(step)
            hit = torch.tensor([client in self.clients for client in step.clients])
            if step.stage is not self.stage or not hit.any():
                return batch
            # Several steps in one are [S, K, ...].
            rows = (*[slice(None)] * (batch.y.ndim - 2), hit)
            if batch.features:
                spoiled = {name: value.clone() for name, value in batch.features.items()}
                for value in spoiled.values():
                    value[rows] = math.nan
                return replace(batch, features=spoiled)
            x = batch.x.clone()
            x[rows] = math.nan
            return replace(batch, x=x)

        images.fill = damaged


class Without(Callback):
    """Takes clients out of every round."""

    def __init__(self, clients: tuple[int, ...]) -> None:
        self.clients = clients

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        rule = pl_module.server.rule
        select = rule.select
        rule.select = lambda number: [client for client in select(number) if client not in self.clients]


MOMENTUM = ("--model.init_args.training.momentum=0.9", "--model.init_args.training.optimizer_state=client")


@pytest.mark.parametrize(
    ("conf", "width", "overrides"),
    [("FedVPT", 1, MOMENTUM), ("FedVPT", 3, MOMENTUM), ("MOON", 1, ()), ("PFedPG", 1, ()), ("PromptAMP", 1, ())],
)
def test_a_client_of_damaged_images_is_left_out_and_changes_nothing_else(
    conf: str, width: int, overrides: tuple[str, ...]
) -> None:
    results = []
    for change in (Damage((2, 5)), Without((2, 5))):
        method, data = build(conf, f"--data.clients_at_once={width}", "--data.clients_per_round=11", *overrides)
        if isinstance(change, Damage):
            with pytest.warns(UserWarning, match=r"of 2 clients were not finite in round 1 \(clients \[2, 5\]\)"):
                fit(method, data, 2, [change], settings=EACH_ROUND)
            assert method.server.dropped == {2: 2, 5: 2}
            assert method.server.who_trained() == tuple(client not in (2, 5) for client in range(11))
        else:
            fit(method, data, 2, [change], settings=EACH_ROUND)
        results.append(learned(method))
    dropped = results[0].pop("metric.2/local/train/dropped")
    assert dropped.tolist() == [2.0 if client in (2, 5) else 0.0 for client in range(11)]
    assert results[0].pop("metric.1/local/train/dropped").sum() == 2
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert value.isfinite().all() or name.startswith("metric.")
        tolerance = 0 if width == 1 else 2e-5
        torch.testing.assert_close(
            value, results[1][name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


class OfLowRank(FedVPT):
    """Sends what a decomposition makes of its prompt."""

    def message(self, client: Client, noise: Values) -> Values:
        u, s, v = torch.linalg.svd(client.parameters["prompt.tokens"], full_matrices=False)
        return {"prompt.tokens": (u * s.unsqueeze(-2)) @ v}


def test_a_message_is_made_of_the_others_where_one_has_no_decomposition() -> None:
    method, data = build("FedVPT", "--data.clients_at_once=3", "--data.clients_per_round=11")
    method.__class__ = OfLowRank
    with pytest.warns(UserWarning, match=r"of 1 clients were not finite in round 1 \(clients \[5\]\)"):
        fit(method, data, 1, [Damage((5,))], settings=EACH_ROUND)
    assert method.server.dropped == {5: 1}
    assert method.get_parameter("prompt.tokens").isfinite().all()


def test_the_count_of_rounds_without_a_client_survives_a_resume() -> None:
    server, resumed = Server(), Server()
    server.dropped, server.finished_rounds, server.trained = {4: 2}, 3, {9, 4}
    resumed.load_state_dict(server.state_dict())
    assert resumed.dropped == {4: 2}
    assert resumed.finished_rounds == 3
    assert resumed.trained == {4, 9}
    older = {name: value for name, value in server.state_dict().items() if name != "trained"}
    resumed.load_state_dict(older)
    assert resumed.who_trained() is None
    assert resumed.state_dict()["trained"] is None


def test_clients_that_no_round_takes_are_known() -> None:
    method, data = build("FedVPT", "--data.clients_per_round=3")
    fit(method, data, 2)
    rule = method.server.rule
    taken = {client for number in (1, 2) for client in rule.select(number)}
    assert 3 <= len(taken) < 11
    assert method.server.who_trained() == tuple(client in taken for client in range(11))


def test_one_client_of_damaged_images_ends_the_run_where_that_is_asked_for() -> None:
    method, data = build("FedVPT", "--data.clients_per_round=11", "--data.on_divergence=raise")
    with pytest.raises(
        ConfigurationError, match=r"in round 1 \(clients \[5\]\); .*, or set data.on_divergence to drop"
    ):
        fit(method, data, 1, [Damage((5,))], settings=EACH_ROUND)


def test_a_round_in_which_nobody_is_left_ends_the_run() -> None:
    method, data = build("FedVPT", "--data.clients_per_round=11")
    with pytest.raises(ConfigurationError, match=r"values of 11 of 11 clients were not finite in round 1"):
        fit(method, data, 1, [Damage(tuple(range(11)))], settings=EACH_ROUND)


def test_a_server_that_diverges_ends_the_run() -> None:
    method, data = build("PFedPG", "--model.init_args.server_lr=1e38")
    with pytest.raises(ConfigurationError, match=r"nothing to evaluate after round 1: the logits of 66 of 66 images"):
        fit(method, data, 3, settings=EACH_ROUND)
    method, data = build("PFedPG")
    make = method.make_server

    def spoiled() -> ServerRule:
        rule = make()
        rule.lr = math.nan
        return rule

    method.make_server = spoiled
    with pytest.raises(ConfigurationError, match=r"GeneratorRule made of finite uploads were not finite in round 1"):
        fit(method, data, 3)

    class Lost(ServerRule):
        def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
            return {name: value / 0 for name, value in super().aggregate(round, shared, uploads).items()}

    method, data = build("FedVPT")
    with pytest.raises(ConfigurationError, match=r"values that Lost made of finite uploads were not finite in round 1"):
        fit(method, data, 1, [Server(Lost())])


class FirstFour(ServerRule):
    """The mean, with a selection of its own."""

    takes_the_mean = True

    def select(self, number: int) -> list[int]:
        return [0, 1, 2, 3]


@pytest.mark.parametrize("rule", [ServerRule, FirstFour])
def test_a_mean_of_much_is_taken_parameter_by_parameter(
    rule: type[ServerRule], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    asked: list[int] = []
    aggregate = ServerRule.aggregate

    def noted(self: ServerRule, round: Round, shared: Values, uploads: Uploads) -> Values:
        asked.append(len(shared))
        return aggregate(self, round, shared, uploads)

    monkeypatch.setattr(ServerRule, "aggregate", noted)
    for together in (2**28, 1):
        asked.clear()
        monkeypatch.setattr("benchmark.engine.arrivals.TOGETHER", together)
        method, data = build("FedAvg", "--data.clients_per_round=4")
        fit(method, data, 1, [Server(rule())])
        count = len(method.roles.shared)
        assert asked == ([count] if together > 1 else [1] * count)
        results.append(method.simulation.shared())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_images_without_a_prediction_count_as_wrong_and_are_named() -> None:
    method, data = build("FedVPT")
    with pytest.warns(UserWarning, match=r"of 6 of 66 images of split 'test' at point 'server'.*\(clients \[5\]\)"):
        trainer = fit(method, data, 1, [Damage((5,), Stage.EVALUATE)], settings=EACH_ROUND)
    values = next(cb for cb in trainer.callbacks if isinstance(cb, Recorder)).values
    accuracy, loss = values[1, "server", "test", "accuracy"], values[1, "server", "test", "loss"]
    assert accuracy[5] == 0
    assert accuracy.isfinite().all()
    assert loss.isnan().nonzero().flatten().tolist() == [5]
    method, data = build("FedVPT", "--data.on_divergence=raise")
    with pytest.raises(ConfigurationError, match=r"6 of 66 images of split 'test'"):
        fit(method, data, 1, [Damage((5,), Stage.EVALUATE)], settings=EACH_ROUND)


def test_a_fine_tuning_that_diverges_ends_the_run() -> None:
    method, data = build("FedBABU", "--model.init_args.finetuning.lr=1e38")
    with pytest.raises(ConfigurationError, match=r"nothing to evaluate after round 0: the logits of 66 of 66 images"):
        fit(method, data, 1, settings=EACH_ROUND)
