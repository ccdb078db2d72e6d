"""The data that W&B and TensorBoard receive, read from the files that they write."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from federation import CONF
from lightning.pytorch.loggers import TensorBoardLogger

from benchmark.records.record_file import read_record
from benchmark.run.tracking import Tracking, flattened

wandb = pytest.importorskip("wandb")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
wandb_file = pytest.importorskip("wandb_file")

LOGGERS = """
trainer:
  check_val_every_n_epoch: 2
  logger:
    - class_path: lightning.pytorch.loggers.WandbLogger
      init_args: {project: prompts, offline: true}
    - class_path: lightning.pytorch.loggers.TensorBoardLogger
"""
TWICE = """
import sys
from pathlib import Path
import wandb
from benchmark import commands
from benchmark.run.cli import main
from fedprompt import fit

for seed in (1, 2):
    fit("seeds.yaml", seed=seed, run_dir=f"runs/seed{seed}")
for seed in (1, 2):
    fit("memory.yaml", seed=seed, rounds=0)
wandb.finish()
main(["fit", *sys.argv[1:], "--trainer.max_epochs=2", "--run_dir=runs/tracked"])
wandb.finish()
Path("runs/tracked/record.json").unlink()
commands.main(["resume", "runs/tracked", "--trainer.max_epochs=4"])
wandb.finish()
wandb.teardown()  # its service has written all by then
"""
METRICS = {f"test/{p}/{m}" for p in ("server", "local") for m in ("accuracy", "worst_accuracy", "macro_f1", "loss")}
COSTS = {"communication/clients", "communication/down_bytes", "communication/up_bytes", "seconds/training"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rounds, stopped after two; in a process of its own, since W&B keeps one session for all of a process.

    Before, there were two other runs in this process.
    """
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "loggers.yaml").write_text(LOGGERS)
    seeds = {
        "base": [str(CONF / "base.yaml"), str(CONF / "FedVPT.yaml")],
        "trainer": yaml.safe_load(LOGGERS)["trainer"] | {"max_epochs": 1, "check_val_every_n_epoch": 1},
    }
    (folder / "seeds.yaml").write_text(yaml.safe_dump(seeds))
    of_memory = {"class_path": "WandbLogger", "init_args": {"offline": True}}
    (folder / "memory.yaml").write_text(yaml.safe_dump(seeds | {"trainer": {**seeds["trainer"], "logger": of_memory}}))
    files = [f"--config={CONF / name}" for name in ("base.yaml", "FedVPT.yaml")] + ["--config=loggers.yaml"]
    paths = [str(Path(__file__).parents[3]), str(CONF.parent)]
    # Without what names the service of this process's session.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"WANDB_SILENT": "true", "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", TWICE, *files], cwd=folder, env=environment, check=True)
    return folder / "runs/tracked"


@pytest.fixture(scope="module")
def told(run: Path) -> dict[str, list[Any]]:
    """Per kind, the records of both processes."""
    found: dict[str, list[Any]] = {}
    for path in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_file.records(path):
            found.setdefault(record.WhichOneof("record_type"), []).append(record)
    return found


def test_wandb_has_one_run_by_the_directorys_name_with_the_whole_configuration(
    run: Path, told: dict[str, list[Any]]
) -> None:
    runs = [record.run for record in told["run"]]
    assert {entry.display_name for entry in runs} == {"tracked"}
    assert {entry.project for entry in runs} == {"prompts"}
    assert len({entry.run_id for entry in runs}) == 1
    config: dict[str, Any] = {}
    for record in told["config"]:
        config |= wandb_file.content(record.config.update)
    assert config["model.init_args.training.lr"] == 0.02
    assert config["data.partition.class_path"] == "federation.Ragged"
    assert config["trainer.max_epochs"] == 4
    named = {name: config[name] for name in ("method", "dataset", "setting", "seed", "server")}
    record = read_record(run)
    assert named == {name: getattr(record, name) for name in named}
    assert not [name for name in config if name.startswith("trainer.logger")]


def test_wandb_has_the_round_as_axis_with_scores_costs_and_clients(run: Path, told: dict[str, list[Any]]) -> None:
    axes = {(record.metric.name or record.metric.glob_name): record.metric.step_metric for record in told["metric"]}
    assert axes["*"] == "round"
    rows = [wandb_file.content(record.history.item) for record in told["history"]]
    assert [(any(name.startswith("partition") for name in row), row["round"]) for row in rows] == [
        (True, 0),
        *((False, n) for n in range(5)),
    ]
    assert [record.history.step.num for record in told["history"]] == [0, 1, 2, 3, 4, 5]  # though two processes count
    rounds = {row["round"]: row for row in rows}
    table = pd.read_parquet(run / "metrics.parquet")
    for number, row in rounds.items():
        assert (set(row) >= METRICS) == (number % 2 == 0)
        assert ({*COSTS} <= set(row)) == (number > 0)
        assert ("seconds/evaluation" in row) == (number in (2, 4))
        assert ("clients.path" in row) == (number % 2 == 0)
        if number % 2 == 0:
            mine = table.query(f"round == {number} and point == 'server' and split == 'test' and metric == 'accuracy'")
            assert row["test/server/accuracy"] == pytest.approx(mine["value"].mean())
    assert rounds[3]["communication/clients"] == 7
    assert rounds[3]["communication/up_bytes"] == 7 * 4 * read_record(run).communication["up_floats"]
    media = run.glob("wandb/offline-run-*/files/media/table/*.json")
    tables = [json.loads(path.read_text()) for path in media]
    assert all(table["columns"][:2] == ["client", "name"] and len(table["data"]) == 11 for table in tables)
    assert any(None in row for table in tables for row in table["data"])  # not every client has trained
    assert list(run.glob("wandb/offline-run-*/files/media/images/partition_*.png"))


