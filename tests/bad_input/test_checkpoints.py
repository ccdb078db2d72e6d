"""Checkpoints that were cut off, changed, edited or made for another run, and what may go on from one."""

import copy
import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from federation import CONF, build, fit
from lightning.pytorch.callbacks import Callback
from refusal import refused
from trained_runs import killed_in_round

from benchmark.errors import ConfigurationError
from benchmark.privacy.user_level import UserLevelPrivacy
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import verify_record
from benchmark.run.checkpoint import AtomicCheckpointIO, read_checkpoint
from benchmark.run.checkpoint_form import check_longer
from benchmark.run.cli import main
from benchmark.server import ServerRule
from methods.trajectory import AveragedTrajectory, BetaTrajectory

BASE = ["--config", str(CONF / "base.yaml"), "--config", str(CONF / "HeadTune.yaml")]
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two rounds, each test's own copy is made of it."""
    run = tmp_path_factory.mktemp("checkpoints") / "run"
    main(["fit", *BASE, "--trainer.max_epochs=2", f"--run_dir={run}"])
    return run


@pytest.fixture
def last(two_rounds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The last checkpoint of that run, which was not finished, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(two_rounds, "run")
    Path("run/record.json").unlink()
    return Path("run/checkpoints/last.ckpt")


def goes_on(*arguments: str) -> list[str]:
    return ["fit", *BASE, "--trainer.max_epochs=3", "--run_dir=run", "--ckpt_path=last", *arguments]


def put(*keys: Any) -> Change:
    """Set the value at the end of a path of keys; ``del`` as the value takes it out."""
    *path, name, value = keys

    def change(content: dict[str, Any]) -> None:
        place: Any = content
        for key in path:
            place = place[key]
        if value == "del":
            del place[name]
        else:
            place[name] = value

    return change


def first_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def changed(content: dict[str, Any]) -> None:
        name = next(iter(content["state_dict"]))
        content["state_dict"][name] = change(content["state_dict"][name].clone())

    return changed


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] = float("nan")
    return tensor


