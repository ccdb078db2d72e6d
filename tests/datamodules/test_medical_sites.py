"""Fed-ISIC2019 and Camelyon17, on small images in the layouts of FLamby and WILDS."""

import warnings

import numpy as np
import pytest
from PIL import Image

from benchmark.errors import ConfigurationError
from datamodules.camelyon17 import SIZES as PATCHES
from datamodules.camelyon17 import Camelyon17
from datamodules.fed_isic import SIZES, FedISIC2019
from datamodules.partition import DomainPerClient

COUNTS = pytest.mark.filterwarnings("ignore:.*results compare with no published number")


def draw(path, *colour):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), colour).save(path, format="PNG")


PREPROCESSED = "ISIC_2019_Training_Input_preprocessed"


def isic(root, folder=PREPROCESSED, name="train_test_split", other=()):
    """Five images of two classes a center: red is the class, green the center, blue the number; image 4 tests."""
    at = root / "fed_isic2019"
    lines = ["image,MEL,NV,UNK,target,center,fold,fold2"]
    for center in range(6):
        for label in (1, 7):
            for number in range(5):
                image = f"ISIC_{center}{label}{number}" + ("_downsampled" if center == 4 else "")
                side = "test" if number == 4 else "train"
                lines.append(f"{image},0.0,0.0,0.0,{label},{center},{side},{side}_{center}")
                draw(at / folder / f"{image}.jpg", label, center, number)
    (at / name).write_text("\n".join([lines[0], *reversed(lines[1:]), *other]))
    return at


def lesions(at):
    """Images 3 and 4 of a class of a center show one lesion; images of center 4 have none."""
    lines = ["image,age_approx,anatom_site_general,lesion_id,sex"]
    for center in range(6):
        for label in (1, 7):
            for number in range(5):
                image = f"ISIC_{center}{label}{number}" + ("_downsampled" if center == 4 else "")
                lesion = "" if center == 4 else f"L{center}{label}{min(number, 3)}"
                lines.append(f"{image},50,torso,{lesion},male")
    (at / "ISIC_2019_Training_Metadata.csv").write_text("\n".join(lines))


@COUNTS
@pytest.mark.parametrize("name", ["train_test_split", "train_test_split.csv"])
def test_flambys_list_gives_centers_classes_and_sides(tmp_path, name):
    isic(tmp_path, name=name)
    source = FedISIC2019(str(tmp_path), size=4)
    pool = source.load()
    assert pool.images.shape == (60, 3, 4, 4)
    np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 0, 0])
    np.testing.assert_array_equal(pool.domains, pool.images[:, 1, 0, 0])
    np.testing.assert_array_equal(pool.test, pool.images[:, 2, 0, 0] == 4)
    assert len(pool.group.unique()) == 60
    assert DomainPerClient().client_names(source)[4] == "MSK"
    assert (source.class_names[1], source.class_names[7]) == ("melanocytic nevus", "squamous cell carcinoma")
    assert sum(map(sum, SIZES)) == 23247


@COUNTS
def test_lesions_on_both_sides_are_said_and_can_be_kept_together(tmp_path):
    at = isic(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"split=lesion needs lesion ids: put ISIC_2019_Training_Metadata\.csv"
    ):
        FedISIC2019(str(tmp_path), size=4, split="lesion").load()
    lesions(at)
    with pytest.warns(UserWarning, match="lesion which also trains: 2 of 2 at site BCN, .*; split=lesion keeps each"):
        FedISIC2019(str(tmp_path), size=4).load()
    pool = FedISIC2019(str(tmp_path), size=4, split="lesion").load()
    number = pool.images[:, 2, 0, 0]
    assert len(pool.labels) == 60
    for center in range(6):
        for label in (1, 7):
            mine = (pool.domains == center) & (pool.labels == label)
            assert len(pool.group[mine].unique()) == (5 if center == 4 else 4)
            last = mine & (number >= 3)
            assert center == 4 or len(pool.test[last].unique()) == 1
            assert 0 < int(pool.test[mine].sum()) < 5
    other = FedISIC2019(str(tmp_path), size=4, split="lesion", split_seed=1).load()
    assert not np.array_equal(pool.test, other.test)


def test_other_images_than_flambys_are_said(tmp_path):
    isic(tmp_path, "ISIC_2019_Training_Input")
    with (
        pytest.warns(UserWarning, match=r"has 18597 train and 4650 test images at its centers, .* has 48 and 12, or"),
        pytest.warns(UserWarning, match="holds the release's images and not FLamby's"),
    ):
        FedISIC2019(str(tmp_path), size=4).load()


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (
            "ISIC_9,0,0,0,8,0,train,train_0",
            "ISIC_9 has target '8', expected one of 0, 1, 2, 3, 4, 5, 6, 7; get the list",
        ),
        ("ISIC_9,0,0,0,1,6,train,train_6", "ISIC_9 has center '6', expected one of 0, 1, 2, 3, 4, 5;"),
        ("ISIC_9,0,0,0,1,0,valid,train_0", "ISIC_9 has fold 'valid', expected one of train, test;"),
        ("ISIC_010,0,0,0,1,0,train,train_0", "lists ISIC_010 more than once"),
        ("ISIC_9,0,0,0,1,0,train,train_0", r"cannot read the image .*ISIC_9\.jpg: No such file"),
        ("../../private,0,0,0,1,0,train,train_0", "leads outside of the data set's folder"),
        ("ISIC_9,0", "line 62 is too short"),
    ],
)
@COUNTS
def test_other_lines_in_flambys_list_are_refused(tmp_path, line, match):
    draw(tmp_path / "private.jpg", 1, 2, 3)
    isic(tmp_path, other=[line])
    with pytest.raises(ConfigurationError, match=match) as caught:
        FedISIC2019(str(tmp_path), size=4).load()
    assert "\n" not in str(caught.value)


