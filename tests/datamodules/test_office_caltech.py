import numpy as np
import pytest
from PIL import Image

from benchmark.errors import ConfigurationError
from datamodules.office_caltech import OfficeCaltech10
from datamodules.splitting import draw_test

pytestmark = pytest.mark.filterwarnings("ignore:Office-Caltech10 has")

FOLDERS = ("backpack", "bike", "calculator", "headphones", "keyboard", "laptop", "monitor", "mouse", "mug", "projector")
COUNTS = {
    "amazon": (92, 82, 94, 99, 100, 100, 99, 100, 94, 98),
    "caltech10": (151, 110, 100, 138, 85, 128, 133, 94, 87, 97),
    "dslr": (12, 21, 12, 13, 10, 24, 22, 12, 8, 23),
    "webcam": (29, 21, 31, 27, 27, 30, 43, 30, 27, 30),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Ten to twelve images a class and domain, all different: red is the class, green the domain."""
    root = tmp_path_factory.mktemp("data")
    for domain, name in enumerate(COUNTS):
        for label, folder in enumerate(FOLDERS):
            at = root / "office_caltech10" / name / folder
            at.mkdir(parents=True)
            for image in range(10 + label % 3):
                Image.new("RGB", (6, 4), (label, domain, image)).save(at / f"{image:02}.png")
    return root


def load(root, seed=0):
    return OfficeCaltech10(str(root), size=4, split_seed=seed).load()


def test_names_are_fedbns():
    assert OfficeCaltech10.class_names[0] == "back_pack"
    assert OfficeCaltech10.class_names[5] == "laptop_computer"
    assert list(OfficeCaltech10.class_names) == sorted(OfficeCaltech10.class_names)
    assert OfficeCaltech10.domain_names == ("amazon", "caltech", "dslr", "webcam")


def test_read_with_aliases_and_split(root):
    pool = load(root)
    assert pool.images.shape == (4 * 109, 3, 4, 4)
    np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 0, 0])
    np.testing.assert_array_equal(pool.domains, pool.images[:, 1, 0, 0])
    for domain in range(4):
        mine = pool.domains == domain
        assert int((pool.test & mine).sum()) == 22  # 109 - floor(0.8 * 109)
        per_class = np.bincount(pool.labels[pool.test & mine])
        assert per_class.min() == 2
        assert per_class.max() == 3


def test_images_may_be_cropped(tmp_path):
    at = tmp_path / "office_caltech10"
    for domain in COUNTS:
        for folder in FOLDERS:
            (at / domain / folder).mkdir(parents=True)
            image = Image.new("RGB", (12, 4), (255, 0, 0))
            image.paste((0, 255, 0), (4, 0, 8, 4))  # what the centre shows
            for number in range(2):
                image.putpixel((0, number), (0, 0, number))
                image.save(at / domain / folder / f"{number}.png")
    cropped = OfficeCaltech10(str(tmp_path), size=4, fit="crop").load().images
    assert cropped.unique(dim=0).tolist() == [[[[0] * 4] * 4, [[255] * 4] * 4, [[0] * 4] * 4]]
    assert len(OfficeCaltech10(str(tmp_path), size=4).load().images.unique()) > 2


def test_split_depends_on_its_seed_alone(root):
    first = load(root).test
    np.testing.assert_array_equal(first, load(root).test)
    assert not np.array_equal(first, load(root, seed=1).test)


def test_copies_train(root, tmp_path):
    at = tmp_path / "office_caltech10"
    at.mkdir()
    for domain in COUNTS:
        (at / domain).mkdir()
        for folder in FOLDERS:
            (at / domain / folder).mkdir()
            for file in (root / "office_caltech10" / domain / folder).iterdir():
                (at / domain / folder / file.name).write_bytes(file.read_bytes())
    for number in range(6):  # in one domain, and across domains
        (at / f"amazon/bike/{number:02}.png").write_bytes((at / "amazon/bike/09.png").read_bytes())
    (at / "webcam/mug/00.png").write_bytes((at / "dslr/mug/00.png").read_bytes())
    for seed in range(5):
        pool = load(tmp_path, seed)
        values, counts = np.unique(pool.group, return_counts=True)
        assert sorted(counts)[-2:] == [2, 7]
        assert not pool.test[np.isin(pool.group, values[counts > 1])].any()
        assert [int((pool.test & (pool.domains == d)).sum()) for d in range(4)] == [22] * 4


def test_official_sizes_give_fedbns_counts():
    for counts, expected in zip(COUNTS.values(), (192, 225, 32, 59), strict=True):
        labels = np.repeat(np.arange(10), counts)
        test = draw_test(labels, np.ones(len(labels), dtype=bool), np.random.default_rng(0))
        assert test.sum() == expected
        share = np.bincount(labels[test]) - np.array(counts) * expected / len(labels)
        assert np.abs(share).max() < 1


def test_draw_by_hand():
    labels = np.repeat([0, 1, 2], [7, 5, 3])
    # 15 images, 3 to test: shares 1.4, 1.0, 0.6 give 1, 1, 0, and the third goes to the remainder 0.6.
    free = np.ones(15, dtype=bool)
    free[7:11] = False
    test = draw_test(labels, free, np.random.default_rng(0))
    assert np.bincount(labels[test]).tolist() == [1, 1, 1]
    assert test[11]  # the only free image of class 1


def test_other_sizes_than_the_official_ones_are_said(root):
    with pytest.warns(UserWarning, match=r"has \(109, 109, 109, 109\): results compare with no published number"):
        load(root)


def test_missing_data_say_what_to_do(tmp_path, root):
    with pytest.raises(
        ConfigurationError, match=r"Office-Caltech10 is not in .*download .*https://\S+.*<domain>/<class>"
    ):
        load(tmp_path)
    (tmp_path / "office_caltech10").mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot read the image folder .*amazon"):
        load(tmp_path)
    with pytest.raises(
        ConfigurationError, match="OfficeCaltech10: size: expected a whole number from 1 to 10,000, got 0"
    ):
        OfficeCaltech10(str(root), size=0)
