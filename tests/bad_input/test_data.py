"""Data folders, images and archives."""

from pathlib import Path

import numpy as np
import pytest
import refusal
from federation import CONF, build, fit
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


DATA = [f"--data.source={__name__}.Pictures", "--data.partition=IID", "--data.partition.num_clients=2"]
DATA += ["--data.clients_per_round=2"]
BASE = ["--config", str(CONF / "base.yaml"), "--run_dir=run"]
CNN = ["--config", str(CONF / "FedAvg.yaml")]
EMBEDDED = ["--config", str(CONF / "HeadTune.yaml")]
EMBEDDED += [f"--model.init_args.backbone.init_args.{given}" for given in ("name=micro_vit", "weights=embedded")]


@pytest.fixture(autouse=True)
def _pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine images of each class in ``pictures``."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in Pictures.class_names:
        (ROOT / name).mkdir(parents=True)
        for i in range(9):
            Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(ROOT / name / f"{i}.png")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, method: list[str] = CNN) -> str:
    """The line with which ``fit`` refuses these arguments."""
    return refusal.refused(capsys, main, ["fit", *BASE, *method, *DATA, *arguments])


def test_a_run_does_not_go_on_with_other_images(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *BASE, *CNN, *DATA, "--trainer.max_epochs=1"])
    Image.new("RGB", (16, 16)).save(ROOT / "cat/1.png")
    more = ["--trainer.max_epochs=2", "--ckpt_path=run/checkpoints/last.ckpt", "--run_dir=other"]
    assert "made with other images than this run reads" in refused(capsys, *more)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("normalize=imagenet", "data.transform.init_args.normalize=imagenet, but the backbone's weights were trained"),
        ("size=24", "data.transform.init_args.size=24, but the backbone takes 32 x 32 pixels"),
    ],
)
def test_data_and_backbone_agree(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    transform = ["--data.transform=ImageTransform", f"--data.transform.init_args.{argument}"]
    assert message in refused(capsys, *transform, method=EMBEDDED)


def test_images_are_resized_and_normalised_for_the_backbone() -> None:
    method, data = build("HeadTune", *DATA)
    assert data.transform.size is None
    fit(method, data, 0)
    assert (data.transform.size, data.transform.statistics) == (32, ((0.5,) * 3, (0.5,) * 3))
