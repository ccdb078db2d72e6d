"""A method after its run: what is evaluated is what was learned, and it is not trained from the start again."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import build, fit, learned
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.faults import VirtualClock
from benchmark.run.checkpoint import finished_rounds
from benchmark.run.recorder import Recorder
from methods.servers import FedAvgM

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def state_of(method: Any) -> dict[str, torch.Tensor]:
    """Everything a run leaves behind but scores."""
    return {name: value for name, value in learned(method).items() if not name.startswith("metric.")}


def tester(*callbacks: Callback) -> Trainer:
    """Another Trainer."""
    return Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[Recorder(), *callbacks])


@pytest.mark.parametrize("another", [False, True], ids=["the same Trainer", "another Trainer"])
@pytest.mark.parametrize(
    ("conf", "given"),
    [
        ("FedPer", ()),
        ("PFedPG", ()),
        ("FedAvg", (lambda: Server(FedAvgM(lr=1.0, momentum=0.9), VirtualClock("wait")),)),
    ],
)
def test_what_is_tested_after_a_run_is_what_was_learned(conf: str, given: Any, another: bool) -> None:
    method, data = build(conf)
    trainer = fit(method, data, 2, [make() for make in given])
    before, expected = state_of(method), method.evaluation.scores["server", "test"].loss_sum.clone()
    (tester() if another else trainer).test(method, datamodule=data, verbose=False)
    torch.testing.assert_close(method.evaluation.scores["server", "test"].loss_sum, expected, rtol=0, atol=0)
    after = state_of(method)
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


def test_what_another_server_would_score_as_it_began_is_refused(tmp_path: Path) -> None:
    method, data = build("FedPer")
    fit(method, data, 1, save_to=tmp_path)
    last, before = str(tmp_path / "checkpoints" / "last.ckpt"), state_of(method)
    with pytest.raises(ConfigurationError, match=r"was trained for 1 rounds, by another server, .* is not here"):
        tester(Server()).test(method, datamodule=data, verbose=False)
    tester(Server()).test(method, datamodule=data, ckpt_path=last, verbose=False)
    for name, value in before.items():
        torch.testing.assert_close(state_of(method)[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


def test_what_was_trained_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    method, data = build("FedPer")
    fit(method, data, 1, save_to=tmp_path)
    last = tmp_path / "checkpoints" / "last.ckpt"
    fit(method, data, 2, ckpt_path=str(last), save_to=tmp_path)
    assert finished_rounds(last) == 2
    straight, data = build("FedPer")
    fit(straight, data, 2)
    for name, value in state_of(straight).items():
        torch.testing.assert_close(state_of(method)[name], value, rtol=1e-5, atol=1e-7, equal_nan=True, msg=name)


def test_what_was_trained_is_not_trained_from_the_start_again() -> None:
    method, data = build("FedPer")
    trainer, said = fit(method, data, 1), r"this FedPer was trained for 1 rounds; make a new one .*ckpt_path"
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=said):
            fit(method, data, 1)
    trainer.fit_loop.max_epochs = 2
    with pytest.raises(ConfigurationError, match=said):
        trainer.fit(method, datamodule=data)
    with pytest.raises(ConfigurationError, match="what its clients learned is not here"):
        trainer.test(method, datamodule=data, verbose=False)


def test_a_method_that_was_trained_can_be_forgotten() -> None:
    method, data = build("FedPer")
    fit(method, data, 1)
    known = weakref.ref(method)
    del method, data
    gc.collect()
    assert known() is None


def test_a_delivery_begins_anew_with_each_run() -> None:
    delivery, times = VirtualClock("buffer", 0.02, speeds=[1.0] * 6 + [9.0] * 5), []
    for _ in range(2):
        method, data = build("FedAvg")
        fit(method, data, 2, [Server(None, delivery)], evaluate=False)
        times.append((method.server.facts["clock"], method.server.facts["late"]))
    assert times[0] == times[1]
