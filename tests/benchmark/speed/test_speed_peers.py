"""The comparison with other frameworks: the same work in all of them, and how their scripts are run."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmark.backbones.head import LinearHead
from benchmark.contract import LocalTraining, Stage
from benchmark.errors import ConfigurationError
from benchmark.speed import peers
from benchmark.speed.measure import fit
from benchmark.speed.peer_scripts.cifar10_setting import (
    PARAMETERS,
    Measured,
    Setting,
    layers,
    make_images,
    normalise,
    read_setting,
)
from benchmark.speed.simple_cnn import DropoutFedAvg, SimpleCNN
from datamodules.federated import FederatedDataModule
from datamodules.partition import IID
from datamodules.transform import ImageTransform

TINY = Setting(clients=6, images=20, cohort=2, test=12, rounds=3, evaluate_every=2)


def measured(rounds: list[float], evaluations: list[float]) -> Measured:
    return Measured(rounds, evaluations, [2.3, 2.1], 250, PARAMETERS, 0.5, 2, 1, {"peer": "1.2"})


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_all_programs_have_the_same_network() -> None:
    # 3 * 32 * 9 + 32, 32 * 64 * 9 + 64, 64 * 14 * 14 * 128 + 128, 128 * 10 + 10
    assert PARAMETERS == 896 + 18_496 + 1_605_760 + 1_290
    plain, backbone, head = nn.Sequential(*layers()), SimpleCNN(), LinearHead(128, 10)
    assert count(plain) == count(backbone) + count(head) == PARAMETERS
    for own, other in zip([*backbone.parameters(), *head.parameters()], plain.parameters(), strict=True):
        own.data.copy_(other)
    x = torch.rand(4, 3, 32, 32)
    torch.testing.assert_close(head(backbone(x)), plain(x))


def test_dropout_is_the_published_one_and_each_clients_own() -> None:
    torch.manual_seed(0)
    backbone = SimpleCNN()
    method = DropoutFedAvg(10, 2, backbone)
    kept = method.draw_noise(torch.Generator().manual_seed(1), 4, Stage.TRAIN)
    assert {name: tuple(mask.shape) for name, mask in kept.items()} == {"pooled": (4, 64, 14, 14), "hidden": (4, 128)}
    assert [round(float(kept[name].float().mean()), 1) for name in ("pooled", "hidden")] == [0.8, 0.5]
    assert method.draw_noise(torch.Generator(), 4, Stage.EVALUATE) == {}
    # Its place is before and after the linear layer; what is left is scaled up.
    x = torch.rand(4, 3, 32, 32)
    pooled = backbone.convolutions(x)
    hidden = backbone.linear(torch.where(kept["pooled"], pooled / 0.75, 0.0).flatten(1)).relu()
    torch.testing.assert_close(backbone(x, kept), torch.where(kept["hidden"], 2 * hidden, 0.0))
    bound = (6 / (64 * 14 * 14 + 128)) ** 0.5
    assert 0.99 * bound < backbone.linear.weight.abs().max() <= bound
    learned = []
    for width in (1, 2):
        torch.manual_seed(0)
        data = FederatedDataModule(
            peers.SettingImages(TINY), IID(6), ImageTransform(), batch_size=10, clients_at_once=width
        )
        method = DropoutFedAvg(10, 6, SimpleCNN(), training=LocalTraining(lr=0.1, epochs=1))
        fit(method, data, 1)
        learned.append(method.head.weight.detach().clone())
    torch.testing.assert_close(*learned, rtol=0, atol=1e-6)


def test_all_programs_have_the_same_images() -> None:
    images, labels = make_images(TINY)
    assert images.shape == (132, 3, 32, 32)
    assert labels[:12].tolist() == [*range(10), 0, 1]
    assert images[labels == 9].min() >= 108
    assert images[labels == 0].max() < 128
    torch.testing.assert_close(normalise(images), ImageTransform()(images, None))
    pool = peers.SettingImages(TINY).load()
    assert pool.test.sum() == 12
    assert torch.equal(pool.images, images)


def test_the_published_work_is_250_steps_a_round() -> None:
    assert Setting().steps == 250
    assert Setting(images=41, cohort=3).steps == 15
    assert read_setting([*TINY.arguments(), "--cores=3"]) == (TINY, 3)


def test_the_engine_does_that_work_and_learns() -> None:
    found = peers.measure_engine(TINY, width=2)
    assert found.steps == TINY.steps == 4
    assert found.parameters == PARAMETERS
    assert len(found.rounds) == 3
    assert len(found.evaluations) == 1
    assert found.losses[-1] < found.losses[0]
    assert 0 <= found.accuracy <= 1
    assert found.best <= found.mean
    assert json.loads(json.dumps(asdict(found))) == asdict(found)


def test_a_peer_without_its_variable_is_left_out_with_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PFL_PYTHON", raising=False)
    monkeypatch.setenv("FLOWER_PYTHON", "/venv/python")
    commands = peers.peer_commands(2)
    assert list(commands) == ["Flower"]
    assert commands["Flower"][0] == "/venv/python"
    assert Path(commands["Flower"][1]).is_file()
    assert "pfl is left out: PFL_PYTHON is not set; benchmark/speed/peers.py says how" in capsys.readouterr().out


def test_pfl_runs_in_one_process_and_on_a_cpu_also_in_one_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFL_PYTHON", "python")
    monkeypatch.delenv("FLOWER_PYTHON", raising=False)
    monkeypatch.setattr(peers, "device", lambda: "cpu")
    assert list(peers.peer_commands(2)) == ["pfl", "pfl, 2 processes"]
    assert list(peers.peer_commands(1)) == ["pfl"]
    monkeypatch.setattr(peers, "device", lambda: "cuda")
    assert list(peers.peer_commands(2)) == ["pfl"]


def test_a_peers_last_line_of_json_is_read(tmp_path: Path) -> None:
    expected = measured([9.0, 2.0, 4.0], [1.0])
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "assert os.environ['FLWR_TELEMETRY_ENABLED'] == '0'\n"
        "assert sys.argv[1:] == "
        "['--clients=6', '--images=20', '--cohort=2', '--test=12', '--rounds=3', '--evaluate_every=2', '--cores=2']\n"
        f"print('it says something'); print({json.dumps(asdict(expected))!r})\n"
    )
    found = peers.measure_peer([sys.executable, str(script)], TINY, 2)
    assert found == expected
    assert (found.best, found.mean) == (2.0, 3.0)


def test_a_peer_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('no module named peer')")
    with pytest.raises(ConfigurationError, match=r"script.py ended with status 1 .*no module named peer; make its"):
        peers.measure_peer([sys.executable, str(script)], TINY, 1)
    script.write_text("print('nothing')")
    with pytest.raises(ConfigurationError, match="status 0 and without a result"):
        peers.measure_peer([sys.executable, str(script)], TINY, 1)


def test_a_peer_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(peers, "PATIENCE", 0.2)
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match=r"script.py took longer than 0.2 seconds"):
        peers.measure_peer([sys.executable, str(script)], TINY, 1)
    assert time.monotonic() - began < 30


def test_the_engine_does_the_same_work_over_processes() -> None:
    alone, together = peers.measure_engine(TINY, width=1), peers.measure_peer(peers.OVER_PROCESSES, TINY, 2)
    assert (together.processes, together.threads) == (2, 1)
    assert (together.steps, together.accuracy) == (alone.steps, alone.accuracy)
    assert together.losses == pytest.approx(alone.losses, abs=1e-6)


def test_rows_compare_with_the_first_program() -> None:
    found = {"engine": measured([5.0, 2.0, 3.0], [1.0, 0.5]), "peer": measured([5.0, 4.0, 6.0], [1.5])}
    rows = peers.rows_of(found, Setting())
    assert [(row.what, row.seconds, row.ratio) for row in rows] == [
        ("engine: round", 2.0, 1.0),
        ("peer: round", 4.0, 2.0),
        ("engine: evaluation", 0.5, 1.0),
        ("peer: evaluation", 1.5, 3.0),
        ("engine: as published", 20.5, 1.0),  # ten rounds and an evaluation
        ("peer: as published", 41.5, 41.5 / 20.5),
    ]
    assert rows[1].work == "50 of 1000 clients: 250 steps of 10 images"
    assert rows[1].note == "mean 5 s, loss 2.300 to 2.100, 1,626,442 parameters, 2 x 1 threads, peer 1.2"
