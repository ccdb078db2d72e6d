"""Prompt learning here and in Flower: the same networks, the same work, and rows that say so."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmark.engine.roles import read_roles
from benchmark.errors import ConfigurationError
from benchmark.speed import peers, peers_prompts
from benchmark.speed.peer_scripts.prompt_setting import (
    CLASSES,
    PromptMeasured,
    PromptSetting,
    make_prompt_images,
    network,
    read_prompt_setting,
    trained,
)

SMALL = PromptSetting(clients=2, images=16, rounds=2)


def images(setting: PromptSetting, count: int = 3) -> Tensor:
    shape = (count, 3, setting.size, setting.size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("setting", [SMALL, replace(SMALL, first_block=9), replace(SMALL, model="clip")])
def test_both_programs_have_the_same_network_and_train_the_same_of_it(setting: PromptSetting, tmp_path: Path) -> None:
    setting = replace(setting, weights=str(tmp_path / "weights.pt"))
    peers_prompts.write_weights(setting, Path(setting.weights))
    theirs, x = network(setting), images(setting)
    ours: Any = peers_prompts.make_method(setting)
    ours.set_label_spaces({})
    with torch.no_grad():
        torch.testing.assert_close(theirs(x), ours(x), atol=1e-4, rtol=1e-4)
    roles = read_roles(ours)
    assert trained(theirs) == sum(ours.get_parameter(name).numel() for name in roles.trained)
    # 10 tokens of width 192 and a head of 10 classes; 16 tokens of width 256
    assert trained(theirs) == (16 * 256 if setting.model == "clip" else 10 * 192 + 10 * 192 + 10)


def test_the_work_and_its_images() -> None:
    assert PromptSetting().steps == 40
    assert (PromptSetting().size, PromptSetting(model="clip").size) == (112, 224)
    assert read_prompt_setting([*SMALL.arguments(), "--cores=3"]) == (SMALL, 3)
    made, labels = make_prompt_images(SMALL)
    assert made.shape == (32, 3, 112, 112)
    assert labels[:12].tolist() == [*range(CLASSES), 0, 1]
    assert made[labels == 9].min() >= 108
    assert made[labels == 0].max() < 128
    pool = peers_prompts.PromptImages(SMALL).load()
    assert pool.test.sum() == 2
    assert torch.equal(pool.images[~pool.test], made)


def measured(best: float, **others: Any) -> PromptMeasured:
    given: dict[str, Any] = {"losses": [2.3, 2.0], "steps": 40, "parameters": 3850, "building": 0.0}
    return PromptMeasured([9.0, best], processes=1, threads=2, versions={"torch": "2"}, **given | others)


def test_rows_compare_with_the_engine_and_with_flower() -> None:
    found = {
        "engine, 1 process": measured(2.0),
        "engine, 2 processes": measured(1.0),
        "Flower": measured(4.0, losses=[2.3, 2.1], building=0.5),
    }
    rows = peers_prompts.rows_of("FedVPT", PromptSetting(), found)
    assert [(row.what, row.seconds, row.ratio) for row in rows] == [
        ("FedVPT: engine, 1 process", 2.0, 1.0),
        ("FedVPT: engine, 2 processes", 1.0, 0.5),
        ("FedVPT: Flower", 4.0, 2.0),
    ]
    assert rows[0].work == "10 clients x 4 steps of 16 images at 112 px"
    assert rows[0].note == (
        "0.50 of Flower's, 3,850 trained parameters, loss 2.300 to 2.000, first round 9.0 s, 1 x 2 threads, torch 2"
    )
    assert rows[2].note.startswith(
        "3,850 trained parameters, loss 2.300 to 2.100, first round 9.0 s, 0.5 s of all its clients' is"
    )


@pytest.mark.parametrize("other", [{"steps": 39}, {"parameters": 1}, {"losses": [2.3, 1.5]}])
def test_programs_that_do_other_work_are_refused(other: dict[str, Any]) -> None:
    found = {"engine": measured(1.0), "Flower": measured(2.0, **other)}
    with pytest.raises(ConfigurationError, match=r"FedVPT: steps, trained parameters and last loss .* in Flower; the"):
        peers_prompts.rows_of("FedVPT", PromptSetting(), found)


def test_the_engine_does_that_work_and_learns() -> None:
    found = peers_prompts.measure_engine(replace(SMALL, first_block=12))
    assert (found.steps, found.parameters, len(found.rounds)) == (2, 3850, 2)
    assert found.losses[-1] < found.losses[0]
    assert json.loads(json.dumps(asdict(found))) == asdict(found)


def test_flower_is_found_or_left_out_with_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOWER_PYTHON", "/venv/python")
    assert peers_prompts.flower() == "/venv/python"
    monkeypatch.delenv("FLOWER_PYTHON")
    monkeypatch.setattr(peers_prompts, "find_spec", lambda name: None if name == "ray" else name)
    assert peers_prompts.flower() is None
    monkeypatch.setattr(peers_prompts, "measure_engine", lambda setting: measured(1.0))
    assert list(peers_prompts.measure_all(SMALL, 1)) == ["engine, 1 process"]
    assert "Flower is left out: FLOWER_PYTHON is not set" in capsys.readouterr().out
    monkeypatch.setattr(peers_prompts, "find_spec", lambda name: name)
    assert peers_prompts.flower() == sys.executable


def test_the_line_of_a_program_is_read(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; assert sys.argv[1].startswith('--weights'); print({json.dumps(asdict(measured(3.0)))!r})"
    )
    found = PromptMeasured(**peers.printed_by([sys.executable, str(script)], SMALL.arguments(), 2))
    assert found == measured(3.0)
    assert found.best == 3.0
