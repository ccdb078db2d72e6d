"""Callbacks of the Trainer: those that look change no number, those that train in another way are refused."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from federation import CONF, build, fit
from lightning.pytorch import callbacks as lightning
from lightning.pytorch.callbacks import Callback
from refusal import refused

from benchmark.config.yaml_files import read_mapping
from benchmark.engine.refusals import trainer_callbacks
from benchmark.engine.refusals.trainer_callbacks import REFUSED, check_callbacks
from benchmark.errors import ConfigurationError
from benchmark.records.stored_run import read_metrics, verify_record
from benchmark.run.cli import FederatedCLI, main

BASE = [f"--config={CONF / name}.yaml" for name in ("base", "HeadTune")]
PATH = "lightning.pytorch.callbacks"

#: Those that work, and with which arguments they are tried.
WORKING: dict[str, dict[str, Any]] = {
    "Callback": {},
    "Checkpoint": {},
    "DeviceStatsMonitor": {"cpu_stats": False},
    "EarlyStopping": {"monitor": "train/loss", "patience": 9},
    "LearningRateMonitor": {},
    "ModelCheckpoint": {"dirpath": "best", "monitor": "train/loss"},
    "ModelSummary": {},
    "ProgressBar": {},
    "RichModelSummary": {},
    "RichProgressBar": {},
    "Timer": {"duration": "01:00:00:00"},
    "TQDMProgressBar": {},
}
#: Takes functions, from Python.
OF_FUNCTIONS = "LambdaCallback"
BARS = ("ProgressBar", "RichProgressBar", "TQDMProgressBar")

#: Of the refused ones, with which arguments they are made.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "GradientAccumulationScheduler": {"scheduling": {0: 2}},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
    "OnExceptionCheckpoint": {"dirpath": "failed"},
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
    "ThroughputMonitor": {"batch_size_fn": len},
}


def is_refused(name: str) -> bool:
    return issubclass(getattr(lightning, name), tuple(REFUSED))


def test_it_is_decided_of_every_callback_of_lightning() -> None:
    assert {*WORKING, OF_FUNCTIONS} == {name for name in lightning.__all__ if not is_refused(name)}


@pytest.mark.parametrize("name", filter(is_refused, lightning.__all__))
def test_a_callback_that_trains_or_scores_otherwise_is_refused(name: str) -> None:
    kind = getattr(lightning, name)
    for derived in (kind, type("Own", (kind,), {"finetune_function": None, "freeze_before_training": None})):
        given = derived(**ARGUMENTS.get(name, {}))
        for callbacks in (given, [given]):
            with pytest.raises(ConfigurationError, match=f"^trainer.callbacks: {derived.__name__} ") as said:
                check_callbacks(callbacks)
            assert "\n" not in str(said.value)


def test_a_refused_callback_ends_the_command_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = f"--trainer.callbacks+={PATH}.EMAWeightAveraging"
    line = refused(capsys, main, ["fit", *BASE, callback, f"--run_dir={tmp_path / 'run'}"])
    assert "trainer.callbacks: EMAWeightAveraging would score other weights than the server's" in line
    assert not (tmp_path / "run").exists()


def test_a_trainer_of_ones_own_refuses_them_too() -> None:
    method, data = build("HeadTune")
    with pytest.raises(ConfigurationError, match="SpikeDetection looks at the loss of a batch"):
        fit(method, data, 1, [lightning.SpikeDetection()])


class Looks(Callback):
    """A custom callback."""

    rounds = 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Count."""
        Looks.rounds += 1


def test_callbacks_that_look_change_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [*BASE, "--trainer.max_epochs=2", "--trainer.logger=true"]
    main(["fit", *settings, "--run_dir=plain"])
    given = [name for name in WORKING if name not in ("ProgressBar", "TQDMProgressBar")]
    callbacks = [
        part
        for name in given
        for part in (
            f"--trainer.callbacks+={PATH}.{name}",
            *(f"--trainer.callbacks.{key}={value}" for key, value in WORKING[name].items()),
        )
    ]
    own = f"--trainer.callbacks+={__name__}.Looks"
    main(["fit", *settings, *callbacks, own, "--trainer.enable_progress_bar=true", "--run_dir=looked"])
    assert Looks.rounds == 2
    pd.testing.assert_frame_equal(read_metrics("looked"), read_metrics("plain"), check_exact=True)
    assert verify_record("looked") == []
    kept = {
        entry["class_path"].rsplit(".")[-1]: entry
        for entry in read_mapping("looked/config.yaml")["trainer"]["callbacks"]
    }
    assert {*kept} == {*given, "Looks"}
    assert kept["Timer"]["init_args"]["interval"] == "step"
    assert list(Path("best").glob("*.ckpt"))
    FederatedCLI(["--config=looked/config.yaml", "--trainer.logger=false", "--trainer.callbacks=null"], run=False)


@pytest.mark.parametrize("name", BARS)
def test_a_progress_bar_takes_the_place_of_the_display(name: str) -> None:
    files = [*BASE, "--trainer.enable_progress_bar=true", f"--trainer.callbacks+={PATH}.{name}"]
    cli = FederatedCLI(files, run=False)
    bars = [callback for callback in cli.trainer.callbacks if isinstance(callback, lightning.ProgressBar)]
    assert [type(bar).__name__ for bar in bars] == [name]


def test_functions_as_callbacks_work_from_python() -> None:
    method, data = build("HeadTune")
    rounds: list[int] = []
    fit(method, data, 2, [lightning.LambdaCallback(on_train_epoch_end=lambda t, _: rounds.append(t.current_epoch))])
    assert rounds == [0, 1]


def test_monitoring_the_cpu_without_psutil_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_callbacks, "_PSUTIL_AVAILABLE", False)
    monkeypatch.setattr(trainer_callbacks.torch.cuda, "is_available", lambda: False)
    for stats in (None, True):
        with pytest.raises(ConfigurationError, match="psutil, which is not installed"):
            check_callbacks(lightning.DeviceStatsMonitor(cpu_stats=stats))
    monkeypatch.setattr(trainer_callbacks, "_PSUTIL_AVAILABLE", True)
    check_callbacks([lightning.DeviceStatsMonitor(), lightning.DeviceStatsMonitor(cpu_stats=True)])
