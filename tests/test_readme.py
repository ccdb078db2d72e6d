"""What the README tells people to do."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from benchmark.cli import main
from benchmark.results import read_record
from benchmark.source_code import changed_files

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block(language: str, containing: str) -> str:
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return next(text for text in blocks if containing in text)


def test_the_method_of_the_readme_runs_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_method.py").write_text(block("python", "class SmoothHeadTune"))
    (tmp_path / "smooth.yaml").write_text(block("yaml", "my_method.SmoothHeadTune"))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    main(["fit", "--config", "smooth.yaml", "--run_dir=run", "--trainer.enable_progress_bar=false"])
    record = read_record("run")
    accuracy = record.summary["server"]["test"]["accuracy"]
    assert accuracy["last"]["average"] > 0.5 > accuracy["round0"]["average"]
    assert record.communication["up_floats"] == 96 * 10 + 10
    assert record.code is not None
    assert record.code["my_method"] == hashlib.sha256((tmp_path / "my_method.py").read_bytes()).hexdigest()
    named = {"benchmark.method", "benchmark.server", "benchmark.backbones.vit", "datamodules.digits"}
    assert named < set(record.code)
    assert (record.server, record.other_server) == ("benchmark.server.Server", None)
    assert record.images_sha256 == json.loads(Path("run/manifest.json").read_text())["images_sha256"]
    assert changed_files(record.code) == []
    (tmp_path / "my_method.py").write_text("")
    assert changed_files(record.code) == ["my_method.py"]


def test_everything_the_readme_names_is_there() -> None:
    for path in set(re.findall(r"configs/[\w./]+\.yaml|results/[\w./]+\.md", README)):
        assert (ROOT / path).is_file(), path
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make ([\w-]+)|`make ([\w-]+)`", README, re.MULTILINE)):
        name = target[0] or target[1]
        assert f"\n{name}:" in makefile or (ROOT / "configs/tables" / f"{name.replace('-', '_')}.yaml").is_file(), name
    for number in re.findall(r"\[(results/[^\]]+)\]", README):
        assert (ROOT / number).exists(), number


def test_every_configuration_of_the_readmes_table_exists() -> None:
    for name in ("local", "fedavg", "fedprox", "fedvpt", "fedvptdeep", "pfedpg"):
        for data in ("digits", "office_caltech10"):
            assert (ROOT / "configs" / f"{name}_{data}.yaml").is_file()