RECORDER = ("callbacks", "Recorder")
SERVER = ("callbacks", "server")
DATA = "FederatedDataModule"
FIT = ("loops", "fit_loop")
PROGRESS = ("loops", "fit_loop", "epoch_progress", "current", "processed")
EDITS: dict[str, tuple[Change, str]] = {
    "a NaN": (first_tensor(with_nan), "in it holds numbers that are not finite"),
    "float16": (first_tensor(torch.Tensor.half), "torch.float16 there and"),
    "another shape": (first_tensor(lambda t: t[:-1]), "has shape and type"),
    "no callbacks": (put("callbacks", "del"), "it holds no callbacks, callbacks.server, callbacks.Recorder"),
    "no server": (put("callbacks", "server", "del"), "it holds no callbacks.server"),
    "no recorder": (put("callbacks", "Recorder", "del"), "it holds no callbacks.Recorder"),
    "no loops": (put("loops", "del"), "it holds no loops"),
    "empty loops": (put("loops", {}), "it holds no 'fit_loop'"),
    "no optimizers": (put("optimizer_states", "del"), "it holds no optimizer_states"),
    "no data": (put("FederatedDataModule", "del"), "it holds no FederatedDataModule"),
    "no version of Lightning": (put("pytorch-lightning_version", "del"), "it holds no pytorch-lightning_version"),
    "no frozen weights": (put("frozen_hash", "del"), "it holds no frozen_hash"),
    "other frozen weights": (put("frozen_hash", "0"), "other frozen weights"),
    "of a version before": (put("format", "del"), "is a checkpoint of format 1, as another version of this project"),
    "of a version to come": (put("format", 5), "this one reads format 4: go on with the version that wrote it, or st"),
    "state_dict is a list": (put("state_dict", []), "it holds no state_dict"),
    "a hundred rounds": (put("callbacks", "server", "finished_rounds", 100), "how many rounds are done (server.fin"),
    "a hundred epochs": (put(*PROGRESS, 100), "how many rounds are done (server.finished_rounds 2"),
    "inside a round": (put("callbacks", "server", "inside_round", True), "saved inside round 3"),
    "half a configuration": (put("callbacks", "Recorder", "config", '{"a": '), "it does not hold its configuration"),
    "evaluations a text": (put(*RECORDER, "evaluations", "x"), "callbacks.Recorder.evaluations: Input should be"),
    "evaluations negative": (put(*RECORDER, "evaluations", -1), "callbacks.Recorder.evaluations: Input should be"),
    "evaluations beyond": (put(*RECORDER, "evaluations", 10**9), "its callbacks.Recorder.evaluations cannot be of 2 "),
    "no evaluations": (put(*RECORDER, "evaluations", "del"), "callbacks.Recorder names no evaluations"),
    "seconds empty": (put(*RECORDER, "seconds", {}), "callbacks.Recorder.seconds.total: Field required"),
    "seconds a text": (put(*RECORDER, "seconds", "total", "x"), "callbacks.Recorder.seconds.total: Input should be"),
    "seconds NaN": (put(*RECORDER, "seconds", "evaluation", float("nan")), "callbacks.Recorder.seconds.evaluation: "),
    "code a list": (put(*RECORDER, "code", [1]), "callbacks.Recorder.code: Input should be a valid dict"),
    "reports of a number": (put(*RECORDER, "reports", {"a": 1}), "callbacks.Recorder.reports.a: Input should be an i"),
    "reports of others": (
        put(*RECORDER, "reports", {"a": torch.zeros(3)}),
        "its reports cannot be of this run's 11",
    ),
    "no configuration": (put(*RECORDER, "config", "null"), "it does not hold its configuration"),
    "dropped a number": (put(*SERVER, "dropped", 3), "callbacks.server.dropped: Input should be a valid dict"),
    "dropped of others": (put(*SERVER, "dropped", {11: 1}), "its dropped cannot be of this run's 11 clients"),
    "trained a number": (put(*SERVER, "trained", 3), "callbacks.server.trained: Input should be a valid list"),
    "trained of others": (put(*SERVER, "trained", [1, 11]), "its trained cannot be of this run's 11 clients"),
    "dropped too often": (put(*SERVER, "dropped", {1: 9}), "its callbacks.server.dropped cannot be of 2 rounds"),
    "a rule of another": (
        put(*SERVER, "rule", {"x": torch.zeros(3)}),
        "holds no state of the server ServerRule (",
    ),
    "traffic of texts": (put(*SERVER, "traffic", "rounds", ["x", "y"]), "callbacks.server.traffic.rounds.0: Input"),
    "data empty": (put(DATA, {}), "FederatedDataModule.manifest: Field required"),
    "width a text": (put(DATA, "width", "x"), "FederatedDataModule.width: Input should be a valid integer"),
    "width zero": (put(DATA, "width", 0), "FederatedDataModule.width: Input should be greater than or equal to 1"),
    "width beyond": (put(DATA, "width", 10**9), "its width cannot be of this run's 11 clients"),
    "a version before": (put("pytorch-lightning_version", "0.1.0"), "pytorch-lightning_version: 0.1.0 is before 2.0"),
    "no version": (put("pytorch-lightning_version", "x"), "pytorch-lightning_version: Invalid version: 'x'"),
    "five optimizers": (lambda c: c.update(optimizer_states=c["optimizer_states"] * 5), "its optimizer_states cannot"),
    "optimizers of texts": (put("optimizer_states", ["x"]), "optimizer_states.0: Input should be a valid dict"),
    "a sparse tensor": (first_tensor(torch.Tensor.to_sparse), "head.weight is no plain tensor whose numbers are"),
    "a meta tensor": (first_tensor(lambda t: t.to("meta")), "head.weight is no plain tensor whose numbers are in the"),
    "a quantised tensor": (
        first_tensor(lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)),
        "head.weight is no plain tensor whose numbers are in the file",
    ),
    "a tensor of nothing": (first_tensor(lambda t: torch.zeros(1).expand(10**12)), "head.weight is no plain tensor"),
    "epoch 0": (put("epoch", 0), "its epoch cannot be of 2 rounds"),
    "epoch 100": (put("epoch", 100), "its epoch cannot be of 2 rounds"),
    "steps negative": (put("global_step", -5), "global_step: Input should be greater than or equal to 0"),
    "steps of others": (put("global_step", 5), "its global_step cannot be of 2 rounds"),
    "batches 999": (
        put(*FIT, "epoch_loop.batch_progress", "current", "ready", 999),
        "its loops.fit_loop.epoch_loop",
    ),
    "batches in all": (put(*FIT, "epoch_loop.batch_progress", "total", "completed", 1), "its loops.fit_loop.epoch_l"),
    "loops of texts": (put("loops", "test_loop", "batch_progress", "total", "ready", "x"), "it holds no loops.test_lo"),
    "another seed": (put("FederatedDataModule", "seed", 9), "it was made with seed 9, this run has 3"),
}


