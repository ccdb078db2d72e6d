"""PACS, Office-Home and VLCS, on small images written in every layout that is read."""

import numpy as np
import pytest
from PIL import Image

from benchmark.errors import ConfigurationError
from datamodules.domain_layout import DomainSource
from datamodules.office_home import OfficeHome
from datamodules.own_images import DomainFolders
from datamodules.pacs import PACS
from datamodules.partition import DomainPerClient
from datamodules.vlcs import VLCS

pytestmark = pytest.mark.filterwarnings("ignore:.*results compare with no published number")

#: every layout: source, folder, its domains in the source's order
LAYOUTS = {
    "DomainBed's PACS": (PACS, "PACS", ("art_painting", "cartoon", "photo", "sketch")),
    "Dassl's PACS": (PACS, "pacs/images", ("art_painting", "cartoon", "photo", "sketch")),
    "the release of Office-Home": (
        OfficeHome,
        "OfficeHomeDataset_10072016",
        ("Art", "Clipart", "Product", "Real World"),
    ),
    "Dassl's Office-Home": (OfficeHome, "office_home", ("art", "clipart", "product", "real_world")),
    "DomainBed's VLCS": (VLCS, "VLCS", ("Caltech101", "LabelMe", "VOC2007", "SUN09")),
}


def draw(at, *colour):
    at.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), colour).save(at, format="PNG")


def write(root, source, folder, domains, images=5):
    """Images whose red is the class, green the domain and blue the number."""
    for number, domain in enumerate(domains):
        for label, name in enumerate(source.class_names):
            for image in range(images):
                draw(root / folder / domain / source.spelled(name)[0] / f"{image}.jpg", label, number, image)
    return root / folder


def jigen(root):
    """VLCS with sides, classes by number; images of `full` and `crossval` are in `train` as well or left out."""
    for number, domain in enumerate(("CALTECH", "LABELME", "PASCAL", "SUN")):
        for at, side in enumerate(("train", "crossval", "test", "full")):
            for label in range(5):
                for image in range(2):
                    draw(root / "VLCS" / domain / side / str(label) / f"{image}.jpg", label, number, 10 * at + image)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_classes_and_domains_in_their_order(layout, tmp_path):
    source, folder, domains = LAYOUTS[layout]
    write(tmp_path, source, folder, domains)
    made = source(str(tmp_path), size=4)
    pool = made.load()
    classes = len(source.class_names)
    assert pool.images.shape == (4 * 5 * classes, 3, 4, 4)
    np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 0, 0])
    np.testing.assert_array_equal(pool.domains, pool.images[:, 1, 0, 0])
    for domain in range(4):  # a fifth, of every class
        assert np.bincount(pool.labels[pool.test & (pool.domains == domain)]).tolist() == [1] * classes
    np.testing.assert_array_equal(pool.test, source(str(tmp_path), size=4).load().test)
    assert not np.array_equal(pool.test, source(str(tmp_path), size=4, split_seed=1).load().test)
    assert DomainPerClient().client_names(made) == list(source.domain_names)


def test_names_are_the_published_ones():
    assert PACS.class_names == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    assert VLCS.class_names == ("bird", "car", "chair", "dog", "person")
    assert len(OfficeHome.class_names) == len(set(OfficeHome.class_names)) == 65
    assert OfficeHome.class_names[:2] + OfficeHome.class_names[-2:] == (
        "alarm clock",
        "backpack",
        "trash can",
        "webcam",
    )
    assert [sum(source.sizes) for source in (PACS, OfficeHome, VLCS)] == [9991, 15588, 10729]


def test_sides_that_vlcs_gives_are_kept(tmp_path):
    jigen(tmp_path)
    pool = VLCS(str(tmp_path), size=4).load()
    assert len(pool.labels) == 4 * 5 * 4  # crossval and full are left out
    np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 0, 0])
    np.testing.assert_array_equal(pool.test, pool.images[:, 2, 0, 0] >= 20)
    assert pool.test.sum() == 4 * 5 * 2


def test_a_copy_of_a_given_test_image_does_not_train(tmp_path):
    jigen(tmp_path)
    at = tmp_path / "VLCS"
    (at / "SUN/train/3/0.jpg").write_bytes((at / "PASCAL/test/3/1.jpg").read_bytes())
    pool = VLCS(str(tmp_path), size=4).load()
    assert (int((~pool.test).sum()), int(pool.test.sum())) == (39, 40)


def test_a_side_alone_is_refused(tmp_path):
    jigen(tmp_path)
    (tmp_path / "VLCS/SUN/test").rename(tmp_path / "VLCS/SUN/held")
    with pytest.raises(ConfigurationError, match=r"cannot read the image folder .*SUN/test"):
        VLCS(str(tmp_path), size=4).load()


def test_images_with_copies_train(tmp_path):
    at = write(tmp_path, PACS, "PACS", PACS.domain_names)
    for number in range(4):
        (at / f"photo/dog/{number}.jpg").write_bytes((at / "sketch/dog/0.jpg").read_bytes())
    for seed in range(3):
        pool = PACS(str(tmp_path), size=4, split_seed=seed).load()
        values, counts = np.unique(pool.group, return_counts=True)
        assert counts.max() == 5
        assert not pool.test[np.isin(pool.group, values[counts > 1])].any()


def test_folders_of_no_class_and_links_out_of_the_folder_are_refused(tmp_path):
    at = write(tmp_path, PACS, "PACS", PACS.domain_names)
    draw(tmp_path / "private.jpg", 1, 2, 3)
    (at / "photo/dog/9.jpg").symlink_to(tmp_path / "private.jpg")
    with pytest.raises(ConfigurationError, match="leads outside of the data set's folder"):
        PACS(str(tmp_path), size=4).load()
    (at / "photo/dog/9.jpg").unlink()
    draw(at / "photo/cat/0.jpg", 1, 2, 3)
    with pytest.raises(ConfigurationError, match=r"PACS/photo must hold .* 7 classes; missing: none; unknown: cat"):
        PACS(str(tmp_path), size=4).load()


@pytest.mark.parametrize("source", [PACS, OfficeHome, VLCS])
def test_missing_data_say_what_to_do(source: type[DomainSource], tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        source(str(tmp_path)).load()
    message = str(caught.value)
    assert f"{source.title} is not in {tmp_path}: download " in message
    assert "http" in message
    usual = ", ".join(source.spelled(name)[0] for name in source.domain_names)
    assert f"put its images there as {source.folders[0]}/<domain>/<class>/*.jpg, with domains {usual}" in message
    (tmp_path / source.folders[0]).mkdir()
    with pytest.raises(ConfigurationError, match="cannot read the image folder"):
        source(str(tmp_path)).load()


def test_other_sizes_than_the_published_ones_are_said(tmp_path):
    write(tmp_path, PACS, "PACS", PACS.domain_names)
    with pytest.warns(
        UserWarning, match=r"PACS has 2048, 2344, 1670 and 3929 images .* has \(35, 35, 35, 35\): results"
    ):
        PACS(str(tmp_path), size=4).load()


def test_folders_may_go_on_under_these_names(tmp_path):
    write(tmp_path, PACS, "PACS", PACS.domain_names)
    assert DomainFolders("PACS", str(tmp_path / "PACS"), size=4).recorded_name == "PACS"
