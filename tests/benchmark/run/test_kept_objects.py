"""Runs of Python objects with a run directory: the same numbers, and files from which each can be made again."""

import copy
import gc
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from federation import Ragged, ShallowViT, TinyImages
from lightning import seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor

from benchmark.commands import main as benchmark_main
from benchmark.config.yaml_files import read_mapping
from benchmark.contract import LocalTraining
from benchmark.errors import ConfigurationError
from benchmark.faults import Dropouts
from benchmark.privacy.record_level import RecordLevelPrivacy
from benchmark.ranges import _GIVEN, arguments_of
from benchmark.records.stored_run import read_metrics, stored_run
from benchmark.run.described import described
from benchmark.run.fit import fit
from benchmark.run.reload import restore
from benchmark.run.start import main
from datamodules import DigitDomains, DomainPerClient
from datamodules.federated import FederatedDataModule
from methods import FedVPT
from methods.servers import FedAdam

QUIET = {"accelerator": "cpu", "enable_progress_bar": False}


class AtTheTop(FedVPT):
    """A method of this module."""


def method(kind: type[FedVPT] = FedVPT, **more: Any) -> FedVPT:
    seed_everything(3)
    return kind(8, 11, ShallowViT(), num_prompts=3, training=LocalTraining(lr=0.02, epochs=1), **more)


def tiny(**more: Any) -> FederatedDataModule:
    return FederatedDataModule(TinyImages(), Ragged(), batch_size=4, seed=3, **more)


def test_a_class_without_a_constructor_of_its_own_was_given_nothing() -> None:
    data = FederatedDataModule(DigitDomains(), DomainPerClient(), seed=3)
    assert arguments_of(data.partition) == {}
    found = described(method(), data)["data"]
    assert found["partition"] == {
        "class_path": "datamodules.partition.domain_per_client.DomainPerClient",
        "init_args": {},
    }
    assert arguments_of(object()) is None


def refused(made: FedVPT, data: FederatedDataModule, folder: Path, **named: Any) -> str:
    with pytest.raises(ConfigurationError) as told:
        fit(made, data, 1, run_dir=folder, **{**QUIET, **named})
    assert "\n" not in str(told.value)
    return str(told.value)


def test_a_run_of_objects_is_kept_with_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_memory = fit(method(), tiny(), 2, server=FedAdam(lr=0.1), delivery=Dropouts(0.3), **QUIET)
    given, folder = method(), tmp_path / "run"
    kept = fit(given, tiny(), 2, server=FedAdam(lr=0.1), delivery=Dropouts(0.3), run_dir=folder, **QUIET)
    pd.testing.assert_frame_equal(kept.metrics, in_memory.metrics, check_exact=True)
    assert kept.record.summary == in_memory.record.summary
    assert kept.record.config_hash
    assert kept.method is not given
    assert not hasattr(given, "simulation")
    assert {path.name for path in folder.iterdir()} >= {"config.yaml", "record.json", "manifest.json", "checkpoints"}
    assert stored_run(folder).record == kept.record  # files and record fit each other
    config = read_mapping(folder / "config.yaml")
    assert (config["seed_everything"], config["data"]["batch_size"], config["trainer"]["max_epochs"]) == (3, 4, 2)
    assert config["server"]["init_args"]["lr"] == 0.1
    restored, _ = restore(folder)
    assert torch.equal(restored.get_parameter("prompt.tokens"), kept.method.get_parameter("prompt.tokens"))
    main(["test", f"--run_dir={folder}"])  # as any run of the command line
    assert "test accuracy" in capsys.readouterr().out


def test_a_stopped_run_goes_on_without_its_objects(tmp_path: Path) -> None:
    whole = fit(method(), tiny(), 3, **QUIET)

    class StopError(Exception):
        pass

    def stop(*_: Any) -> None:
        raise StopError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("benchmark.engine.rounds.Server.on_train_epoch_start", _in_round(2, stop))
        with pytest.raises(StopError):
            fit(method(), tiny(), 3, run_dir=tmp_path / "run", **QUIET)
    assert not (tmp_path / "run" / "record.json").exists()
    assert "holds an unfinished run" in refused(method(), tiny(), tmp_path / "run")
    assert benchmark_main(["resume", str(tmp_path / "run")]) == 0
    pd.testing.assert_frame_equal(read_metrics(tmp_path / "run"), whole.metrics, check_exact=True)


def _in_round(number: int, act: Any) -> Any:
    from benchmark.engine.rounds import Server

    usual = Server.on_train_epoch_start

    def on_train_epoch_start(self: Any, trainer: Any, *given: Any) -> None:
        if trainer.current_epoch == number:
            act()
        usual(self, trainer, *given)

    return on_train_epoch_start


def test_a_description_has_what_constructors_were_given() -> None:
    data = tiny(record_privacy=RecordLevelPrivacy(clip=1.0, noise_multiplier=0.5))
    found = described(method(), data)
    assert found["seed_everything"] == 3
    assert found["model"]["class_path"] == "methods.fedvpt.FedVPT"
    assert [*found["model"]["init_args"]] == [
        "backbone",
        "num_prompts",
        "training",
    ]  # the classes are the data's to say
    assert found["model"]["init_args"]["backbone"] == {"class_path": "federation.ShallowViT", "init_args": {}}
    assert found["model"]["init_args"]["training"]["lr"] == 0.02
    assert found["data"]["source"] == {"class_path": "federation.TinyImages", "init_args": {}}
    assert found["data"]["record_privacy"]["clip"] == 1.0
    assert "seed" not in found["data"]


def test_arguments_are_known_while_their_object_lives() -> None:
    made = FedAdam(lr=0.5)
    assert arguments_of(made) == {"lr": 0.5}
    assert arguments_of(copy.deepcopy(made)) is None
    at = id(made)
    del made
    gc.collect()
    assert at not in _GIVEN


def test_what_cannot_be_described_is_one_line_with_what_to_do(tmp_path: Path) -> None:
    class Inside(FedVPT):
        pass

    assert "Inside cannot be imported by this name, as it is no top-level name" in refused(
        method(Inside), tiny(), tmp_path / "a"
    )
    Inside.__module__, Inside.__qualname__ = "__main__", "Mine"
    said = refused(method(Inside), tiny(), tmp_path / "b")
    assert "Mine is defined in the script or notebook that runs, where nobody else finds it; put it into a mo" in said
    said = refused(copy.deepcopy(method()), tiny(), tmp_path / "c")
    assert said.startswith("fit: run_dir: nothing says how method (FedVPT) was made: it is a copy, or ")
    said = refused(method(), tiny(), tmp_path / "d", callbacks=[LearningRateMonitor()])
    assert said.startswith("fit: callbacks=[<lightning")
    changed = method()
    with torch.no_grad():
        changed.get_parameter("prompt.tokens").add_(1)
    said = refused(changed, tiny(), tmp_path / "e")
    assert said.startswith("fit: run_dir: prompt.tokens of FedVPT is not what its constructor makes after ")
    assert [path.name for path in tmp_path.glob("*/record.json")] == []
