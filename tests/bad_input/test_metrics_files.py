"""Files of metrics that a checkpoint counts on."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import refusal
from federation import CONF

from benchmark.records.metrics_table import read_table, write_parquet
from benchmark.run.cli import main

BASE = ["--config", str(CONF / "base.yaml"), "--config", str(CONF / "FedAvg.yaml"), "--run_dir=run"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one round."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", *BASE, "--trainer.max_epochs=1"])
    (folder / "run/record.json").unlink()
    return folder / "run"


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def change_a_number(path: Path) -> None:
    metrics = read_table(path)
    metrics.loc[3, "value"] += 0.01
    write_parquet(path, metrics)


def drop_a_round(path: Path) -> None:
    write_parquet(path, read_table(path).query("round == 0"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, "the checkpoint was made after 2 evaluations, and in run are 0; put back metrics/ or metrics.parquet"),
        (drop_a_round, "the checkpoint was made after 2 evaluations, and in {run} are 1; put back"),
        (change_a_number, "the checkpoint was made after 2 evaluations, and in {run} are others; put back"),
        (cut, "run/metrics.parquet is not a readable metrics table"),
    ],
)
def test_a_run_whose_metrics_are_gone_or_changed_is_not_continued(
    damage: Callable[[Path], None],
    message: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    damage(Path("run/metrics.parquet"))
    line = refusal.refused(
        capsys, main, ["fit", *BASE, "--trainer.max_epochs=2", "--ckpt_path=run/checkpoints/last.ckpt"]
    )
    assert message.format(run=tmp_path / "run") in line
