from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from benchmark.errors import ConfigurationError
from datamodules.cifar import CIFAR10, CIFAR100

pytestmark = pytest.mark.filterwarnings("ignore:CIFAR-10")


def write_folders(root, source, train=2, test=1):
    """Images whose red is the class, green the side and blue the number."""
    for side, number in (("train", train), ("test", test)):
        for label, name in enumerate(source.class_names):
            folder = root / source.folder / side / name
            folder.mkdir(parents=True)
            for image in range(number):
                Image.new("RGB", (32, 32), (label, 255 * (side == "test"), image)).save(folder / f"{image}.png")


def test_official_names():
    assert CIFAR10.class_names[:3] == ("airplane", "automobile", "bird")
    assert len(CIFAR10.class_names) == 10
    assert len(CIFAR100.class_names) == len(set(CIFAR100.class_names)) == 100
    assert list(CIFAR100.class_names) == sorted(CIFAR100.class_names)


@pytest.mark.parametrize("source", [CIFAR10, CIFAR100])
def test_read_from_folders(tmp_path, source):
    write_folders(tmp_path, source)
    pool = source(str(tmp_path)).load()
    classes = len(source.class_names)
    assert pool.images.shape == (3 * classes, 3, 32, 32)
    np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 0, 0])
    np.testing.assert_array_equal(pool.test, pool.images[:, 1, 0, 0] == 255)
    assert pool.test.sum() == classes
    assert pool.domains.unique().tolist() == [0]
    assert len(pool.group.unique()) == 3 * classes


def test_other_sizes_than_the_official_ones_are_said(tmp_path):
    write_folders(tmp_path, CIFAR10)
    with pytest.warns(UserWarning, match="CIFAR-10 has 50000 train and 10000 test images, .* has 20 and 10"):
        CIFAR10(str(tmp_path)).load()


def test_a_training_copy_of_a_test_image_is_left_out(tmp_path):
    write_folders(tmp_path, CIFAR10)
    at = tmp_path / "cifar10"
    (at / "train/ship/0.png").write_bytes((at / "test/cat/0.png").read_bytes())
    (at / "train/frog/0.png").write_bytes((at / "train/frog/1.png").read_bytes())
    pool = CIFAR10(str(tmp_path)).load()
    assert len(pool.labels) == 29
    assert int(((pool.labels == 8) & ~pool.test).sum()) == 1
    assert int(pool.test.sum()) == 10
    assert set(pool.group[pool.test].tolist()).isdisjoint(pool.group[~pool.test].tolist())
    assert len(pool.group.unique()) == 28  # the two frogs are one group


def test_wrong_class_folders_are_refused(tmp_path):
    write_folders(tmp_path, CIFAR10)
    (tmp_path / "cifar10/test/truck").rename(tmp_path / "cifar10/test/lorry")
    with pytest.raises(ConfigurationError, match="missing: truck; unknown: lorry"):
        CIFAR10(str(tmp_path)).load()


@pytest.mark.parametrize("source", [CIFAR10, CIFAR100])
def test_missing_data_say_what_to_do(tmp_path, source):
    with pytest.raises(
        ConfigurationError,
        match=rf"{source.title} is not in .*download it from https://\S+ .*{source.folder}/train/<class>",
    ) as refused:
        source(str(tmp_path)).load()
    assert "give that as data.source.init_args.root" in str(refused.value)
    assert str(refused.value).endswith("or let it be downloaded with data.source.init_args.download=true")
    assert "download=True" not in str(refused.value)  # torchvision's word for it


def test_failed_download_says_what_to_do(tmp_path, monkeypatch):
    def fail(self, train):
        raise OSError("no network")

    monkeypatch.setattr(CIFAR10, "_torchvision_side", fail)
    with pytest.raises(ConfigurationError, match=r"put it there .*\(no network\)"):
        CIFAR10(str(tmp_path), download=True).load()


def fake_side(names):
    """Stands in for torchvision's data set, whose files have published sums and cannot be made small."""

    def side(self, train):
        pixels = np.zeros((20 if train else 10, 32, 32, 3), dtype=np.uint8)
        pixels[..., 0] = np.arange(len(pixels))[:, None, None] % 10
        pixels[..., 1] = 0 if train else 1
        pixels[0, 0, 5] = (0, 0, 9)
        return SimpleNamespace(data=pixels, targets=[i % 10 for i in range(len(pixels))], classes=list(names))

    return side


def test_read_from_torchvision(tmp_path, monkeypatch):
    monkeypatch.setattr(CIFAR10, "_torchvision_side", fake_side(CIFAR10.class_names))
    pool = CIFAR10(str(tmp_path)).load()
    assert pool.images.shape == (30, 3, 32, 32)
    assert pool.images[0, :, 0, 5].tolist() == [0, 0, 9]
    assert pool.images[13, :, 0, 0].tolist() == [3, 0, 0]
    np.testing.assert_array_equal(pool.labels, torch.arange(30) % 10)
    assert pool.test.tolist() == [False] * 20 + [True] * 10
    assert pool.group[:3].tolist() == [0, 1, 2]
    assert pool.group[11] == 1  # the same pixels as image 1


def test_torchvision_with_other_classes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(CIFAR10, "_torchvision_side", fake_side(reversed(CIFAR10.class_names)))
    with pytest.raises(ConfigurationError, match="has other classes than the official ones"):
        CIFAR10(str(tmp_path)).load()
