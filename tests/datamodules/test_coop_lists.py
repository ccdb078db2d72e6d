"""SUN397, FGVC-Aircraft and ImageNet: data sets of CoOp's that come with lists of their own, on a few classes."""

import json

import numpy as np
import pytest
from PIL import Image

from benchmark.errors import ConfigurationError
from datamodules.fgvc_aircraft import FGVCAircraft
from datamodules.imagenet import ImageNet, read_names
from datamodules.sun397 import SUN397

pytestmark = pytest.mark.filterwarnings("ignore:.*results compare with no published number")


def write(path, *colour):
    """A 5 x 3 image; PNG inside whatever the name is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (5, 3), colour).save(path, format="PNG")


SCENES = {"a/abbey": "abbey", "a/apse/indoor": "indoor apse", "t/theater/indoor_seats": "indoor seats theater"}


@pytest.fixture
def scenes(tmp_path):
    """SUN397 of three classes of five images, with the official lists: image 0 tests."""
    known = {name: label for label, name in enumerate(SUN397.class_names)}
    lists = {"Training_01.txt": [], "Testing_01.txt": []}
    for place, name in SCENES.items():
        for number in range(5):
            write(
                tmp_path / "sun397/SUN397" / place / f"sun_{number}.jpg", known[name] % 256, number, known[name] // 256
            )
            lists["Training_01.txt" if number else "Testing_01.txt"].append(f"/{place}/sun_{number}.jpg")
    for name, lines in lists.items():
        (tmp_path / "sun397" / name).write_text("\n".join(lines))
    return tmp_path


def labels_shown(pool):
    return pool.images[:, 0, 0, 0].long() + 256 * pool.images[:, 2, 0, 0].long()


def test_suns_official_lists_say_who_tests(scenes):
    pool = SUN397(str(scenes), split="seeded", size=2).load()
    np.testing.assert_array_equal(pool.labels, labels_shown(pool))
    assert {SUN397.class_names[label] for label in pool.labels.tolist()} == set(SCENES.values())
    np.testing.assert_array_equal(pool.test, pool.images[:, 1, 0, 0] == 0)
    assert (int((~pool.test).sum()), int(pool.test.sum())) == (9, 3)  # one of four of a class validates


def test_coops_split_of_sun_is_read(scenes):
    known = {name: label for label, name in enumerate(SUN397.class_names)}
    sides = ("test", "val", "train", "train", "train")
    split = {side: [] for side in sides}
    for place, name in SCENES.items():
        for number, side in enumerate(sides):
            split[side].append([f"{place}/sun_{number}.jpg", known[name], name])
    (scenes / "coop_splits").mkdir()
    (scenes / "coop_splits/split_zhou_SUN397.json").write_text(json.dumps(split))
    pool = SUN397(str(scenes), size=2).load()
    np.testing.assert_array_equal(pool.labels, labels_shown(pool))
    assert sorted(pool.images[:, 1, 0, 0].tolist()) == [0] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    (scenes / "sun397/SUN397").rename(scenes / "SUN397")  # torchvision's form
    (scenes / "sun397").rename(scenes / "lists")
    np.testing.assert_array_equal(pool.images, SUN397(str(scenes), size=2).load().images)


def test_names_of_scenes_and_aircraft_are_coops():
    assert len(set(SUN397.class_names)) == 397
    assert SUN397.class_names[8:10] == ("outdoor apartment building", "indoor apse")
    assert SUN397.class_names[-1] == "youth hostel"
    assert len(set(FGVCAircraft.class_names)) == 100
    assert list(FGVCAircraft.class_names) == sorted(FGVCAircraft.class_names)
    assert FGVCAircraft.template.format("F-16A/B") == "a photo of a F-16A/B, a type of aircraft."


@pytest.mark.parametrize("line", ["/x/xanadu/sun_1.jpg", "sun_1.jpg", "/a/abbey"])
def test_other_lines_in_suns_lists_are_refused(scenes, line):
    (scenes / "sun397/Training_01.txt").write_text(line)
    with pytest.raises(ConfigurationError, match=r"Training_01\.txt must have lines of /<letter>/<class>/<file>"):
        SUN397(str(scenes), split="seeded", size=2).load()


@pytest.mark.parametrize("folder", ["fgvc_aircraft", "fgvc-aircraft-2013b/data"])
def test_aircraft_are_split_as_their_lists_say(folder, tmp_path):
    at = tmp_path / folder
    for number, side in enumerate(("train", "val", "test")):
        lines = []
        for label in range(0, 100, 30):
            write(at / f"images/{number}{label:06}.jpg", label, number, 0)
            lines.append(f"{number}{label:06} {FGVCAircraft.class_names[label]}")
        (at / f"images_variant_{side}.txt").write_text("\n".join(lines))
    pool = FGVCAircraft(str(tmp_path), size=2).load()
    np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 0, 0])
    np.testing.assert_array_equal(pool.test, pool.images[:, 1, 0, 0] == 2)
    assert len(pool.labels) == 8  # validation images serve no one
    for line, match in (
        ("1000000", "must have lines of an image's number and its variant, got '1000000'"),
        ("1000000 Zeppelin", "must have lines of .* got '1000000 Zeppelin'"),
        ("../1000000 707-320", "must have lines of"),
        ("0000000 707-320", r"lists 0000000\.jpg more than once"),
    ):
        (at / "images_variant_val.txt").write_text(line)
        with pytest.raises(ConfigurationError, match=match):
            FGVCAircraft(str(tmp_path), size=2).load()
    (at / "images_variant_test.txt").unlink()
    (at / "images_variant_val.txt").write_text("1000000 707-320")
    with pytest.raises(ConfigurationError, match=r"cannot read the list .*images_variant_test\.txt"):
        FGVCAircraft(str(tmp_path), size=2).load()


@pytest.mark.parametrize("source", [SUN397, FGVCAircraft])
def test_missing_images_say_what_to_do(source, tmp_path):
    match = f"{source.title} is not in .*: download it from http.*and put it there as {source.folders[0]}/"
    with pytest.raises(ConfigurationError, match=match):
        source(str(tmp_path)).load()


def imagenet(root, inside="images/", train=4):
    """Three classes; red is the class, green the side, blue the number."""
    for label, wnid in enumerate(("n01440764", "n03773504", "n04008634")):
        for at, (side, count) in enumerate((("train", train), ("val", 2))):
            for number in range(count):
                write(root / f"imagenet/{inside}{side}/{wnid}/{number}.JPEG", label, at, number)
    names = "n04008634 missile\nn01440764 tench\nn03773504 missile\n"
    (root / "imagenet/classnames.txt").write_text(names)


@pytest.mark.parametrize("inside", ["images/", ""])
def test_imagenets_validation_images_test(inside, tmp_path):
    imagenet(tmp_path, inside)
    source = ImageNet(str(tmp_path), size=2)
    assert source.class_names == ("tench", "missile", "missile (n04008634)")
    pool = source.load()
    np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 0, 0])
    np.testing.assert_array_equal(pool.test, pool.images[:, 1, 0, 0] == 1)
    assert (int((~pool.test).sum()), int(pool.test.sum())) == (12, 6)


def test_imagenets_shots_are_drawn_by_class(tmp_path):
    imagenet(tmp_path, train=9)
    pools = [ImageNet(str(tmp_path), size=2, shots=3, split_seed=seed).load() for seed in (0, 0, 1)]
    for pool in pools:
        assert pool.labels[~pool.test].bincount().tolist() == [3] * 3
        assert pool.labels[pool.test].bincount().tolist() == [2] * 3
        np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 0, 0])
    np.testing.assert_array_equal(pools[0].images, pools[1].images)
    assert not np.array_equal(pools[0].images, pools[2].images)


def test_imagenet_without_names_or_with_other_lines_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"ImageNet is not in .*: put classnames\.txt from https.* there, and"):
        ImageNet(str(tmp_path))
    path = tmp_path / "classnames.txt"
    for text, match in (
        ("1 tench", "must have lines of a new WordNet id and a name, such as 'n01440764 tench', got '1 tench'"),
        ("n01440764", "must have lines"),
        ("n01440764 tench\nn01440764 goldfish", "must have lines of a new .* got 'n01440764 goldfish'"),
        ("n01440764 tench\x1b[31m", "must have lines"),
        ("../../etc tench", "must have lines"),
        ("n01440764 tench", "names a single class"),
        ("", "is empty"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=match):
            read_names(path)


def test_imagenets_class_folders_are_checked(tmp_path):
    imagenet(tmp_path)
    write(tmp_path / "imagenet/images/val/n09999999/0.JPEG", 0, 0, 0)
    with pytest.raises(
        ConfigurationError, match=r"images/val must hold .* 3 classes; missing: none; unknown: n09999999"
    ):
        ImageNet(str(tmp_path), size=2).load()