@pytest.mark.parametrize("kind", EDITS)
def test_an_edited_checkpoint_is_refused(kind: str, last: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its hash, as edited with torch; and by its content if the hash was made anew."""
    change, message = EDITS[kind]
    content = copy.deepcopy(torch.load(last, weights_only=True))
    change(content)
    torch.save(content, last)
    with pytest.raises(ConfigurationError, match=r"does not end with its content's hash.*is it whole\?"):
        read_checkpoint(last)
    AtomicCheckpointIO().save_checkpoint(content, last)
    before = last.read_bytes()
    assert message in refused(capsys, main, goes_on())
    assert last.read_bytes() == before


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (lambda whole: b"", "is it whole?"),
        (lambda whole: whole[:1000], "is it whole?"),
        (lambda whole: whole[:-1], "is it whole?"),
        (lambda whole: whole + b"\0", "is it whole?"),
        (lambda whole: whole[: len(whole) // 2] + b"\0" * 100 + whole[len(whole) // 2 + 100 :], "was changed after"),
        (lambda whole: b"text", "is it whole?"),
    ],
)
def test_a_damaged_file_is_refused(
    written: Callable[[bytes], bytes], message: str, last: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last.write_bytes(written(last.read_bytes()))
    assert message in refused(capsys, main, goes_on())
    for content in ({}, [], torch.zeros(3), {"weight": torch.zeros(3)}):
        AtomicCheckpointIO().save_checkpoint(content, last)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"is no (Lightning )?checkpoint"):
            read_checkpoint(last)


def test_every_single_flipped_bit_is_noticed(last: Path) -> None:
    rng = random.Random(5)
    whole = last.read_bytes()
    tail = range(len(whole) - 80, len(whole))
    for place in [rng.randrange(len(whole)) for _ in range(100)] + list(tail):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.randrange(8)
        last.write_bytes(flipped)
        with pytest.raises(ConfigurationError, match=r"was changed after it was written|is it whole"):
            read_checkpoint(last)
    last.write_bytes(whole)
    read_checkpoint(last)


def test_a_checkpoint_is_of_this_run(last: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the checkpoint holds 2 rounds, more than trainer.max_epochs=1" in refused(
        capsys, main, goes_on("--trainer.max_epochs=1")
    )
    assert "training.lr was 0.02, is 0.5" in refused(capsys, main, goes_on("--model.init_args.training.lr=0.5"))
    assert "no checkpoint at gone.ckpt" in refused(capsys, main, goes_on("--ckpt_path=gone.ckpt", "--run_dir=other"))
    assert "no checkpoint at run" in refused(capsys, main, goes_on("--ckpt_path=run", "--run_dir=other"))
    assert not Path("other").exists()
    line = refused(capsys, main, ["fit", *BASE, "--ckpt_path=last"])
    assert "--ckpt_path=last is the last checkpoint of a run's directory: give --run_dir as well" in line
    for other in ("best", "hpc", "registry:model"):
        line = refused(capsys, main, ["test", *BASE, f"--ckpt_path={other}"])
        assert f"--ckpt_path={other}: a run keeps its last round; give last, or a checkpoint's file" in line


def test_a_learning_rate_that_follows_the_rounds_is_not_stretched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cosine = [*BASE, "--model.init_args.training.schedule=cosine", "--run_dir=run"]
    main(["fit", *cosine, "--trainer.max_epochs=2"])
    Path("run/record.json").unlink()
    line = refused(capsys, main, ["fit", *cosine, "--trainer.max_epochs=4", "--ckpt_path=last"])
    assert "of a run of 2 rounds, whose learning rate follows a cosine over all of them: give trainer.max_epoch" in line
    main(["fit", *cosine, "--trainer.max_epochs=2", "--ckpt_path=last"])
    assert verify_record("run") == []


def test_nor_is_a_mean_over_the_rounds() -> None:
    given, planned = AveragedTrajectory(3, 1), AveragedTrajectory(3)
    for rule in (ServerRule(), given, BetaTrajectory(9, False)):
        check_longer(2, 4, [], rule)
    for rule in (planned, UserLevelPrivacy(planned, noise_multiplier=1.0), BetaTrajectory(None, True)):
        with pytest.raises(ConfigurationError, match=r"Trajectory weighs each by its place in all .*max_epochs=2, or"):
            check_longer(2, 4, [], rule)


def test_a_run_of_cohorts_goes_on_one_by_one_and_back(last: Path) -> None:
    for rounds, alone in ((3, "true"), (4, "true"), (5, "false")):
        main(goes_on("--data.clients_at_once=4", f"--data.one_by_one={alone}", f"--trainer.max_epochs={rounds}"))
        assert read_record("run").rounds == rounds
        Path("run/record.json").unlink()


def test_settings_of_a_python_fit_are_the_resumed_runs(tmp_path: Path) -> None:
    method, data = build("FedAvg")
    fit(method, data, 1, save_to=tmp_path, evaluate=False)
    path = str(tmp_path / "checkpoints/last.ckpt")
    method, data = build("FedAvg", "--model.training.weight_decay=0.3", "--model.training.momentum=0.1")
    (group,) = fit(method, data, 2, ckpt_path=path, evaluate=False).optimizers[0].param_groups
    assert (group["weight_decay"], group["momentum"]) == (0.3, 0.1)
    method, data = build("FedAvg", "--model.training.optimizer=adam", "--model.training.momentum=0")
    with pytest.raises(ConfigurationError, match="its optimizer_states cannot be of this run"):
        fit(method, data, 2, ckpt_path=path, evaluate=False)


def test_a_run_goes_on_from_its_own_configuration(last: Path) -> None:
    config = Path("run/config.yaml").read_text()
    assert not {"run_dir", "ckpt_path", "__path__"} & {line.strip().partition(":")[0] for line in config.splitlines()}
    checkpoint = hashlib.sha256(last.read_bytes()).hexdigest()
    own = ["fit", "--config=run/config.yaml", "--trainer.max_epochs=3"]
    main([*own, f"--ckpt_path={last}", "--run_dir=elsewhere"])
    assert hashlib.sha256(last.read_bytes()).hexdigest() == checkpoint
    main([*own, "--ckpt_path=last", "--run_dir=run"])
    main([*own, "--run_dir=straight"])
    for run in ("elsewhere", "run"):
        assert verify_record(run) == []
        assert read_record(run).config_hash == read_record("straight").config_hash
        pd.testing.assert_frame_equal(
            pd.read_parquet(f"{run}/metrics.parquet"), pd.read_parquet("straight/metrics.parquet")
        )


def test_data_named_by_a_file_are_the_same_data_in_the_resolved_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.yaml").write_text(
        "source: federation.TinyImages\npartition: federation.Ragged\nbatch_size: 4\nclients_at_once: 3\n"
    )
    model = (CONF / "HeadTune.yaml").read_text()
    Path("run.yaml").write_text(f"data: data.yaml\n{model}trainer: {{accelerator: cpu, enable_progress_bar: false}}\n")
    main(["fit", "--config=run.yaml", "--trainer.max_epochs=1", "--run_dir=run"])
    Path("run/record.json").unlink()
    main(["fit", "--config=run/config.yaml", "--trainer.max_epochs=2", "--run_dir=run", "--ckpt_path=last"])
    assert verify_record("run") == []


@pytest.mark.parametrize("command", ["test", "validate"])
def test_scores_are_of_what_was_learned(
    command: str, last: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datamodules.federated.time", SimpleNamespace(monotonic=lambda: 0.0))  # reading says how long
    line = refused(capsys, main, [command, *BASE])
    assert f"lightning-cli {command} scores what a run has learned: give --run_dir=RUN_DIR, or --ckpt_path=" in line
    if command == "validate":  # on a run that holds training images out: test_trainer_settings.py
        return
    line = refused(capsys, main, [command, *BASE, "--run_dir=gone"])
    assert "no checkpoint at gone/checkpoints/last.ckpt" in line
    assert not Path("gone").exists()
    scores = set()
    for given in (
        [f"--ckpt_path={last}", "--config=run/config.yaml"],
        [f"--ckpt_path={last}", *BASE],
        ["--run_dir=run", *BASE],
        ["--run_dir=run"],
    ):
        capsys.readouterr()
        main([command, *given])
        scores.add(capsys.readouterr().out)
    assert len(scores) == 1
    assert "after aggregation" in scores.pop()


def test_a_method_that_trains_nothing_is_scored_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["test", "--config", str(CONF / "base.yaml"), "--config", str(CONF / "ZeroShotCLIP.yaml")])
    assert "after aggregation" in capsys.readouterr().out


@pytest.mark.parametrize("every", [1, 3])
def test_the_log_keeps_the_rounds_before(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a delivery reports, and rounds of which none was evaluated before the run goes on."""
    monkeypatch.chdir(tmp_path)
    options = ["--delivery=benchmark.faults.Dropouts", "--delivery.probability=0.3", "--trainer.logger=true"]
    options += [
        f"--trainer.check_val_every_n_epoch={every}",
        f"--trainer.num_sanity_val_steps={-1 if every == 1 else 0}",
    ]
    straight_on = ["fit", *BASE, *options, "--trainer.max_epochs=3"]
    killed_in_round(3, monkeypatch, lambda: main([*straight_on, "--run_dir=run"]))
    main([*straight_on, "--run_dir=straight"])
    main(goes_on(*options))
    straight, resumed = (pd.read_csv(f"{run}/csv/metrics.csv") for run in ("straight", "run"))
    assert resumed["step"].tolist() == [0, 1, 2, 3][every // 3 :]
    assert straight["server/dropped_out"].notna().sum() == 3 // every
    pd.testing.assert_frame_equal(resumed, straight, check_like=True)


def test_a_path_in_a_checkpoint_removes_nothing(last: Path) -> None:
    Path("home").mkdir()
    Path("home/thesis.tex").write_text("precious")
    content = torch.load(last, weights_only=True)
    (name,) = (name for name in content["callbacks"] if name.startswith("RoundCheckpoint"))
    away = Path("run/checkpoints").absolute()
    content["callbacks"][name] |= {"dirpath": str(away), "best_model_path": f"{away}/../../home"}
    AtomicCheckpointIO().save_checkpoint(content, last)
    main(goes_on())
    assert Path("home/thesis.tex").read_text() == "precious"
    for path in ("home", "home/thesis.tex"):
        with pytest.raises(ConfigurationError, match=f"{path} would be removed, and is no checkpoint of a run"):
            AtomicCheckpointIO().remove_checkpoint(path)
    AtomicCheckpointIO().remove_checkpoint(last)
    assert not last.exists()


class KeepsNumPy(Callback):
    """Keeps a number that is none of Python's."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"best": np.float64(0.5)}


def test_what_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [f"--trainer.callbacks={__name__}.KeepsNumPy", "--trainer.max_epochs=1", "--run_dir=run"]
    line = refused(capsys, main, ["fit", *BASE, *given])
    assert "what KeepsNumPy keeps in its state_dict could not be read again (numpy" in line
    assert "checkpoints hold tensors, numbers, texts" in line


def test_checkpoints_of_ones_own_stand_beside_the_runs_and_can_be_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    every = ["--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.save_top_k=-1"]
    main(["fit", *BASE, *every, "--trainer.max_epochs=2", "--run_dir=every"])
    assert Path("every/checkpoints/last.ckpt").is_file()
    # After an evaluation, when the Trainer has not counted the round yet.
    best = ["--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.monitor=test/server/accuracy"]
    best += ["--trainer.callbacks.mode=max", "--trainer.callbacks.dirpath=best", "--trainer.check_val_every_n_epoch=2"]
    main(["fit", *BASE, *best, "--trainer.max_epochs=2", "--run_dir=run"])
    (saved,) = Path("best").glob("*.ckpt")
    main(["test", "--run_dir=run", f"--ckpt_path={saved}"])
    capsys.readouterr()
    on = ["--trainer.max_epochs=4", "--run_dir=on", f"--ckpt_path={saved}"]
    line = refused(capsys, main, ["fit", *BASE, *best, *on])
    assert "can't be continued: it does not know how many rounds are done" in line
