"""The command line as its users type it, in this process."""

import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import pytest
import torch
import yaml
from federation import CONF
from PIL import Image

from benchmark.records.record_file import read_record
from benchmark.records.stored_run import verify_record
from benchmark.run.cli import FederatedCLI, main
from benchmark.run.command import resolved
from benchmark.run.display import Screen

BASE = ["--config", str(CONF / "base.yaml"), "--config", str(CONF / "FedVPT.yaml")]
ONE_ROUND = ["--trainer.max_epochs=1"]


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, command: str = "fit") -> str:
    """The one line that a refused command prints; it must exit with 2 and leave no record."""
    with pytest.raises(SystemExit) as exit:
        main([command, *BASE, *ONE_ROUND, "--run_dir=run", *arguments])
    assert exit.value.code == 2
    assert not Path("run/record.json").exists()
    assert not Path("run/metrics.parquet").exists()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def fit(*arguments: str) -> Path:
    main(["fit", *BASE, *ONE_ROUND, "--run_dir=run", *arguments])
    return Path("run")


def test_a_run_leaves_a_whole_record_in_its_directory() -> None:
    run = fit("--model.init_args.training.lr=0.07")
    assert verify_record(run) == []
    record = read_record(run)
    assert (record.method, record.dataset, record.seed, record.rounds_trained) == ("FedVPT", "TinyImages", 3, 1)
    assert record.communication["up_floats"] == 3 * 64
    assert record.trained is not None
    assert (len(record.trained), record.trained.count(True), record.trained.count(False)) == (11, 7, 4)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["init_args"]["training"] == {
        "lr": 0.07,
        "epochs": 2,
        "momentum": 0.9,
        "optimizer_state": "fresh",
        "weight_decay": 0.001,
        "clip": None,
        "optimizer": "sgd",
        "steps": None,
        "schedule": "constant",
    }
    metrics = pd.read_parquet(run / "metrics.parquet")
    assert set(metrics["round"]) == {0, 1}
    assert (
        len(metrics[metrics["split"] == "test"]) == (2 * 11 + 11 + 7) * 4
    )  # after local training of the 7 that took part
    of_training = metrics[metrics["split"] == "train"]
    assert set(zip(of_training["round"], of_training["metric"], strict=True)) == {(1, "loss")}
    assert len(of_training) == 7  # the clients that took part
    assert len(json.loads((run / "manifest.json").read_text())["clients"]) == 11


def test_command_lines_of_one_process_leave_nothing_behind_for_the_next() -> None:
    first = resolved([*BASE, "--model.init_args.training.lr=0.07", "--data.clients_per_round=2"])
    other = resolved([*BASE, "--trainer.logger=false", "--model.init_args.num_prompts=2"])
    assert (first["model"]["init_args"]["training"]["lr"], other["model"]["init_args"]["training"]["lr"]) == (
        0.07,
        0.02,
    )
    assert (first["model"]["init_args"]["num_prompts"], other["model"]["init_args"]["num_prompts"]) == (3, 2)
    again = resolved([*BASE, "--model.init_args.training.lr=0.07", "--data.clients_per_round=2"])
    assert again == first
    made = FederatedCLI([*BASE, "--trainer.logger=false"], run=False)
    assert made.parser is not FederatedCLI([*BASE, "--trainer.logger=false"], run=False).parser
    held = weakref.ref(made.model)
    del made
    gc.collect()
    assert held() is None


def test_without_a_directory_every_run_gets_its_own() -> None:
    for _ in range(2):
        main(["fit", *BASE, *ONE_ROUND])
    assert len(list(Path("runs").glob("fedvpt-tinyimages-s3-*/record.json"))) == 2


def test_the_default_logger_writes_csv_with_rounds_as_steps() -> None:
    run = fit("--trainer.logger=true")
    table = pd.read_csv(next(run.glob("csv/metrics.csv")))
    assert table["step"].tolist() == [0, 1]
    assert {"test/server/accuracy", "test/local/accuracy", "test/server/worst_accuracy", "train/loss"} <= set(table)


