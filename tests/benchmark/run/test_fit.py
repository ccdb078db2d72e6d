"""Runs from Python: the numbers of the command line, what they leave behind, and what they say of bad input."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from federation import CONF, Ragged, ShallowViT, TinyImages
from lightning import seed_everything
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch.func import functional_call

import benchmark
from benchmark import FinishedRun, fit
from benchmark.contract import LocalTraining
from benchmark.errors import ConfigurationError
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import read_metrics
from benchmark.run.cli import FederatedCLI, main
from benchmark.server import ServerRule
from datamodules.federated import FederatedDataModule
from methods import FedVPT, HeadTune, PFedPG
from methods.servers import FedAdam

QUIET: Any = {"accelerator": "cpu", "enable_progress_bar": False}


def tiny() -> FederatedDataModule:
    """The data of tests/conf/base.yaml."""
    settings: Any = {"batch_size": 4, "clients_at_once": 3, "clients_per_round": 7, "eval_batch_size": 4}
    return FederatedDataModule(TinyImages(), Ragged(), **settings, seed=3)


def fedvpt(kind: type = FedVPT) -> Any:
    """The method of tests/conf/FedVPT.yaml, or one like it."""
    backbone = ShallowViT()
    training = LocalTraining(lr=0.02, momentum=0.9, weight_decay=1e-3, epochs=2)  # the decay is the class's default
    return kind(8, 11, backbone, num_prompts=3, training=training)


def command_line(run_dir: Path, *arguments: str) -> tuple[pd.DataFrame, Any]:
    """Metrics and record of ``lightning-cli fit`` with the same settings."""
    files = [f"--config={CONF / name}.yaml" for name in ("base", "FedVPT")]
    main(["fit", *files, *arguments, f"--run_dir={run_dir}"])
    return read_metrics(run_dir), read_record(run_dir)


def same(run: FinishedRun, metrics: pd.DataFrame, record: Any) -> None:
    """The run has these numbers bit for bit, and the record's other facts."""
    pd.testing.assert_frame_equal(run.metrics, metrics, check_exact=True)
    for name in ("summary", "manifest_hash", "communication", "rounds_trained", "seed", "server", "images_sha256"):
        assert getattr(run.record, name) == getattr(record, name), name


def correct(run: FinishedRun, client: int) -> float:
    """The accuracy of the parameters that ``run.client`` gives."""
    rows = torch.from_numpy(run.data.held_out["test"][client])
    x = run.data.transform(run.data.pool.images[rows], None)
    logits = functional_call(run.method.eval(), run.client(client), (x,))
    return (logits.argmax(1) == run.data.pool.labels[rows]).double().mean().item()


def check_clients(run: FinishedRun) -> None:
    """Each client's own parameters have the accuracy that the metrics give it."""
    last = run.metrics.query("round == round.max() and point == 'server' and metric == 'accuracy'")
    assert [correct(run, client) for client in range(11)] == pytest.approx(last["value"].tolist())


def test_objects_give_the_numbers_of_the_command_line(tmp_path: Path) -> None:
    seed_everything(3)
    run = fit(fedvpt(), tiny(), 2, server=FedAdam(lr=0.1), **QUIET)
    same(run, *command_line(tmp_path / "run", "--trainer.max_epochs=2", "--server=FedAdam", "--server.lr=0.1"))
    assert (run.record.files, run.record.config_hash) == ({}, "")
    check_clients(run)
    first, second, third = repr(run).splitlines()
    assert first == "FedVPT on TinyImages, 11 clients, 2 rounds, seed 3"
    accuracy = run.record.summary["server"]["test"]["accuracy"]["last"]["average"]
    assert second.startswith(f"test accuracy after round 2: after aggregation {100 * accuracy:.2f} % (worst client ")
    assert third.startswith(f"metrics: {len(run.metrics):,} rows; ")


def test_a_server_that_sends_each_client_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seed_everything(3)
    run = fit(fedvpt(PFedPG), tiny(), 1, **QUIET)
    same(run, *command_line(tmp_path / "run", "--model=methods.PFedPG", "--trainer.max_epochs=1"))
    check_clients(run)
    assert not torch.equal(run.client(0)["prompt.tokens"], run.client(1)["prompt.tokens"])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_python_gives_the_command_lines_numbers_with_or_without_a_run_directory(tmp_path: Path) -> None:
    files = (CONF / "base.yaml", CONF / "FedVPT.yaml")
    there = command_line(tmp_path / "line", "--trainer.max_epochs=1", "--seed_everything=4")
    same(fit(*files, rounds=1, seed=4), *there)
    kept = fit(*map(str, files), rounds=np.int64(1), seed=4, run_dir=tmp_path / "kept")  # type: ignore[call-overload]
    same(kept, *there)
    assert kept.record.config_hash == there[1].config_hash
    assert isinstance(kept.method, FedVPT)


