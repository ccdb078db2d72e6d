"""``benchmark check``: methods and rules outside of the repository, good ones and bad ones."""

from pathlib import Path

import pytest

from benchmark import commands

MINE = """
import torch
from benchmark.backbones.head import LinearHead
from benchmark.backbones.vit import PromptedViT
from benchmark.contract import LocalTraining
from benchmark.method import FederatedMethod


class Good(FederatedMethod):
    shared = ("head",)
    personal = ("own",)

    def __init__(self, num_classes: int, num_clients: int, backbone: PromptedViT) -> None:
        super().__init__(num_clients)
        self.backbone = backbone
        self.head = LinearHead(backbone.num_features, num_classes)
        self.own = torch.nn.Parameter(torch.zeros(backbone.num_features))
        self.training_settings = LocalTraining(lr=0.1, epochs=1)

    def forward(self, x):
        return self.head(self.backbone(x) + self.own)


class Draws(Good):
    def forward(self, x):
        return super().forward(x + torch.rand_like(x))


class Leaks(Good):
    uploads = ("mine",)

    def client_loss(self, client, batch):
        return super().client_loss(client, batch), {"mine": self.own}


class Counts(Good):
    calls = 0

    def client_loss(self, client, batch):
        self.calls += 1
        return super().client_loss(client, batch) * (1 + self.calls % 5)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checked_module.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def lines(capsys: pytest.CaptureFixture[str], name: str, code: int) -> list[str]:
    """Return the lines that ``benchmark check`` prints about a class."""
    assert commands.main(["check", name]) == code
    output = capsys.readouterr()
    return [line for line in (output.out + output.err).splitlines() if line.startswith(("ok", "FAILED", "benchmark:"))]


@pytest.mark.slow
def test_a_good_method_holds_and_bad_ones_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    good = lines(capsys, "checked_module.Good", 0)
    assert len(good) == 8
    assert all(line.startswith("ok") for line in good)
    leaks = [line for line in lines(capsys, "checked_module.Leaks", 1) if line.startswith("FAILED")]
    assert any("mine, which is uploaded, is own of a client, which is personal" in line for line in leaks)
    counts = [line for line in lines(capsys, "checked_module.Counts", 1) if line.startswith("FAILED")]
    assert any("The number of clients at once changes nothing" in line for line in counts)


def test_a_draw_is_named_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = lines(capsys, "checked_module.Draws", 1)
    assert "FAILED  It trains, is evaluated" in line
    assert "checked_module.py, draws random numbers from a global generator" in line


def test_what_is_no_class_to_check_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, "checked_module.Nobody", 2) == [
        "benchmark: there is no class 'checked_module.Nobody'; give the dotted path of one, such as my_module.MyMethod"
    ]
    assert "derives from none of FederatedMethod, ServerRule, Partition" in lines(capsys, "pathlib.Path", 2)[0]


def test_a_source_without_its_arguments_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = lines(capsys, "datamodules.ImageFolders", 2)
    assert "datamodules.ImageFolders must be given name, root: check it with --config" in line
