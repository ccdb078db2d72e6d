"""Runs that are killed at random moments and continued end bit for bit like an uninterrupted one."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from federation import CONF
from processes import Forked

ROOT = Path(__file__).parents[3]
ROUNDS = 8


def command(conf: str, run_dir: Path) -> list[str]:
    last = run_dir / "checkpoints" / "last.ckpt"
    return [
        *(sys.executable, "-m", "benchmark.run.cli", "fit"),
        *("--config", str(CONF / "base.yaml"), "--config", str(CONF / f"{conf}.yaml")),
        *(f"--trainer.max_epochs={ROUNDS}", f"--run_dir={run_dir}"),
        *([f"--ckpt_path={last}"] if last.exists() else []),
    ]


def start(conf: str, run_dir: Path) -> Forked:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return Forked(command(conf, run_dir), Path.cwd(), environment)


def killed_at_random(conf: str, run_dir: Path, seed: int) -> int:
    """Kill the run a random while after its next round has begun to count, again and again; returns the kills."""
    rng = random.Random(seed)
    kills = 0
    while not (run_dir / "record.json").exists():
        checkpoint = run_dir / "checkpoints" / "last.ckpt"
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        process = start(conf, run_dir)
        while process.poll() is None and kills < 4:
            if checkpoint.exists() and checkpoint.stat().st_mtime_ns != before:
                time.sleep(rng.uniform(0, 0.3))
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        output = process.communicate()[0]
        assert process.returncode in (0, -signal.SIGKILL), output
    return kills


def outcome(run_dir: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    return checkpoint["state_dict"] | _tensors(checkpoint["callbacks"]["server"], "server")


def _tensors(value: object, name: str) -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {name: value}
    parts = value.items() if isinstance(value, dict) else ()
    return {n: t for key, part in parts for n, t in _tensors(part, f"{name}.{key}").items()}


def check(conf: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    output = (process := start(conf, whole)).communicate()[0]
    assert process.returncode == 0, output
    assert killed_at_random(conf, killed, seed=len(conf)) >= 2
    expected, found = outcome(whole), outcome(killed)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    assert (whole / "metrics.parquet").read_bytes() == (killed / "metrics.parquet").read_bytes()
    assert (whole / "manifest.json").read_bytes() == (killed / "manifest.json").read_bytes()


def test_pfedpg_survives_being_killed(tmp_path: Path) -> None:
    check("PFedPG", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["FedAvg", "FedVPT", "Local"])
def test_others_survive_being_killed(conf: str, tmp_path: Path) -> None:
    check(conf, tmp_path)