def test_a_data_configuration_is_taken_as_the_runs_data(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text("source: federation.TinyImages\npartition: federation.Ragged\nbatch_size: 4\n")
    run = fit(CONF / "FedVPT.yaml", tmp_path / "tiny.yaml", rounds=0, **QUIET)
    assert run.data.batch_size == 4
    assert set(run.metrics["round"]) == {0}
    (tmp_path / "other.yaml").write_text("partition: datamodules.partition.DomainPerClient\n")
    (tmp_path / "whole.yaml").write_text(f"base: [{CONF / 'FedVPT.yaml'}]\ndata: [tiny.yaml, {{eval_batch_size: 9}}]\n")
    run = fit(tmp_path / "whole.yaml", tmp_path / "other.yaml", rounds=0, **QUIET)
    assert run.data.eval_batch_size == 9
    assert (run.data.batch_size, type(run.data.partition).__name__) == (4, "DomainPerClient")


def test_one_client_alone_is_a_federation(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(
        "source: federation.TinyImages\npartition: {class_path: IID, init_args: {num_clients: 1}}\n"
    )
    run = fit(CONF / "FedVPT.yaml", tmp_path / "one.yaml", rounds=1, **QUIET)
    assert set(run.metrics["client"]) == {0}
    assert run.record.summary["server"]["test"]["accuracy"]["last"]["average"] > 0


def refused(*arguments: Any, **named: Any) -> str:
    """The one line of bad input."""
    with pytest.raises(ConfigurationError) as told:
        fit(*arguments, **named)
    assert "\n" not in str(told.value)
    return str(told.value)


class Unmade(ServerRule):
    def __init__(self) -> None:
        self.beta = 0.9


def test_bad_input_is_one_line_before_training(tmp_path: Path) -> None:
    seed_everything(3)
    method, data, files = fedvpt(), tiny(), (CONF / "base.yaml", CONF / "FedVPT.yaml")
    assert "expected a method and a FederatedDataModule" in refused(FedVPT, data)
    assert "; FedVPT is a class, make one of it" in refused(FedVPT, data)
    assert "got FedVPT and NoneType" in refused(method)
    assert "rounds must be a whole number from 0, got '2'" in refused(method, data, rounds="2")
    assert "rounds must be a whole number from 0, got -2" in refused(method, data, rounds=-2)
    assert "rounds must be a whole number from 0, got True" in refused(method, data, rounds=True)
    assert "server must be a server rule, such as" in refused(method, data, server=FedAdam)
    assert "; got 'FedAdam'" in refused(method, data, server="FedAdam")
    assert "Unmade.__init__ (" in (said := refused(method, data, server=Unmade()))
    assert said.endswith("must call super().__init__() first")
    assert "there is no argument 'acelerator' of the Trainer; did you mean accelerator?" in refused(
        method, data, acelerator="cpu"
    )
    assert "trainer.strategy=ddp can't be had" in refused(method, data, strategy="ddp")
    assert "trained by one process on one device; lightning-cli fit has several" in refused(method, data, devices=2)
    assert "the number of rounds is rounds" in refused(method, data, max_epochs=3)
    assert "seed is for configuration files" in refused(method, data, seed=3)
    assert "the server stands in one of them" in refused(*files, server=FedAdam())
    assert "callbacks=[<object" in refused(*files, callbacks=[object()])
    assert "run_dir must be the path of a folder, got ''" in refused(*files, run_dir="")
    assert "run_dir must be the path of a folder, got 3" in refused(*files, run_dir=3)
    assert "none.yaml" in refused(tmp_path / "none.yaml")
    assert "seed_everything: expected a whole number from 0 to" in refused(*files, rounds=1, seed=-1)
    assert "accelerator is one of" in refused(*files, accelerator="abacus")
    assert not hasattr(method, "simulation")
    seed_everything(4)
    assert "the run's seed is 3, and a server's first values are drawn with seed 4; call" in refused(method, data)
    other = fedvpt()
    seed_everything(3)
    said = refused(other, data)
    assert "the run's seed is 3, and the method's first values are drawn with seed 4; call lightning.seed_ever" in said
    run = fit(method, data, 0, **QUIET)
    assert "trained already; make a new one" in refused(run.method, tiny())
    with pytest.raises(ConfigurationError, match="there is no client 11; the clients are 0 to 10"):
        run.client(11)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"callbacks": "x"}, "trainer.callbacks: expected callbacks of Lightning, such as lightning.pytorch"),
        ({"callbacks": [1]}, "EarlyStopping(...), got 1"),
        ({"callbacks": [LearningRateMonitor]}, "trainer.callbacks: LearningRateMonitor is a class, make one of it"),
        ({"logger": "x"}, "trainer.logger: expected loggers of Lightning, true or false, got 'x'"),
        ({"logger": object()}, "true or false, got <object object"),
        ({"logger": [CSVLogger]}, "true or false, got <class"),
        ({"accelerator": None}, "trainer: You selected an invalid accelerator name: `accelerator=None`"),
        ({"accelerator": 3}, "trainer.accelerator: "),
        ({"accelerator": "tpu"}, "trainer: "),
        ({"accelerator": object()}, "trainer: "),
        ({"devices": [0]}, "trainer: `devices` selected with `CPUAccelerator` should be an int > 0"),
        ({"devices": {}}, "objects are trained by one process on one device"),
        ({"profiler": "nope"}, "trainer: "),
        ({"max_time": "x"}, "trainer: `Timer(duration='x')` is not a valid duration"),
        ({"check_val_every_n_epoch": "soon"}, "trainer.check_val_every_n_epoch: expected a whole number or null"),
        ({"log_every_n_steps": "x"}, "trainer.log_every_n_steps: expected a whole number or null, got x"),
        ({"limit_train_batches": 1}, "cut a round short"),
        ({"strategy": object()}, "can't be had"),
        ({"num_nodes": "x"}, "trainer.num_nodes: expected a whole number, got x"),
    ],
)
def test_a_wrong_setting_of_the_trainer_is_one_line(setting: dict[str, Any], message: str) -> None:
    seed_everything(3)
    method = fedvpt()
    assert message in refused(method, tiny(), 0, **{**QUIET, **setting})
    assert not hasattr(method, "simulation")


