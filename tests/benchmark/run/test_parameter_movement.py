from typing import Any

import pytest
import torch
from federation import EACH_ROUND, build, fit
from lightning.pytorch.callbacks import Callback

from benchmark.errors import ConfigurationError
from benchmark.run.parameter_movement import PersonalMovement
from benchmark.run.recorder import Recorder


class Banks(Callback):
    """Every client's prompt as one vector, at the start and after every round."""

    def __init__(self) -> None:
        self.rounds: list[torch.Tensor] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.rounds:
            self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        rows = [pl_module.store.all_rows(name).flatten(1) for name in pl_module.roles.personal]
        self.rounds.append(torch.cat(rows, dim=1).double())


def recorded(trainer: Any) -> dict[tuple[int, str], torch.Tensor]:
    recorder = next(callback for callback in trainer.callbacks if isinstance(callback, Recorder))
    return {(number, name): v for (number, _, split, name), v in recorder.values.items() if split == "train"}


def test_the_norms_are_those_of_the_bank_round_by_round() -> None:
    banks = Banks()
    values = recorded(
        fit(*build("PFedPT"), rounds=3, callbacks=[PersonalMovement(["visual_prompt"]), banks], settings=EACH_ROUND)
    )
    for number in (1, 2, 3):
        now, before, start = banks.rounds[number], banks.rounds[number - 1], banks.rounds[0]
        for client in range(11):
            change = ((now[client] - before[client]) ** 2).sum() ** 0.5
            distance = ((now[client] - start[client]) ** 2).sum() ** 0.5
            torch.testing.assert_close(values[number, "visual_prompt_change"][client], change)
            torch.testing.assert_close(values[number, "visual_prompt_distance"][client], distance)
        assert int((values[number, "visual_prompt_change"] > 0).sum()) == 7  # those that took part
    torch.testing.assert_close(values[1, "visual_prompt_change"], values[1, "visual_prompt_distance"])
    assert (0, "visual_prompt_change") not in values


def test_a_resumed_run_records_the_same(tmp_path: Any) -> None:
    whole = recorded(
        fit(*build("PFedPT"), rounds=2, callbacks=[PersonalMovement(["visual_prompt"])], settings=EACH_ROUND)
    )
    fit(*build("PFedPT"), rounds=1, callbacks=[PersonalMovement(["visual_prompt"])], save_to=tmp_path)
    checkpoint = str(tmp_path / "checkpoints" / "last.ckpt")
    again = fit(
        *build("PFedPT"),
        rounds=2,
        callbacks=[PersonalMovement(["visual_prompt"])],
        ckpt_path=checkpoint,
        settings=EACH_ROUND,
    )
    resumed = recorded(again)
    assert whole.keys() == resumed.keys()
    for key in whole:
        torch.testing.assert_close(resumed[key], whole[key], rtol=0, atol=0, equal_nan=True)


def test_only_personal_parameters() -> None:
    with pytest.raises(ConfigurationError, match=r"'head' names no personal parameter of PFedPT; it has visual_prompt"):
        fit(*build("PFedPT"), rounds=1, callbacks=[PersonalMovement(["head"])])
