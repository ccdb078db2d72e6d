"""Data folders, images and archives."""

from pathlib import Path

import numpy as np
import pytest
import refusal
from federation import CONF
from PIL import Image

from benchmark.cli import main
from datamodules.folders import list_class_folders, read_images, without_copies
from datamodules.source import ImagePool, ImageSource

ROOT = Path("pictures")


class Pictures(ImageSource):
    """Folders of cats and dogs; every third image is a test image."""

    class_names = ("cat", "dog")

    def __init__(self, size: int = 16) -> None:
        self.size = size

    def load(self) -> ImagePool:
        """Read them."""
        files, labels = list_class_folders(ROOT, ".", [["cat"], ["dog"]])
        decoded = read_images(ROOT, files, self.size, "squash")
        return without_copies(decoded, labels, np.arange(len(labels)) % 3 == 0, np.zeros_like(labels))


BASE = ["--config", str(CONF / "base.yaml"), "--config", str(CONF / "FedAvg.yaml"), "--run_dir=run"]
BASE += [f"--data.source={__name__}.Pictures", "--data.partition=IID", "--data.partition.num_clients=2"]
BASE += ["--data.clients_per_round=2"]


@pytest.fixture(autouse=True)
def _pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine images of each class in ``pictures``."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in Pictures.class_names:
        (ROOT / name).mkdir(parents=True)
        for i in range(9):
            Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(ROOT / name / f"{i}.png")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line with which ``fit`` refuses these arguments."""
    return refusal.refused(capsys, main, ["fit", *BASE, *arguments])


def test_a_run_does_not_go_on_with_other_images(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *BASE, "--trainer.max_epochs=1"])
    Image.new("RGB", (16, 16)).save(ROOT / "cat/1.png")
    more = ["--trainer.max_epochs=2", "--ckpt_path=run/checkpoints/last.ckpt", "--run_dir=other"]
    assert "made with other images than this run reads" in refused(capsys, *more)
