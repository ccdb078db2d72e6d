"""Manifests that were edited, given to a run and to the picture of a partition."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federation import CONF, build
from refusal import refused

from benchmark import commands
from benchmark.run import cli
from datamodules.manifest import write_manifest

RUN = ["fit", "--config", str(CONF / "base.yaml"), "--config", str(CONF / "FedAvg.yaml"), "--run_dir=run"]
RUN += ["--data.partition=FromManifest", "--data.partition.path=split.json"]

Edit = Callable[[dict[str, Any]], object]
CASES: list[tuple[Edit, str]] = [
    (lambda m: m.update(clients=[]), "split.json: field 'clients' is empty"),
    (lambda m: m["clients"][1].update(name="client 0"), "clients 0 and 1 are both called 'client 0'"),
    (lambda m: m["clients"][0].pop("train_classes"), "client 0 needs the fields name"),
    (lambda m: m["clients"][0].update(train_classes=[7] * 8), "client 0: train_classes must be 8 numbers of images"),
    (lambda m: m["clients"][0].update(train_classes=["a"] * 8), "client 0: train_classes must be 8 numbers of images"),
    (lambda m: m["clients"][0].update(train_classes=[0] * 10**7), "client 0: train_classes must be 8 numbers"),
    (lambda m: m["clients"][0].update(train_classes=None), "'train_classes' of client 0 must be of type list"),
    (lambda m: m["clients"][0].update(train_size=8), "client 0 has train_size 8, but 5 train indices"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The tiny federation's."""
    _, data = build("FedAvg")
    return data.manifest


@pytest.mark.parametrize(("edit", "message"), CASES)
def test_edited_manifests(
    manifest: dict[str, Any], edit: Edit, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = json.loads(json.dumps(manifest))
    edit(edited)
    write_manifest("split.json", edited)
    assert message in refused(capsys, cli.main, RUN)
    assert message in refused(capsys, commands.main, ["partition", "split.json", "split.png"])


@pytest.mark.parametrize(
    ("spaces", "said"),
    [
        ({"test": [0, 1, 500]}, "the label space of 'test' must name classes from 0 to 7, each once"),
        ({"test": [0, 1, 1]}, "the label space of 'test' must name classes from 0 to 7, each once"),
        ({"novel": [0, 1]}, "the label space of 'novel' must name classes from 0 to 7, each once, of a split that"),
    ],
)
def test_label_spaces_of_no_such_classes_or_split(
    manifest: dict[str, Any], spaces: dict[str, list[int]], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_manifest("split.json", json.loads(json.dumps(manifest)) | {"label_spaces": spaces})
    assert said in refused(capsys, commands.main, ["partition", "split.json", "split.png"])