def test_wandb_has_the_records_summary_and_the_record(run: Path, told: dict[str, list[Any]]) -> None:
    summary: dict[str, Any] = {}
    for record in told["summary"]:
        summary |= wandb_file.content(record.summary.update)
    last = read_record(run).summary["server"]["test"]["accuracy"]["last"]
    assert summary["last/test/server/accuracy/average"] == last["average"]
    assert summary["last/test/server/accuracy/worst"] == last["worst"]
    kept = [record.artifact for record in told["artifact"] if record.artifact.type == "record"]
    assert [artifact.name for artifact in kept] == ["tracked", "tracked"]
    held = {entry.path for entry in kept[-1].manifest.contents}
    assert held == {"record.json", "config.yaml", "manifest.json", "metrics.parquet"}


def test_tensorboard_has_curves_histograms_pictures_and_hyperparameters(run: Path) -> None:
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert METRICS | COSTS | {"seconds/evaluation"} <= set(tags["scalars"])
    assert "hp_metric" not in tags["scalars"]
    assert [event.step for event in events.Scalars("test/server/accuracy")] == [0, 2, 4]
    assert [event.step for event in events.Scalars("communication/up_bytes")] == [1, 2, 3, 4]
    (last,) = {event.value for event in events.Scalars("last/test/server/accuracy/average")[-1:]}
    assert last == pytest.approx(read_record(run).summary["server"]["test"]["accuracy"]["last"]["average"])
    assert "clients/test/server/accuracy" in tags["histograms"]
    assert "partition" in tags["images"]
    assert "record/text_summary" in tags["tensors"]
    assert any(tag.startswith("_hparams_/") for tag in events.summary_metadata)


def test_settings_have_dotted_names() -> None:
    nested = {"a": {"b": 1, "c": {}}, "d": [{"e": 2}, {"e": 3}], "f": [1, 2], "g": None}
    assert flattened(nested) == {"a.b": 1, "a.c": {}, "d.0.e": 2, "d.1.e": 3, "f": [1, 2], "g": None}


def test_the_report_of_a_project_groups_its_runs_and_draws_what_they_have_told(
    run: Path, told: dict[str, list[Any]]
) -> None:
    pytest.importorskip("wandb_workspaces")
    from benchmark.run.wandb_report import CURVES, GROUPS, SCORES, project_report

    spec = json.loads(project_report("us", "prompts")._to_model().spec.model_dump_json(by_alias=True))
    grids = [block["metadata"] for block in spec["blocks"] if block["type"] == "panel-grid"]
    assert len(grids) == 3
    for grid in grids:
        (runs,) = grid["runSets"]
        assert [key["name"] for key in runs["grouping"]] == [f"{name}.value" for name in GROUPS]
    curves = [panel["config"] for panel in grids[0]["panelBankSectionConfig"]["panels"]]
    assert [(curve["xAxis"], curve["metrics"]) for curve in curves] == [("round", [metric]) for _, metric, _ in CURVES]
    logged: set[str] = set()
    for record in told["history"]:
        logged |= set(wandb_file.content(record.history.item))
    summary = {name for record in told["summary"] for name in wandb_file.content(record.summary.update)}
    config = {name for record in told["config"] for name in wandb_file.content(record.config.update)}
    assert {metric for _, metric, _ in CURVES} <= logged
    assert set(SCORES) <= summary
    assert set(GROUPS) <= config


def test_the_configuration_of_a_run_is_for_other_runs_too(run: Path) -> None:
    wandb_logger = yaml.safe_load((run / "config.yaml").read_text())["trainer"]["logger"][0]["init_args"]
    assert (wandb_logger["name"], wandb_logger["version"], wandb_logger["project"]) == (None, None, "prompts")


def test_each_fit_of_a_process_has_a_wandb_run_of_its_own(run: Path) -> None:
    for seed in (1, 2):
        (held,) = (run.parent / f"seed{seed}/wandb").glob("offline-run-*/run-*.wandb")
        assert held.stat().st_size > 0
        (held,) = run.parent.glob(f"fedvpt-tinyimages-s{seed}-*/wandb/offline-run-*/run-*.wandb")
        assert held.stat().st_size > 0


def test_a_metric_that_no_client_has_is_told_without_a_histogram(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="")
    found = {
        (1, "server", "test", name): torch.full((3,), value) for name, value in (("auroc", math.nan), ("loss", 2.0))
    }
    Tracking([logger], None).round(1, {}, found, ["a", "b", "c"])
    logger.experiment.flush()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["histograms"] == ["clients/test/server/loss"]
