"""A method after its run: what is evaluated is what was learned, and it is not trained from the start again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from federation import build, fit, learned
from lightning.pytorch import Trainer

from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.faults import VirtualClock
from benchmark.run.checkpoint import finished_rounds

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def state_of(method: Any) -> dict[str, torch.Tensor]:
    """Everything a run leaves behind but scores."""
    return {name: value for name, value in learned(method).items() if not name.startswith("metric.")}


@pytest.mark.parametrize("another", [False, True], ids=["the same Trainer", "another Trainer"])
@pytest.mark.parametrize("conf", ["FedPer", "PFedPG"])
def test_what_is_tested_after_a_run_is_what_was_learned(conf: str, another: bool) -> None:
    method, data = build(conf)
    trainer = fit(method, data, 2)
    before, expected = state_of(method), method.evaluation.scores["server", "test"].loss_sum.clone()
    if another:
        trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=trainer.callbacks[:1])
    trainer.test(method, datamodule=data, verbose=False)
    torch.testing.assert_close(method.evaluation.scores["server", "test"].loss_sum, expected, rtol=0, atol=0)
    after = state_of(method)
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


def test_what_was_trained_is_not_trained_from_the_start_again(tmp_path: Path) -> None:
    method, data = build("FedPer")
    fit(method, data, 1, save_to=tmp_path)
    with pytest.raises(ConfigurationError, match=r"this FedPer was trained for 1 rounds; make a new one .*ckpt_path"):
        fit(method, data, 1)
    last = tmp_path / "checkpoints" / "last.ckpt"
    fit(method, data, 2, ckpt_path=str(last), save_to=tmp_path)
    assert finished_rounds(last) == 2


def test_a_delivery_begins_anew_with_each_run() -> None:
    delivery, times = VirtualClock("buffer", 0.02, speeds=[1.0] * 6 + [9.0] * 5), []
    for _ in range(2):
        method, data = build("FedAvg")
        fit(method, data, 2, [Server(None, delivery)], evaluate=False)
        times.append((method.server.facts["clock"], method.server.facts["late"]))
    assert times[0] == times[1]
