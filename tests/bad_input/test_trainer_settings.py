"""Settings of the Trainer that a federated run can't have."""

import inspect
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional, Union, get_args

import pandas as pd
import pytest
from federation import CONF
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from refusal import refused

from benchmark import commands
from benchmark.config.parser import FederatedParser
from benchmark.errors import ConfigurationError
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import verify_record
from benchmark.run.cli import FederatedCLI, main

BASE = ["--config", str(CONF / "base.yaml"), "--config", str(CONF / "HeadTune.yaml"), "--run_dir=run"]


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("limit_val_batches=0", "leaves nothing to record"),
        ("limit_val_batches=0.5", "cut a round short"),
        ("limit_val_batches=1", "cut a round short"),
        ("limit_train_batches=3", "cut a round short"),
        ("limit_test_batches=1", "cut a round short"),
        ("overfit_batches=1", "cut a round short"),
        ("fast_dev_run=true", "cut a round short"),
        ("num_sanity_val_steps=1", "trainer.num_sanity_val_steps must be -1 (all clients are evaluated"),
        ("num_sanity_val_steps=2", "or 0 (there is no round 0), got 2"),
        ("check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch must be at least 1, got 0"),
        ("check_val_every_n_epoch=-1", "must be at least 1, got -1"),
        ("check_val_every_n_epoch=null", "must be at least 1, got None"),
        ("check_val_every_n_epoch=3", "=3 would not evaluate the last of 5 rounds; make trainer.max_epochs a multiple"),
        ("check_val_every_n_epoch=6", "=6 would not evaluate the last of 5 rounds"),
        ("val_check_interval=0.5", "trainer.val_check_interval must be 1.0"),
        ("val_check_interval=1", "trainer.val_check_interval must be 1.0"),
        ("max_steps=7", "give the number of rounds as trainer.max_epochs"),
        ("max_epochs=-1", "give the number of rounds as trainer.max_epochs"),
        ("reload_dataloaders_every_n_epochs=2", "every round has its own clients and batches"),
        ("precision=16-mixed", "'16-mixed' is not supported: loss scaling couples clients"),
        ("precision=16", "'16' is not supported"),
        ("precision=16-true", "'16-true' is not supported"),
        ("precision=bf16-true", "'bf16-true' is not supported"),
        ("accelerator=foo", "trainer.accelerator is one of auto, cpu, "),
        ("strategy=ddp", "trainer.strategy=ddp can't be had: data-parallel training would average different clients"),
        ("strategy=nonsense", "trainer.strategy=nonsense can't be had"),
        ("strategy=lightning.pytorch.strategies.DDPStrategy", "DDPStrategy can't be had: data-parallel"),
        ("devices=[0,1]", "trainer: `devices` selected with `CPUAccelerator` should be an int > 0"),
        ("num_nodes=0", "trainer: `num_nodes` must be a positive integer, but got 0"),
        ("devices=0", "trainer: `Trainer(devices='0')` value is not a valid input"),
        ("barebones=true", "trainer.barebones logs nothing"),
        ("plugins=lightning.pytorch.plugins.io.AsyncCheckpointIO", "trainer.plugins can't be given"),
        ("gradient_clip_val=1", "each client's own are clipped by clip of the method's training"),
        ("accumulate_grad_batches=2", "a step is one mini-batch of every client; give a larger data.batch_size"),
        ("max_time=soon", "trainer: `Timer(duration='soon')` is not a valid duration. Expected a string in the format"),
    ],
)
def test_a_setting_is_refused_before_training(setting: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, main, ["fit", *BASE, "--trainer.max_epochs=5", f"--trainer.{setting}"])
    assert message in line
    assert not list(Path().glob("run/*.parquet")) + list(Path().glob("run/record.json"))


@pytest.mark.parametrize("first", [int | float, float | int, Union[int, float], Union[float, int]])  # noqa: UP007
def test_a_whole_number_stays_one_whoever_asked_for_the_type_before(first: Any) -> None:
    for hint in (Optional[first], first | None, Union[float, int, None], Union[None, float, str, int]):  # noqa: UP007, UP045
        parser = FederatedParser()
        parser.add_class_arguments(type("Taking", (), {"__init__": _taking(hint)}), "trainer")
        for text, number in (("1", 1), ("1.0", 1.0), ("0.5", 0.5)):
            value = parser.parse_args([f"--trainer.limit={text}"]).trainer.limit
            assert (type(value), value) == (type(number), number), (hint, text)
        assert parser.parse_args(["--trainer.limit=null"]).trainer.limit is None or type(None) not in get_args(hint)


def _taking(hint: Any) -> Any:
    def __init__(self: Any, limit: Any = None) -> None: ...  # noqa: N807

    __init__.__annotations__ = {"limit": hint, "return": None}
    return __init__


@pytest.fixture
def _nothing_was_asked_for() -> Iterator[None]:
    """Typing keeps no types yet, as at the start of a process."""
    _forget_types()
    yield
    _forget_types()


def _forget_types() -> None:
    for forget in typing._cleanups:  # type: ignore[attr-defined]
        forget()


