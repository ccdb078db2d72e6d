import zipfile

import numpy as np
import pytest
from PIL import Image

from benchmark.errors import ConfigurationError
from datamodules import tiny_imagenet
from datamodules.tiny_imagenet import CLASSES, TinyImageNet

pytestmark = pytest.mark.filterwarnings("ignore:TinyImageNet has")

WNIDS = list(CLASSES)


def write(path, label, green, blue=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), (label, green, blue)).save(
        path, format="PNG"
    )  # exact colours; the suffix does not matter


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One training and one test image a class: red is the class, green the side. Class 3 has two of each."""
    root = tmp_path_factory.mktemp("plain")
    at = root / "tiny_imagenet_200"
    for label, wnid in enumerate(WNIDS):
        for number in range(2 if label == 3 else 1):
            write(at / "train" / wnid / f"{wnid}_{number}.JPEG", label, 0, number)
            write(at / "val" / wnid / f"val_{199 - label + 900 * number}.JPEG", label, 255, number)
    return root


@pytest.fixture(scope="module")
def official(plain, tmp_path_factory):
    """The same images in the official layout."""
    root = tmp_path_factory.mktemp("official")
    at, lines = root / "tiny-imagenet-200", []
    for file in sorted((plain / "tiny_imagenet_200/train").rglob("*.JPEG")):
        to = at / "train" / file.parent.name / "images" / file.name
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(file.read_bytes())
    (at / "val/images").mkdir(parents=True)
    for file in sorted((plain / "tiny_imagenet_200/val").rglob("*.JPEG")):
        (at / "val/images" / file.name).write_bytes(file.read_bytes())
        lines.append(f"{file.name}\t{file.parent.name}\t0\t32\t44\t62\n")
    (at / "val/val_annotations.txt").write_text("".join(lines[::-1]))
    (at / "wnids.txt").write_text("\n".join(WNIDS[::-1]))
    return root


def test_classes_are_in_the_order_of_their_ids():
    assert len(CLASSES) == len(set(CLASSES.values())) == 200
    assert sorted(WNIDS) == WNIDS
    assert TinyImageNet.class_names[0] == "goldfish"
    assert TinyImageNet.class_names[-1] == "acorn"


def test_plain_and_official_layout_give_the_same_pool(plain, official):
    one, other = TinyImageNet(str(plain)).load(), TinyImageNet(str(official)).load()
    assert one.images.shape == (402, 3, 64, 64)
    for pool in (one, other):
        np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 0, 0])
        np.testing.assert_array_equal(pool.test, pool.images[:, 1, 0, 0] == 255)
    np.testing.assert_array_equal(one.images, other.images)
    assert one.test.sum() == 201
    assert len(one.group.unique()) == 402


def test_the_usual_conversion_of_one_side_alone_gives_the_same_pool(plain, official, tmp_path):
    at = copied(official, tmp_path) / "tiny-imagenet-200"
    for line in (at / "val/val_annotations.txt").read_text().splitlines():  # which stays where it is
        name, wnid = line.split("\t")[:2]
        (at / "val" / wnid).mkdir(exist_ok=True)
        (at / "val/images" / name).rename(at / "val" / wnid / name)
    (at / "val/images").rmdir()
    one, other = TinyImageNet(str(plain)).load(), TinyImageNet(str(tmp_path)).load()
    np.testing.assert_array_equal(one.images, other.images)
    np.testing.assert_array_equal(one.labels, other.labels)
    np.testing.assert_array_equal(one.test, other.test)


def test_other_sizes_than_the_official_ones_are_said(plain):
    with pytest.warns(UserWarning, match="has 100000 train and 10000 test images, .* has 201 and 201: results compare"):
        TinyImageNet(str(plain)).load()


def copied(root, tmp_path):
    for file in root.rglob("*"):
        if file.is_file() and ".cache" not in file.parts:
            to = tmp_path / file.relative_to(root)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(file.read_bytes())
    return tmp_path


def test_a_training_copy_of_a_test_image_is_left_out(plain, tmp_path):
    at = copied(plain, tmp_path) / "tiny_imagenet_200"
    (at / f"train/{WNIDS[7]}/{WNIDS[7]}_0.JPEG").write_bytes((at / f"val/{WNIDS[0]}/val_199.JPEG").read_bytes())
    pool = TinyImageNet(str(tmp_path)).load()
    assert len(pool.labels) == 401
    assert pool.test.sum() == 201
    assert not ((pool.labels == 7) & ~pool.test).any()


def test_the_official_archive_is_unpacked_without_its_test_set(official, tmp_path):
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w") as archive:
        for file in official.rglob("*"):
            if file.is_file() and ".cache" not in file.parts:
                archive.write(file, file.relative_to(official))
        archive.writestr("tiny-imagenet-200/test/images/test_0.JPEG", b"no label, no use")
    assert len(TinyImageNet(str(tmp_path)).load().labels) == 402
    assert not (tmp_path / "tiny-imagenet-200/test").exists()


def test_downloaded_with_the_published_sum(official, tmp_path, monkeypatch):
    asked = []

    def fetch(url, to, md5):
        asked.append((url, md5))
        with zipfile.ZipFile(to, "w") as archive:
            for file in official.rglob("*.*"):
                if file.is_file() and ".cache" not in file.parts:
                    archive.write(file, file.relative_to(official))

    monkeypatch.setattr(tiny_imagenet, "fetch", fetch)
    assert len(TinyImageNet(str(tmp_path), download=True).load().labels) == 402
    assert asked == [("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de")]


def test_missing_data_say_what_to_do(tmp_path, plain):
    with pytest.raises(
        ConfigurationError,
        match=r"not in .*: download http://cs231n\S+zip and put it there .*data\.source\.init_args\.download=true",
    ):
        TinyImageNet(str(tmp_path)).load()
    at = copied(plain, tmp_path) / "tiny_imagenet_200"
    (at / "val" / WNIDS[5] / "val_194.JPEG").unlink()
    with pytest.raises(ConfigurationError, match=f"{WNIDS[5]} holds no image"):
        TinyImageNet(str(tmp_path)).load()


@pytest.mark.parametrize(
    "line",
    ["val_1.JPEG n01443537", "val_1.JPEG\tn00000000\t0", "../../x.JPEG\tn01443537\t0", "val_199.JPEG\tn01443537\t0"],
)
def test_damaged_annotations_are_named(official, tmp_path, line):
    path = copied(official, tmp_path) / "tiny-imagenet-200/val/val_annotations.txt"
    path.write_text(path.read_text() + line)
    with pytest.raises(
        ConfigurationError, match=r"val_annotations\.txt: expected a new file name, a tab and .* in each line"
    ):
        TinyImageNet(str(tmp_path)).load()
