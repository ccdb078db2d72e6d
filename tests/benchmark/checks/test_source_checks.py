"""Mistakes in sources of images that ``benchmark check`` finds."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmark.checks import sources
from benchmark.checks.outcome import FailedCheck, NotCheckedError, printed
from benchmark.checks.sources import SourceUnderCheck
from benchmark.errors import ConfigurationError
from datamodules.source import ImagePool, ImageSource


class Pets(ImageSource):
    """Folders of a class each, read with nothing but Pillow; every fourth image is a test image."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.class_names = ("cat", "dog")

    def listed(self, name: str) -> list[str]:
        return sorted(os.listdir(Path(self.root) / name))

    def load(self) -> ImagePool:
        """Read them."""
        try:
            files = [(label, name, file) for label, name in enumerate(self.class_names) for file in self.listed(name)]
            images = [np.asarray(Image.open(Path(self.root, name, file))) for _, name, file in files]
        except OSError as error:
            raise ConfigurationError(f"cannot read the images in {self.root}: {str(error).splitlines()[0]}") from error
        at = torch.arange(len(files))
        labels = torch.tensor([label for label, *_ in files])
        return ImagePool(torch.tensor(np.stack(images)).permute(0, 3, 1, 2), labels, at % 4 == 0, at * 0, at)


class Unsorted(Pets):
    def listed(self, name: str) -> list[str]:
        return os.listdir(Path(self.root) / name)


class Draws(Pets):
    def load(self) -> ImagePool:
        pool = super().load()
        return ImagePool(pool.images, pool.labels, torch.rand(len(pool.labels)) < 0.3, pool.domains, pool.group)


class Leaks(Pets):
    def load(self) -> ImagePool:
        pool = super().load()
        return ImagePool(pool.images, pool.labels, pool.test, pool.domains, pool.group // 2)


class Stale(Pets):
    pools: dict[str, ImagePool] = {}  # noqa: RUF012

    def load(self) -> ImagePool:
        return self.pools.setdefault(self.root, super().load())


class Unnamed(Pets):
    def load(self) -> ImagePool:
        pool = super().load()
        return ImagePool(pool.images, pool.labels * 2, pool.test, pool.domains, pool.group)


class Aged(Pets):
    image_columns = ("age",)  # type: ignore[assignment]

    def image_column(self, name: str) -> list[str]:
        return ["1", 2] * 7  # type: ignore[list-item]


class Large(Pets):
    size = 8


class Hurried(Pets):
    def listed(self, name: str) -> list[str]:
        return [] if not Path(self.root).exists() else super().listed(name)


class Raw(Pets):
    def load(self) -> ImagePool:
        return ImagePool() if os.path.exists(self.root) else open(self.root)  # type: ignore[call-arg, return-value]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (4, 4), (label, number, 0)).save(tmp_path / "pets" / name / f"{number}.png")
    return tmp_path / "pets"


@pytest.mark.parametrize(
    ("kind", "check", "said"),
    [
        (Unsorted, sources.check_order_of_files, r"other images; sort what os\.listdir"),
        (Draws, sources.check_again, r"draw from benchmark\.seeds"),
        (Leaks, sources.check_sides, r"4 groups are on both sides"),
        (Stale, sources.check_content, r"other images are read as those of before"),
        (Unnamed, sources.check_images, r"labels \[2\] have no name"),
        (
            Aged,
            sources.check_columns,
            r"the column 'age' has 7 texts among 14 values of 16 images; give a text for each",
        ),
        (Large, sources.check_images, r"images are 4 x 4 pixels, its size is 8"),
        (
            Hurried,
            sources.check_missing,
            r"images that are not there: line \d+ of .*test_source_checks\.py ends in Valu",
        ),
        (Raw, sources.check_missing, r"images that are not there: line \d+ of .* ends in FileNotFoundError"),
        (Raw, sources.check_images, r"ends in TypeError|ends in AttributeError"),
    ],
)
def test_what_a_source_does_wrong_is_one_line(
    kind: type[ImageSource], check: Callable[[Any], None], said: str, root: Path
) -> None:
    with pytest.raises(FailedCheck, match=said) as failed:
        check(SourceUnderCheck(kind, {"root": str(root)}))
    assert "\n" not in str(failed.value)


def test_a_good_source_holds(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(sources.CHECKS, SourceUnderCheck(Pets, {"root": str(root)}))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(sources.CHECKS)
    assert all(line.startswith("ok      ") for line in lines)


def test_what_there_is_nothing_for_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Fixed(Pets):
        def __init__(self) -> None:
            super().__init__(str(root))

    assert printed(sources.CHECKS, SourceUnderCheck(Fixed, {}))
    assert capsys.readouterr().out.count("-       ") == 2
    with pytest.raises(NotCheckedError, match="no images in files of their own"):
        sources.copied(Path(__file__).parent, root.parent / "copy")
