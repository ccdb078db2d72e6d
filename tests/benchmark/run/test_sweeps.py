"""The sweeps of configs/sweeps: what W&B would start, and that lightning-cli takes it."""

import contextlib
import io
import itertools
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from benchmark.records.record_file import read_record
from benchmark.run.cli import main

ROOT = Path(__file__).parents[3]
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))


@cache
def utils() -> Any:
    """W&B's own functions for sweeps, which take seconds to import."""
    return pytest.importorskip("wandb.sdk.launch.sweeps.utils")


def commands(sweep: dict[str, Any]) -> list[list[str]]:
    """Every command of a grid, made by W&B's own functions as its agent does."""
    names = list(sweep["parameters"])
    grid = itertools.product(*(sweep["parameters"][name]["values"] for name in names))
    made = []
    for point in grid:
        variables = utils().create_sweep_command_args(
            {"args": {n: {"value": v} for n, v in zip(names, point, strict=True)}}
        )
        variables |= {"program": [sweep["program"]], "env": ["/usr/bin/env"]}
        command: list[str] = []
        for part in utils().create_sweep_command(list(sweep["command"])):
            command += variables[part[2:-1]] if part.startswith("${") else [part]
        made.append(command)
    return made


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_is_one_for_wandb_and_chooses_nothing_on_test_images(path: Path) -> None:
    sweep = utils().load_sweep_config(str(path))
    assert sweep["method"] == "grid"
    assert all(set(entry) == {"values"} and entry["values"] for entry in sweep["parameters"].values())
    if "metric" in sweep:
        assert sweep["metric"]["goal"] == "maximize"
        assert sweep["metric"]["name"] in ("val/local/accuracy", "val/server/accuracy")
        assert "--data.val_fraction=0.1" in sweep["command"]
    assert any(part.startswith("--trainer.logger.dict_kwargs.group=") for part in sweep["command"])
    made = commands(sweep)
    assert len({tuple(command) for command in made}) == len(made)
    assert all(command[:3] == ["/usr/bin/env", "lightning-cli", "fit"] for command in made)
    if sweeps := sys.modules.get("sweeps"):  # W&B's schema; needs an older NumPy, so it is checked where it is at hand
        assert sweeps.schema_violations_from_proposed_config(sweep) == []


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_lightning_cli_takes_the_first_and_the_last_command(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = yaml.safe_load(path.read_text())
    monkeypatch.chdir(ROOT)
    for command in (commands(sweep)[0], commands(sweep)[-1]):
        printed = io.StringIO()
        with (
            patch.object(sys, "argv", ["lightning-cli"]),
            contextlib.redirect_stdout(printed),
            pytest.raises(SystemExit) as ended,
        ):
            main([*command[2:], "--print_config"])
        assert ended.value.code in (0, None)
        resolved = yaml.safe_load(printed.getvalue())
        for name in sweep["parameters"]:
            value = next(entry.partition("=")[2] for entry in command if entry.startswith(f"--{name}="))
            found = resolved
            for key in name.split("."):
                found = found[key]
            found = found["class_path"] if isinstance(found, dict) else found
            assert str(found) == value or float(found) == float(value)


#: What a sweep varies that is not tuned: a figure's ablation of shapes, shots, and draws at test time alone.
ABLATIONS = {
    *("model.init_args.visual_prompt", "data.partition.init_args.shots", "model.init_args.test_draws"),
}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_tries_the_values_of_the_methods_search_space(path: Path) -> None:
    sweep = yaml.safe_load(path.read_text())
    space = yaml.safe_load((ROOT / "configs" / "methods" / f"{path.stem.partition('_')[0]}.yaml").read_text())["search"]
    tuned = {name: entry["values"] for name, entry in sweep["parameters"].items() if name not in ABLATIONS}
    assert tuned == {name: space[name] for name in tuned}


@pytest.mark.slow
def test_a_command_of_the_demo_sweep_runs_offline(tmp_path: Path) -> None:
    sweep = yaml.safe_load((ROOT / "configs" / "sweeps" / "pfedpg_digits.yaml").read_text())
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    environment = os.environ | {"WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    assert shutil.which("lightning-cli", path=environment["PATH"])
    command = [*commands(sweep)[-1], "--trainer.max_epochs=1", f"--run_dir={tmp_path / 'run'}"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = ended.stdout.splitlines()
    assert [line for line in said if line.startswith("round 1/1  loss ") and "accuracy (val local) " in line]
    assert [line for line in said if line.startswith("val accuracy after round 1: server ")]
    assert read_record(tmp_path / "run").summary["local"]["val"]["accuracy"]["last"]["average"] > 0.05
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