def test_methods_and_data_of_wrong_arguments_are_refused() -> None:
    backbone = ShallowViT()
    for wrong in (-1, 0, "ten", None):
        with pytest.raises(ConfigurationError, match="num_classes: expected a whole number from 1"):
            HeadTune(wrong, 11, backbone)
        with pytest.raises(ConfigurationError, match="num_clients: expected a whole number from 1"):
            FedVPT(8, wrong, backbone)  # type: ignore[arg-type]
    assert HeadTune("8", 11, backbone).head.out_features == 8  # a text that is a number, as on a command line
    for source, partition in ((TinyImages(), None), (None, Ragged()), (TinyImages, Ragged()), (TinyImages(), "IID")):
        with pytest.raises(
            ConfigurationError,
            match=r"FederatedDataModule: (source|partition): expected an object of (ImageSource|Partition)",
        ):
            FederatedDataModule(source, partition)  # type: ignore[arg-type]


def test_a_second_run_in_another_thread_is_refused_and_the_first_unharmed() -> None:
    seed_everything(3)
    method, said = fedvpt(), []

    class Second(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            """Try to run once more, from Python and by the command line."""
            files = (CONF / "base.yaml", CONF / "FedVPT.yaml")
            with ThreadPoolExecutor(1) as threads:
                for call in (
                    lambda: fit(*files, rounds=1, seed=5),
                    lambda: fit(method, tiny(), 1),
                    lambda: FederatedCLI([f"--config={path}" for path in files], run=False),
                ):
                    said.append(str(threads.submit(call).exception()))

    run = fit(method, tiny(), 1, callbacks=[Second()], **QUIET)
    assert said == [said[0]] * 3
    assert "another thread of this process makes a run" in said[0]
    seed_everything(3)
    pd.testing.assert_frame_equal(run.metrics, fit(fedvpt(), tiny(), 1, **QUIET).metrics, check_exact=True)
    with ThreadPoolExecutor(1) as threads:  # free again, also after the runs that were refused above
        assert threads.submit(lambda: fit(CONF / "base.yaml", CONF / "FedVPT.yaml", rounds=0)).result().metrics.size


class _Interrupting(FedVPT):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Press Ctrl-C."""
        raise KeyboardInterrupt


def test_an_interrupt_is_pythons_own() -> None:
    before = signal.getsignal(signal.SIGINT)
    seed_everything(3)
    with pytest.raises(KeyboardInterrupt):
        fit(fedvpt(_Interrupting), tiny(), 1, **QUIET)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_package_is_light_and_says_what_it_is() -> None:
    code = "import sys, benchmark; print(benchmark.__version__, sorted({'torch', 'pandas'} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == f"{benchmark.__version__} []\n"
    assert benchmark.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'Fit'"):
        benchmark.Fit  # noqa: B018
    packages = ("benchmark", "methods", "datamodules")
    assert all((Path(benchmark.__file__).parents[1] / name / "py.typed").is_file() for name in packages)