def test_what_is_missing_of_fed_isic_is_said(tmp_path):
    with pytest.raises(
        ConfigurationError,
        match=r"not complete in .*: put there train_test_split\.csv from .*FLamby.* and ISIC_2019_.*http",
    ):
        FedISIC2019(str(tmp_path)).load()
    isic(tmp_path)
    (tmp_path / "fed_isic2019/train_test_split").unlink()
    with pytest.raises(ConfigurationError, match=r"put there train_test_split\.csv from \S+ \([^)]*\); if it is in"):
        FedISIC2019(str(tmp_path)).load()


HEADER = ",patient,node,x_coord,y_coord,tumor,slide,center,split"


def camelyon(root, other=()):
    """Five patients a hospital, with two slides of two patches: red is the class, green the hospital, blue the patient.

    Of each slide the second patch tests in the column ``split``.
    """
    at = root / "camelyon17_v1.0"
    lines = []
    for hospital in range(5):
        for patient in range(20 * hospital, 20 * hospital + 5):
            for node in range(2):
                for x in range(2):
                    lines.append(f"{len(lines)},{patient:03},{node},{x},{patient},{x},{patient},{hospital},{x}")
                    folder = f"patient_{patient:03}_node_{node}"
                    file = f"patches/{folder}/patch_{folder}_x_{x}_y_{patient}.png"
                    draw(at / file, x, hospital, 2 * patient + node)
    (at / "metadata.csv").write_text("\n".join([HEADER, *reversed(lines), *other]))
    return at


@COUNTS
def test_hospitals_are_domains_and_patients_stay_on_one_side(tmp_path):
    camelyon(tmp_path)
    pool = Camelyon17(str(tmp_path), size=4).load()
    patients = pool.images[:, 2, 0, 0] // 2
    assert pool.images.shape == (100, 3, 4, 4)
    np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 0, 0])
    np.testing.assert_array_equal(pool.domains, pool.images[:, 1, 0, 0])
    for patient in patients.unique():
        assert len(pool.group[patients == patient].unique()) == len(pool.test[patients == patient].unique()) == 1
    assert len(pool.group.unique()) == 25
    assert pool.domains[pool.test].bincount().tolist() == [4] * 5  # one patient of five
    other = Camelyon17(str(tmp_path), size=4, split_seed=1).load()
    assert not np.array_equal(pool.test, other.test)
    splits = DomainPerClient().split(pool, np.random.default_rng(0))
    assert [len(rows) for rows in splits.train + splits.test] == [16] * 5 + [4] * 5


@COUNTS
def test_the_column_split_is_heeded_and_said_to_leak(tmp_path):
    camelyon(tmp_path)
    with pytest.warns(
        UserWarning, match="patient which also trains: 10 of 10 at site hospital 0, .*; split=patient keeps"
    ):
        pool = Camelyon17(str(tmp_path), size=4, split="patch").load()
    np.testing.assert_array_equal(pool.test, pool.images[:, 0, 0, 0] == 1)
    assert len(pool.group.unique()) == 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*results compare with no published number")
        Camelyon17(str(tmp_path), size=4).load()


def test_other_numbers_of_patches_than_wilds_are_said(tmp_path):
    camelyon(tmp_path)
    assert sum(PATCHES) == 455954
    with pytest.warns(
        UserWarning, match="has 59436, 34904, 85054, 129838, 146722 patches .* has 20, 20, 20, 20, 20: results"
    ):
        Camelyon17(str(tmp_path), size=4).load()


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (
            "0,../../../etc,0,1,2,0,0,0,0",
            "line 102 has '../../../etc' in the column patient, expected a whole number; get",
        ),
        ("0,099,0,-1,2,0,0,4,0", "line 102 has '-1' in the column x_coord"),
        ("0,099,0,1,2,0,0,4," + "9" * 5000, "in the column split, expected a whole number"),
        ("0,099,0,1,2,0,0,5,0", "line 102 has tumor 0, center 5 and split 0, expected"),
        ("0,099,0,1,2,2,0,4,0", "line 102 has tumor 2"),
        ("0,099,0,1,2,1,0,4,3", "and split 3"),
        ("0,000,7,1,2,1,0,4,0", "line 102 has patient 000 in center 4, an earlier one in center 0"),
        ("0,099,0,1,2,0,0,4,0", r"cannot read the image .*patient_099_node_0.*: No such file"),
        ("0,099,0", "line 102 is too short"),
    ],
)
@COUNTS
def test_other_lines_in_the_metadata_are_refused(tmp_path, line, match):
    camelyon(tmp_path, other=[line])
    with pytest.raises(ConfigurationError, match=match) as caught:
        Camelyon17(str(tmp_path), size=4).load()
    assert "\n" not in str(caught.value)


def test_what_is_missing_of_camelyon_is_said(tmp_path):
    with pytest.raises(ConfigurationError, match=r"Camelyon17 is not in .*camelyon17_v1\.0: download it from https\S+"):
        Camelyon17(str(tmp_path)).load()
    (tmp_path / "camelyon17_v1.0").mkdir()
    (tmp_path / "camelyon17_v1.0/metadata.csv").write_text(HEADER + "\n")
    with pytest.raises(ConfigurationError, match=r"metadata\.csv lists no patch"):
        Camelyon17(str(tmp_path)).load()
    (tmp_path / "camelyon17_v1.0/metadata.csv").write_text("patient,node\n1,2\n")
    with pytest.raises(ConfigurationError, match=r"metadata\.csv has no column x_coord, y_coord, tumor"):
        Camelyon17(str(tmp_path)).load()
