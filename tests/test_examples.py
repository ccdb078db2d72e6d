"""The files in examples/ run, each by itself, and learn what they say."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from fewer_images import fewer_digits

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_is_about_forty_lines_and_tested_here() -> None:
    there = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert sorted(there) == ["own_method", "own_server", "text_prompt", "visual_prompt"]
    assert max(there.values()) <= 50


def test_a_network_of_ones_own_learns() -> None:
    assert loaded("own_method").main(rounds=2) > 0.4  # ten classes


def test_a_prompt_of_ones_own_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer_digits(monkeypatch, train=1, test=6)
    assert loaded("visual_prompt").main(rounds=1) > 0.5


def test_a_text_prompt_of_ones_own_keeps_what_clip_knows() -> None:
    found = loaded("text_prompt").main(rounds=1)
    assert found.keys() == {"test", "base", "novel"}
    assert min(found.values()) > 0.6


def test_a_rule_of_ones_own_bears_a_hostile_client() -> None:
    found = loaded("own_server").main(rounds=1)
    assert found["mean"] == pytest.approx(found["hostile"], abs=0.03)
    assert found["hostile"] > 0.6
