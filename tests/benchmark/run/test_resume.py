"""``benchmark resume`` and ``lightning-cli test --run_dir``: all they need is the run's directory."""

import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from federation import CONF
from lightning.pytorch.callbacks import EarlyStopping
from refusal import refused
from trained_runs import killed_in_round

from benchmark import commands
from benchmark.config.parser import FederatedParser
from benchmark.records.record_file import read_record
from benchmark.run import cli
from benchmark.signals import Interrupted

BASE = [f"--config={CONF / 'base.yaml'}", f"--config={CONF / 'HeadTune.yaml'}"]


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_goes_on_from_its_directory_alone(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["fit", *BASE, "--trainer.max_epochs=2", "--run_dir=whole"])
    cli.main(["fit", *BASE, "--trainer.max_epochs=1", "--run_dir=run"])
    Path("run/record.json").unlink()
    assert commands.main(["resume", "run", "--trainer.max_epochs=2"]) == 0
    assert Path("run/metrics.parquet").read_bytes() == Path("whole/metrics.parquet").read_bytes()
    capsys.readouterr()
    cli.main(["test", "--run_dir=run"])
    out = capsys.readouterr().out.split("after aggregation")[-1]
    average = read_record("run").summary["server"]["test"]["accuracy"]["last"]["average"]
    assert f"{100 * average:.2f}" in next(line for line in out.splitlines() if "average" in line)
    line = refused(capsys, commands.main, ["resume", "run"])
    assert "run holds a finished run; for more rounds, in a directory of their own: lightning-cli fit --config=" in line
    more = line.partition("of their own: lightning-cli ")[2].replace("ROUNDS", "3").split()
    cli.main([*more, "--run_dir=more"])
    assert read_record("more").rounds_trained == 3


def stopping(**given: Any) -> list[str]:
    """Arguments of a fit that ``EarlyStopping`` may end."""
    stop = {"class_path": "EarlyStopping", "init_args": {"monitor": "train/loss", **given}}
    Path("stop.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [stop], "check_val_every_n_epoch": 1}}))
    return ["fit", *BASE, "--config=stop.yaml"]


@pytest.mark.parametrize("given", [{"patience": 1, "min_delta": 9.0}, {"patience": 3, "stopping_threshold": 100.0}])
def test_a_run_that_early_stopping_ended_does_not_train_on(given: dict[str, Any]) -> None:
    cli.main([*stopping(**given), "--trainer.max_epochs=6", "--run_dir=run"])
    trained = read_record("run").rounds_trained
    assert trained < 6
    whole = Path("run/metrics.parquet").read_bytes()
    Path("run/record.json").unlink()  # as if it had been killed before it was written
    assert commands.main(["resume", "run"]) == 0
    assert read_record("run").rounds_trained == trained
    assert Path("run/metrics.parquet").read_bytes() == whole


def test_a_run_that_early_stopping_did_not_end_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    args = [*stopping(patience=0), "--trainer.max_epochs=3", "--run_dir=run"]
    killed_in_round(2, monkeypatch, lambda: cli.main(args))
    assert commands.main(["resume", "run"]) == 0
    assert read_record("run").rounds_trained == 3


def test_a_run_that_went_on_after_a_stop_goes_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def improves(stop: EarlyStopping, current: Any) -> tuple[bool, str]:
        stop.wait_count = 0
        return False, "it improves"

    cli.main([*stopping(patience=1, min_delta=9.0), "--trainer.max_epochs=4", "--run_dir=run"])
    stopped = read_record("run").rounds_trained
    Path("run/record.json").unlink()
    monkeypatch.setattr(EarlyStopping, "_evaluate_stopping_criteria", improves)
    more = ["resume", "run", "--trainer.max_epochs=5"]
    killed_in_round(stopped + 2, monkeypatch, lambda: commands.main(more))
    assert commands.main(["resume", "run"]) == 0
    assert read_record("run").rounds_trained == 5


def test_what_cannot_go_on_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere is no folder; give the directory" in refused(capsys, commands.main, ["resume", "nowhere"])
    assert "nowhere is no folder; give the directory" in refused(capsys, cli.main, ["test", "--run_dir=nowhere"])
    Path("begun").mkdir()
    assert "begun holds no config.yaml, as a run" in refused(capsys, commands.main, ["resume", "begun"])
    Path("begun/config.yaml").write_text("seed_everything: 3\n")
    line = refused(capsys, commands.main, ["resume", "begun"])
    assert "has no finished round to go on from; start it again: lightning-cli fit --config=begun/config.yaml" in line


def test_a_signal_before_a_run_goes_on_names_what_is_kept_and_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object, **__: object) -> NoReturn:
        raise Interrupted(signal.SIGTERM)

    def said(*arguments: str, program: str = "lightning-cli") -> str:
        with pytest.raises(SystemExit, match="143"):
            commands.main([*arguments]) if program == "benchmark" else cli.main([*arguments])
        return capsys.readouterr().err.strip()

    monkeypatch.setattr(FederatedParser, "parse_args", ended)
    own = ["fit", *BASE, "--run_dir=run"]
    assert said(*own) == "stopped by SIGTERM: no round is finished and kept yet; the same command starts again"
    assert said(*own[:-1]) == "stopped by SIGTERM: there was nothing to keep yet; the same command starts again"
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/checkpoints/last.ckpt").touch()
    whole = [Path(word.removeprefix("--config=")).read_text() for word in BASE]
    Path("run/config.yaml").write_text("".join(whole))
    kept = "stopped by SIGTERM: kept up to the last finished round; go on with: "
    more = ["resume", "run", "--trainer.max_epochs=4"]
    assert said(*more, program="benchmark") == f"{kept}benchmark {' '.join(more)}"
    for path in ("last", "run/checkpoints/last.ckpt"):
        again = [*own, f"--ckpt_path={path}"]
        assert said(*again) == f"{kept}lightning-cli {' '.join(again)}"
    assert said(*own) == f"{kept}benchmark resume run"