@pytest.mark.usefixtures("_nothing_was_asked_for")
@pytest.mark.parametrize("order", [(int, float), (float, int)])
def test_one_batch_is_refused_whatever_was_imported_before(
    order: tuple[type, type], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both orders of the union: typing keeps that which was asked for first, and Lightning's arguments then have it."""
    hint = Optional[Union[order]]  # noqa: UP007, UP045  as Lightning writes it
    assert get_args(hint)[:2] == order
    of = inspect.unwrap(Trainer.__init__)
    assert {*get_args(of.__annotations__["limit_train_batches"])} == {int, float, type(None)}
    monkeypatch.setitem(of.__annotations__, "limit_train_batches", hint)
    assert inspect.signature(Trainer).parameters["limit_train_batches"].annotation is hint
    assert "cut a round short" in refused(capsys, main, ["fit", *BASE, "--trainer.limit_train_batches=1"])


def test_validate_scores_held_out_training_images_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """It never shows a test image's score, from the command line or from Python."""
    main(["fit", *BASE, "--trainer.max_epochs=1"])
    line = refused(capsys, main, ["validate", "--run_dir=run"])
    assert "validate scores images held out of the training images, and data.val_fraction=0 holds none out" in line
    assert "take `lightning-cli test` for the test images, or train with for example --data.val_fraction=0.1" in line
    cli = FederatedCLI(BASE[:-1], run=False)
    with pytest.raises(ConfigurationError, match="holds none out"):
        cli.trainer.validate(cli.model, datamodule=cli.datamodule)
    held = ["--data.val_fraction=0.3", "--data.partition=IID", "--data.partition.num_clients=3"]
    held += ["--data.clients_per_round=2", "--run_dir=held"]
    main(["fit", *BASE, "--trainer.max_epochs=1", *held])
    average = read_record("held").summary["server"]["val"]["accuracy"]["last"]["average"]
    line = refused(capsys, main, ["validate", *BASE[:-1], *held[:-1], "--run_dir=gone"])
    assert "no checkpoint at gone/checkpoints/last.ckpt" in line
    last = "--ckpt_path=held/checkpoints/last.ckpt"
    for given in (["--run_dir=held"], [last, "--config=held/config.yaml"], [last, *BASE[:-1], *held[:-1]]):
        capsys.readouterr()
        main(["validate", *given])
        out = capsys.readouterr().out
        assert "val images, after aggregation" in out
        assert "test images" not in out
        assert f"{100 * average:.2f}" in next(line for line in out.splitlines() if "average" in line)


def test_a_refused_run_leaves_no_directory(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, main, ["fit", *BASE, "--trainer.devices=0", "--run_dir=far/away/run"])
    assert not Path("far").exists()


def test_when_time_is_up_a_run_ends_after_a_whole_round_and_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [*BASE, "--trainer.max_epochs=3", "--data.clients_at_once=1", "--data.batch_size=1"]
    main(["fit", *long, "--run_dir=whole"])
    monkeypatch.setattr(Timer, "time_elapsed", _ten_seconds_a_look)
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        main(["fit", *long, "--trainer.max_time=00:00:00:30"])
    assert exit.value.code == 124
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line.startswith("trainer.max_time")]
    said = "trainer.max_time is up: kept up to round 1; go on with: "
    assert line.startswith(said)
    assert not Path("run/record.json").exists()
    program, *go_on = line.removeprefix(said).split()
    assert program == "benchmark"
    with pytest.raises(SystemExit):  # the same time again, for one round more
        commands.main(go_on)
    assert commands.main(go_on) == 0
    assert verify_record("run") == []
    pd.testing.assert_frame_equal(pd.read_parquet("run/metrics.parquet"), pd.read_parquet("whole/metrics.parquet"))


def _ten_seconds_a_look(timer: Timer, stage: str = "train") -> float:
    timer.looks = getattr(timer, "looks", 0) + 1  # type: ignore[attr-defined]
    return 10.0 * timer.looks  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["val_accuracy", "train/entropy"])
def test_a_callback_that_waits_for_an_unknown_score_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    stopping = json.dumps({"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": name}})
    said = refused(capsys, main, ["fit", *BASE, "--trainer.max_epochs=2", f"--trainer.callbacks+={stopping}"])
    assert f"EarlyStopping: monitor={name!r} is no score of this run; expected one of test/server/accuracy, " in said


def test_a_callback_can_wait_for_what_a_delivery_reports() -> None:
    """It is there from the first round on, and not at the evaluation before it."""
    init = {"monitor": "server/dropped_out", "patience": 9}
    stopping = json.dumps({"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": init})
    dropouts = ["--delivery=benchmark.faults.Dropouts", "--delivery.probability=0.5"]
    main(["fit", *BASE, *dropouts, "--trainer.max_epochs=1", f"--trainer.callbacks+={stopping}", "--run_dir=run"])
    assert read_record("run").rounds_trained == 1


def test_a_run_that_stops_early_is_recorded_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    stopping = json.dumps(
        {
            "class_path": "lightning.pytorch.callbacks.EarlyStopping",
            "init_args": {"monitor": "test/server/accuracy", "mode": "max", "patience": 1, "min_delta": 2.0},
        }
    )
    with pytest.warns(UserWarning, match="monitor='test/server/accuracy' lets test images choose the last round"):
        main(["fit", *BASE, "--trainer.max_epochs=6", f"--trainer.callbacks+={stopping}"])
    assert "record: run/record.json (stopped early, after round 2 of 6)" in capsys.readouterr().out
    record = read_record("run")
    assert (record.rounds, record.rounds_trained) == (6, 2)
    assert verify_record("run") == []
    assert set(pd.read_parquet("run/metrics.parquet")["round"]) == {0, 1, 2}
