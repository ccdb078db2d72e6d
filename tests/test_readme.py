"""What the README tells people to do."""

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from federation import CONF, build, federation
from refusal import refused

from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads
from benchmark.records.results import read_record
from benchmark.records.source_code import changed_files
from benchmark.run.checkpoint import read_checkpoint
from benchmark.run.cli import main
from benchmark.server import ServerRule

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
    assert (record.server, record.other_server) == ("benchmark.server.ServerRule", None)
    assert record.images_sha256 == json.loads(Path("run/manifest.json").read_text())["images_sha256"]
    assert changed_files(record.code) == []
    (tmp_path / "my_method.py").write_text("")
    assert changed_files(record.code) == ["my_method.py"]


def test_the_rule_of_the_readme_runs_is_named_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_rules.py").write_text(block("python", "class FedAvgM"))
    (tmp_path / "rule.yaml").write_text(block("yaml", "my_rules.FedAvgM"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    conf = [f"--config={CONF / name}.yaml" for name in ("base", "HeadTune")]

    def run(rounds: int, folder: str, *arguments: str) -> dict[str, dict[str, torch.Tensor]]:
        own = ["--config=rule.yaml", f"--trainer.max_epochs={rounds}", f"--run_dir={folder}"]
        main(["fit", *conf, *own, *arguments])
        held = read_checkpoint(f"{folder}/checkpoints/last.ckpt")
        return {"shared": held["state_dict"], "velocity": held["callbacks"]["server"]["rule"]}

    one, two = run(1, "one"), run(2, "two")
    for name in ("head.weight", "head.bias"):
        moved = two["shared"][name] - one["shared"][name]
        torch.testing.assert_close(two["velocity"][name.replace(".", "_")], moved, rtol=0, atol=1e-6)
    Path("one/record.json").unlink()
    again = run(2, "one", "--ckpt_path=last")
    for part, values in two.items():
        assert values.keys() == again[part].keys()
        assert all(torch.equal(value, again[part][name]) for name, value in values.items())
    record = read_record("two")
    assert (record.server, record.default_server) == ("my_rules.FedAvgM", "benchmark.server.ServerRule")
    assert record.other_server == "my_rules.FedAvgM"
    assert record.code is not None
    assert record.code["my_rules"] == hashlib.sha256(Path("my_rules.py").read_bytes()).hexdigest()
    assert {"benchmark.server", "benchmark.engine.rounds", "methods.headtune"} < set(record.code)
    kind = sys.modules["my_rules"].FedAvgM
    rule, w = kind(beta=0.5), {"w.x": torch.tensor([1.0])}
    rule.start(w, federation(2))
    for number, expected in ((1, 3.0), (2, 6.0)):  # v = 2; v = 0.5 * 2 + 2
        uploads = Uploads((0, 1), {"w.x": torch.stack([w["w.x"] + 1, w["w.x"] + 3])}, torch.ones(2).double())
        w = rule.aggregate(Round(number, (0, 1), 0), w, uploads)
        assert w["w.x"].tolist() == [expected]
    Path("rule.yaml").write_text(Path("rule.yaml").read_text().replace("beta: 0.5", "beta: 1.5"))
    line = refused(capsys, main, ["fit", *conf, "--config=rule.yaml", "--trainer.max_epochs=1", "--run_dir=no"])
    assert "beta" in line
    assert "1.5" in line


def test_a_rule_is_no_part_of_a_method() -> None:
    method, _ = build("PFedPG")
    with pytest.raises(ConfigurationError, match=r"PFedPG keeps a ServerRule as 'rule', .* make it in make_server"):
        method.rule = ServerRule()
    rules = [method.make_server(), method.make_server()]
    assert rules[0] is not rules[1]
    assert not any(isinstance(module, ServerRule) for module in method.modules())


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
