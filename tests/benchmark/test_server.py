from typing import Any

import pytest
import torch
from federation import build, fit
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from benchmark.errors import ConfigurationError
from benchmark.server import Server, weighted_mean


def test_weighted_mean_by_hand() -> None:
    updates = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 6.0])}]
    assert weighted_mean(updates, torch.tensor([1.0, 3.0]))["w"].tolist() == [2.5, 5.0]


def test_identical_updates_come_back_bit_for_bit() -> None:
    value = torch.randn(1000) * 1e3
    mean = weighted_mean([{"w": value.clone()} for _ in range(7)], torch.tensor([3.0, 1, 4, 1, 5, 9, 2]))
    assert torch.equal(mean["w"], value)
    assert torch.equal(weighted_mean([{"w": value}], torch.tensor([0.3]))["w"], value)


def test_the_mean_does_not_touch_the_updates() -> None:
    first = torch.ones(3)
    weighted_mean([{"w": first}, {"w": torch.zeros(3)}], torch.ones(2))
    assert first.tolist() == [1, 1, 1]


def test_one_selected_client_hands_its_state_to_the_server() -> None:
    method, data = build("FedAvg", "--data.clients_per_round=1")
    uploads: list[dict[str, torch.Tensor]] = []

    class Keep(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            end = pl_module.end_cohort
            pl_module.end_cohort = lambda clients: uploads.append(made := end(clients)) or made

    fit(method, data, 1, [Keep()])
    (message,) = uploads[0].values()
    for name, value in message.items():
        assert torch.equal(method.template(name), value)


def test_selection_is_keyed_without_replacement_and_changes_with_the_round() -> None:
    server = Server()
    server.training_clients, server.participants, server.seed = list(range(20)), 6, 4
    rounds = [server.select(r) for r in range(1, 30)]
    assert rounds == [server.select(r) for r in range(1, 30)]
    assert all(len(set(r)) == 6 for r in rounds)
    assert len(set(map(tuple, rounds))) > 20
    assert set().union(*map(set, rounds)) == set(range(20))


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
    class Mine(Server):
        pass

    method, data = build("PFedPG")
    mine = Mine()
    fit(method, data, 1, [mine])
    assert method.server is mine
    assert mine.finished_rounds == 1


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
    method, data = build("FedAvg", "--model.init_args.training.lr=1e18")
    with pytest.raises(ConfigurationError, match=r"training diverged: .* in round 1 .*lower the learning rate"):
        fit(method, data, 2)