@pytest.mark.parametrize(
    ("logger", "left"),
    [
        ("lightning.pytorch.loggers.TensorBoardLogger", "**/events.out.tfevents.*"),
        ("lightning.pytorch.loggers.WandbLogger", "wandb/offline-run-*/run-*.wandb"),
    ],
)
def test_other_loggers_write_into_the_runs_directory(logger: str, left: str) -> None:
    offline = ["--trainer.logger.init_args.offline=true"] if "Wandb" in logger else []
    run = fit(f"--trainer.logger={logger}", "--trainer.logger.init_args.save_dir=elsewhere", *offline)
    assert list(run.glob(left))
    assert not Path("elsewhere").exists()


def test_validate_and_test_read_a_checkpoint_and_give_the_last_rounds_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = ["--data.val_fraction=0.3", "--data.partition=IID", "--data.partition.num_clients=9"]
    run = fit(*held)
    summary = read_record(run).summary["server"]
    for command, split in (("validate", "val"), ("test", "test")):
        last = summary[split]["accuracy"]["last"]["average"]
        capsys.readouterr()
        main([command, *BASE, *held, f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"])
        out = capsys.readouterr().out
        average = next(line for line in out.split("after aggregation")[-1].splitlines() if "average" in line)
        assert f"{100 * last:.2f}" in average
        assert "accuracy, %" in out


def test_a_finished_run_is_not_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    fit()
    with pytest.raises(SystemExit):
        fit()
    assert "holds a finished run; give another --run_dir" in capsys.readouterr().err


def test_an_unfinished_run_is_continued_and_not_started_over(capsys: pytest.CaptureFixture[str]) -> None:
    run = fit()
    (run / "record.json").unlink()
    with pytest.raises(SystemExit):
        fit()
    said = "continue it with benchmark resume run, or with --ckpt_path=run/checkpoints/last.ckpt; or"
    assert said in capsys.readouterr().err
    fit("--trainer.max_epochs=2", "--ckpt_path=run/checkpoints/last.ckpt")
    assert read_record(run).rounds_trained == 2
    assert set(pd.read_parquet(run / "metrics.parquet")["round"]) == {0, 1, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.partition=Nonsense"], "data.partition: there is no 'Nonsense'; expected one of AtMostClasses, "),
        (["--model=Nonsense"], "model: there is no 'Nonsense'; expected one of "),
        (
            ["--model.init_args.learning=3"],
            "there is no option 'model.init_args.learning'; expected one of model.init_args.backbone, ",
        ),
        (
            ["--model.init_args.lr=3"],
            "there is no option 'model.init_args.lr'; did you mean model.init_args.training.lr?",
        ),
        (["--trainer.max_epochs=one"], "trainer.max_epochs: expected a whole number or null, got one"),
        (["--data.batchsize=3"], "there is no option 'data.batchsize'; did you mean data.batch_size"),
        (["--trainer.max_epo=3"], "there is no option 'trainer.max_epo'; did you mean trainer.max_epochs"),
        (
            ["--model.init_args.backbone.init_args.weigths=3"],
            "; did you mean model.init_args.backbone.init_args.weights?",
        ),
        (
            ["--data.partition=DirichletShared", "--data.partition.alpha=0"],
            "data.partition.init_args.alpha: expected a number above 0 and at most 1,000,000, got 0",
        ),
        (
            ["--data.partition=PathologicalRandom", "--data.partition.classes_per_client=9"],
            "classes_per_client=9 is more than the 8 classes",
        ),
        (
            ["--data.partition=DirichletShared", "--data.partition.alpha=0.05", "--data.partition.min_size=15"],
            "min_size=15 test images each need 75",
        ),
        (["--data.partition=IID", "--data.partition.num_clients=100"], "client"),
        (
            ["--data.clients_at_once=0"],
            "data.clients_at_once: expected a whole number from 1 to 1,000,000,000 or auto, got 0",
        ),
        (["--data.participation=0"], "data.participation: expected a number above 0 and at most 1, got 0"),
        (["--data.clients_per_round=12"], "between 1 and the number of clients that train, 11; got 12"),
        (
            [
                "--model.init_args.backbone.init_args.weights=file",
                "--model.init_args.backbone.init_args.checkpoint_path=gone.safetensors",
            ],
            "gone.safetensors: no such file",
        ),
        (
            ["--data.source=CIFAR10", "--data.source.root=nowhere"],
            "CIFAR-10 is not in nowhere: download it from https:",
        ),
        (  # the data come first: weights can be a long download
            ["--data.source=CIFAR10", "--data.source.root=nowhere", "--model.init_args.backbone.init_args.name=gone"],
            "CIFAR-10 is not in nowhere: download it from https:",
        ),
        (["--ckpt_path=gone.ckpt"], "no checkpoint at gone.ckpt"),
        (["--trainer.gradient_clip_val=1"], "each client's own are clipped by clip of the method's training"),
        (["--trainer.precision=bf16-true"], "precision 'bf16-true' is not supported"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if any(a.startswith("--data.partition=") for a in arguments) and not any("num_clients" in a for a in arguments):
        arguments = [*arguments, "--data.partition.num_clients=5", "--data.clients_per_round=5"]
    elif "--data.partition=IID" in arguments:
        arguments = [*arguments, "--data.clients_per_round=5"]
    assert message in refused(capsys, *arguments)


def test_a_checkpoint_of_another_configuration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    fit().rename("first")
    last = "--ckpt_path=first/checkpoints/last.ckpt"
    more = "--trainer.max_epochs=2"
    assert "training.lr was 0.02, is 0.5" in refused(capsys, last, more, "--model.init_args.training.lr=0.5")
    assert "seed was 3, is 4" in refused(capsys, last, more, "--seed_everything=4")
    assert "another configuration" in refused(capsys, last, more, "--model.init_args.num_prompts=4")
    assert "is it whole?" in refused(capsys, more, f"--ckpt_path={_broken(Path('broken.ckpt'))}")


def _broken(path: Path) -> Path:
    path.write_bytes(Path("first/checkpoints/last.ckpt").read_bytes()[:1000])
    return path


def test_a_manifest_is_followed_and_one_of_other_data_refused(capsys: pytest.CaptureFixture[str]) -> None:
    run = fit()
    again = ["--data.partition=FromManifest", "--data.partition.path=run/manifest.json"]
    main(["fit", *BASE, *ONE_ROUND, "--run_dir=again", *again])
    assert read_record("again").manifest_hash == read_record(run).manifest_hash
    pd.testing.assert_frame_equal(pd.read_parquet("again/metrics.parquet"), pd.read_parquet("run/metrics.parquet"))
    run.rename("first")
    manifest = json.loads(Path("first/manifest.json").read_text())
    _rewrite(manifest, Path("other.json"))
    line = refused(capsys, "--data.partition=FromManifest", "--data.partition.path=other.json")
    assert "other.json" in line


def _rewrite(manifest: dict[str, Any], path: Path) -> None:
    """The same manifest with one client's first image swapped for another."""
    manifest["clients"][0]["train"][0] = manifest["clients"][1]["train"][0]
    path.write_text(json.dumps(manifest))


def test_a_corrupt_image_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    from datamodules.cifar import CIFAR10

    for part in ("train", "test"):
        for name in CIFAR10.class_names:
            folder = Path("data/cifar10") / part / name
            folder.mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (32, 32), (i, 20 * len(name), 3)).save(folder / f"{i}.png")
    Path("data/cifar10/train/cat/1.png").write_bytes(b"no picture")
    line = refused(capsys, "--data.source=CIFAR10", "--data.partition=IID", "--data.partition.num_clients=7")
    assert "cat/1.png" in line


def test_bf16_trains_and_shared_values_stay_in_float32() -> None:
    run = fit("--trainer.precision=bf16-mixed")
    held = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert {value.dtype for value in held.values()} == {torch.float32}
    accuracy = read_record(run).summary["server"]["test"]["accuracy"]
    assert accuracy["last"]["average"] >= accuracy["round0"]["average"]


def test_the_progress_display_shows_round_step_clients_loss_and_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        patch.object(sys.stdout, "isatty", lambda: True),
        patch.dict("os.environ", {"COLUMNS": "200", "TERM": "xterm"}),
        patch.object(Screen, "look", lambda screen: screen.live.refresh()),  # after each step, however fast they are
    ):
        fit("--trainer.enable_progress_bar=true", "--trainer.max_epochs=2")
    shown = capsys.readouterr().out
    for part in ("round 2/2 · local training, step ", " of ", "loss ", "clients ", "aggregation", "100 % of 2 rounds"):
        assert part in shown


def test_without_a_terminal_there_is_one_line_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    fit("--trainer.enable_progress_bar=true", "--trainer.max_epochs=2")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round ")]
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
    assert all("loss" in line and "accuracy after aggregation" in line for line in lines)
