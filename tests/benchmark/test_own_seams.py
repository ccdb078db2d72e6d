"""A server around any other and a delivery of a user's own, named in YAML: runs, ranks, kills, tables and tuning."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from benchmark.records.metrics_table import read_table
from benchmark.records.record import RunRecord
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import verify_record

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

SEAMS = '''
from benchmark.delivery import Delivery
from benchmark.server import WrappedRule


class Halved(WrappedRule):
    """Goes half of the way."""

    def __init__(self, inner=None, share: float = 0.5):
        super().__init__(inner)
        self.share = share

    def aggregate(self, round, shared, uploads):
        new = super().aggregate(round, shared, uploads)
        self.moved = sum((new[n] - shared[n]).norm().item() for n in new)
        return {n: shared[n] + self.share * (new[n] - shared[n]) for n in new}

    def report(self, round):
        return super().report(round) | {"moved": self.moved}


class WithoutFirst(Delivery):
    """Loses the upload of each round's first client."""

    def arrive(self, round, sent):
        return sent.of(range(1, len(sent.clients)))
'''
OWN = {
    "server": {"class_path": "seams.Halved", "init_args": {"share": 0.5}},
    "delivery": {"class_path": "seams.WithoutFirst"},
}
TABLE = {
    "title": "Two rows",
    "presets": {
        "demo": {
            "seeds": [3],
            "overrides": ["--trainer.max_epochs=2"],
            "data": [{"name": "digits", "label": "Digits", "suite": "digits"}],
        }
    },
    "rows": [
        {"label": "As published", "name": "plain", "method": "fedavg", "point": "server"},
        {"label": "With ours", "name": "ours", "method": "fedavg", "point": "server", "configs": ["own.yaml"]},
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: their classes, a configuration that names them, and a table."""
    (tmp_path / "seams.py").write_text(SEAMS)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(OWN))
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(TABLE))
    return tmp_path


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A command in the folder."""
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def done(folder: Path, *arguments: str) -> str:
    """Run a command, check that it ends well, and return its output."""
    process = started(folder, *arguments)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    return said


def fit(method: str, run: str, *options: str) -> tuple[str, ...]:
    """The command of a run."""
    configs = (f"--config=methods/{method}", "--config=suites/digits", "--config=own.yaml")
    return (
        "benchmark.run.cli",
        "fit",
        *configs,
        "--trainer.max_epochs=3",
        "--data.clients_at_once=2",
        f"--run_dir={run}",
        *options,
    )


@pytest.mark.parametrize("method", ["fedavg", "pfedpg"])
def test_a_run_on_two_ranks_and_one_that_is_killed_end_as_the_plain_one(method: str, folder: Path) -> None:
    done(folder, *fit(method, "one"))
    done(folder, *fit(method, "two", "--trainer.devices=2"))
    process = started(folder, *fit(method, "killed"))
    checkpoint = folder / "killed" / "checkpoints" / "last.ckpt"
    while process.poll() is None and not checkpoint.exists():
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done(folder, *fit(method, "killed", f"--ckpt_path={checkpoint}"))
    states, facts = {}, {}
    for run in ("one", "two", "killed"):
        record = read_record(folder / run)
        assert record.server.startswith("seams.Halved(")
        assert verify_record(folder / run) == []
        assert record.facts is not None
        facts[run] = record.facts["moved"]
        states[run] = torch.load(folder / run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for run in ("two", "killed"):
        pd.testing.assert_frame_equal(
            read_table(folder / run / "metrics.parquet"), read_table(folder / "one" / "metrics.parquet")
        )
        assert facts[run] == facts["one"]
        assert list(facts[run]) == ["1", "2", "3"]
        for name, value in states["one"].items():
            assert torch.equal(states[run][name], value), (run, name)


def records(folder: Path) -> list[RunRecord]:
    """The records of all finished runs."""
    return [read_record(path.parent) for path in folder.glob("runs/*/record.json")]


def test_a_row_of_a_table_has_them_untuned_and_tuned(folder: Path) -> None:
    assert "Halved" in done(folder, "benchmark.commands", "table", "two.yaml")
    untuned = records(folder)
    assert {record.server for record in untuned} == {
        "benchmark.server.ServerRule",
        "seams.Halved(benchmark.server.ServerRule)",
    }
    assert len({record.summary["server"]["test"]["loss"]["last"]["average"] for record in untuned}) == 2
    done(folder, "benchmark.commands", "tune", "two.yaml", "--trials=2", "--rounds=1", "--seeds=0")
    assert {record.server for record in records(folder) if record.tuning} == {record.server for record in untuned}
