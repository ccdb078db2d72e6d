"""Tiny finished runs, each trained once in a session, for what is done with a trained model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federation import CONF
from lightning.pytorch import Trainer

from benchmark.run.cli import FederatedCLI
from benchmark.run.recorder import Recorder
from methods import FedAvg

SHORT = (
    "--trainer.max_epochs=1",
    "--trainer.num_sanity_val_steps=0",
    "--data.partition=federation.Few",
    "--data.clients_per_round=4",
)
Runs = Callable[..., Any]


class Averaged(FedAvg):
    """FedAvg that is read as local training left each client."""

    evaluate_local = True
    paper_point = "local"


def trained(run_dir: Path, conf: str, *options: str) -> Any:
    """A run of six clients, four of which train for a round; returns it with its live method and data."""
    configs = [f"--config={CONF / name}.yaml" for name in ("base", conf)]
    return FederatedCLI(["fit", *configs, f"--run_dir={run_dir}", *SHORT, *options])


def killed_in_round(number: int, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> None:
    """Run until a round begins."""
    begun = Recorder.on_train_epoch_start

    def ended(recorder: Recorder, trainer: Trainer, method: Any) -> None:
        begun(recorder, trainer, method)
        if trainer.current_epoch == number - 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "on_train_epoch_start", ended)
        with pytest.raises(SystemExit):
            call()
