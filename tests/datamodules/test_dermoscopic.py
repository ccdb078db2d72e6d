import numpy as np
import pytest
from PIL import Image

from benchmark.errors import ConfigurationError
from benchmark.seeds import numpy_generator
from datamodules.dermoscopic import DermoscopicFL, draw_sides
from datamodules.partition import DomainPerClient
from datamodules.splitting import united
from datamodules.tables import read_table

pytestmark = pytest.mark.filterwarnings("ignore:Dermoscopic-FL (has|is split)")

SITES, DIAGNOSES, SIDES = "ABCD", ("nv", "bkl", "mel"), ("train", "valid", "test")
DATASETS = {"A": "vidir_modern", "B": "vidir_molemax", "C": "rosendahl"}

# PRR-FL's counts, train / valid / test of nevi, keratoses and melanomas.
PUBLISHED = {
    "A": ((1282, 333, 476), (183, 47, 68), (367, 95, 136)),
    "B": ((2604, 87, 17), (372, 12, 2), (744, 25, 5)),
    "C": ((562, 343, 239), (80, 49, 34), (161, 98, 69)),
    "D": ((960, 178, 262), (137, 25, 37), (275, 51, 75)),
}


def make_images():
    """Ten images a site and class: (id, site, label, side, lesion). Image 9 (test) shows the lesion of image 0 (train).

    Site D has no lesion ids.
    """
    images = []
    for site in range(4):
        for label in range(3):
            for number in range(10):
                side = 0 if number < 6 else 1 if number < 7 else 2
                lesion = f"L{site}{label}{0 if number == 9 else number}"
                images.append((f"ISIC_{site}{label}{number}", site, label, side, lesion))
    return images


def save(path, site, label, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), (label, site, number)).save(path, format="PNG")


def write_lists(at, images):
    (at / "splits_prrfl").mkdir(parents=True, exist_ok=True)
    for site, letter in enumerate(SITES):
        for side, name in enumerate(SIDES):
            lines = ["image_id,label" + (",lesion_id" if letter != "D" else "")]
            for image, of, label, mine, lesion in images:
                if (of, mine) == (site, side):
                    lines.append(f"{image},{label}" + (f",{lesion}" if letter != "D" else ""))
            (at / "splits_prrfl" / f"{name}_client{letter}.csv").write_text("\n".join(lines) + "\n")


def write_folders(root):
    at = root / "dermoscopic_fl"
    for image, site, label, side, _ in make_images():
        save(at / f"client{SITES[site]}" / SIDES[side] / DIAGNOSES[label] / f"{image}.jpg", site, label, int(image[-1]))
    return at


def write_releases(root, delimiter=",", name="HAM10000_metadata.csv"):
    at = root / "dermoscopic_fl"
    ham = [delimiter.join(("lesion_id", "image_id", "dx", "age", "dataset"))]
    isic = ["image_id,melanoma,seborrheic_keratosis"]
    for image, site, label, _, lesion in make_images():
        if site == 3:
            isic.append(f"{image},{float(label == 2)},{float(label == 1)}")
            folder = "ISIC-2017_Training_Data"
        else:
            ham.append(delimiter.join((lesion, image, DIAGNOSES[label], "50", DATASETS[SITES[site]])))
            folder = f"HAM10000_images_part_{1 + label % 2}"
        save(at / folder / f"{image}.jpg", site, label, int(image[-1]))
    ham.append(delimiter.join(("L9", "ISIC_990", "bcc", "50", "vidir_modern")))  # of no class and of no site
    ham.append(delimiter.join(("L9", "ISIC_991", "nv", "50", "vienna_dias")))
    (at / name).write_text("\n".join(ham))
    (at / "ISIC-2017_Training_Part3_GroundTruth.csv").write_text("\n".join(isic))
    (at / "ISIC-2017_Training_Data/ISIC_300_superpixels.png").write_bytes(b"not read")
    return at


def load(root, **arguments):
    return DermoscopicFL(str(root), size=4, **arguments).load()


def counts(pool, test):
    return [np.bincount(pool.labels[(pool.domains == site) & (pool.test == test)]).tolist() for site in range(4)]


def test_plain_folders(tmp_path):
    write_folders(tmp_path)
    pool = load(tmp_path)
    np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 0, 0])
    np.testing.assert_array_equal(pool.domains, pool.images[:, 1, 0, 0])
    np.testing.assert_array_equal(pool.test, pool.images[:, 2, 0, 0] > 6)
    assert counts(pool, False) == [[6, 6, 6]] * 4  # the validation images are left out
    assert counts(pool, True) == [[3, 3, 3]] * 4
    assert counts(load(tmp_path, use_valid="train"), False) == [[7, 7, 7]] * 4
    splits = DomainPerClient().split(pool, numpy_generator(0, "partition"))
    assert [len(rows) for rows in splits.train + splits.test] == [18] * 4 + [9] * 4
    assert DomainPerClient().client_names(DermoscopicFL()) == list("ABCD")


@pytest.mark.parametrize(("delimiter", "name"), [(",", "HAM10000_metadata.csv"), ("\t", "HAM10000_metadata.tab")])
def test_releases_with_the_published_lists_are_the_plain_folders(tmp_path, delimiter, name):
    write_folders(tmp_path / "plain")
    write_lists(write_releases(tmp_path / "releases", delimiter, name), make_images())
    for use_valid in ("none", "train"):
        one, other = (load(tmp_path / which, use_valid=use_valid) for which in ("plain", "releases"))
        np.testing.assert_array_equal(one.images, other.images)
        np.testing.assert_array_equal(one.test, other.test)


def test_releases_without_lists_are_split_by_image(tmp_path):
    write_releases(tmp_path)
    pool = load(tmp_path)
    assert counts(pool, False) == [[7, 7, 7]] * 4
    assert counts(pool, True) == [[2, 2, 2]] * 4
    np.testing.assert_array_equal(pool.test, load(tmp_path).test)
    assert not np.array_equal(pool.images, load(tmp_path, split_seed=1).images)


def test_the_drawn_split_has_the_published_counts():
    for letter, table in PUBLISHED.items():
        labels = np.repeat(np.arange(3), np.sum(table, axis=0))
        sides = draw_sides(labels, np.arange(len(labels)), 0, letter)
        assert [np.bincount(labels[sides == side]).tolist() for side in range(3)] == [list(row) for row in table]


def test_the_published_split_says_how_much_leaks(tmp_path):
    write_lists(write_folders(tmp_path), make_images())
    with pytest.warns(
        UserWarning, match=r"also trains: 3 of 9 at site A, 3 of 9 at site B, 3 of 9 at site C; split=les"
    ):
        pool = load(tmp_path)
    assert len(pool.group.unique()) == len(pool.labels)


def test_split_by_lesion(tmp_path):
    write_lists(write_folders(tmp_path), make_images())
    lesion_of = {(site, label, int(image[-1])): lesion for image, site, label, _, lesion in make_images()}
    for seed in range(5):
        pool = load(tmp_path, split="lesion", split_seed=seed, use_valid="train")
        red_green_blue = pool.images[:, :, 0, 0].tolist()
        lesions = [lesion_of[g, r, b] if g < 3 else f"alone {r}{b}" for r, g, b in red_green_blue]
        assert len(set(lesions)) == len(pool.group.unique()) == 4 * 3 * 10 - 9
        for lesion in set(lesions):
            of = [place for place, other in enumerate(lesions) if other == lesion]
            assert len(pool.group[of].unique()) == len(pool.test[of].unique()) == 1
        assert counts(pool, True)[3] == [2, 2, 2]
        assert all(2 <= tested <= 3 for site in counts(pool, True) for tested in site)
        DomainPerClient().split(pool, numpy_generator(0, "partition"))  # check_splits has nothing to say


def test_whole_units_by_hand():
    # 10 images in units of 4, 3, 2 and 1: seven may train, one may validate.
    units = np.repeat([5, 6, 7, 8], [4, 3, 2, 1])
    seen = set()
    for seed in range(40):
        sides = draw_sides(np.zeros(10, dtype=np.int64), units, seed, "by hand")
        assert all(len(set(sides[units == unit])) == 1 for unit in range(5, 9))
        assert (sides == 0).sum() <= 7
        seen.add(tuple((sides == side).sum() for side in range(3)))
    # 4 3 | 1 | 2 fits exactly; 4 3 2 1 validates nothing, as a unit of 2 does not fit.
    assert {(7, 1, 2), (7, 0, 3)} <= seen


def test_lesions_with_a_common_file_are_one_group():
    lesions, copies = np.array([0, 0, 1, 1, 2, 3]), np.array([0, 1, 1, 3, 4, 5])
    assert united(lesions, copies).tolist() == [0, 0, 0, 0, 2, 3]


def test_training_copies_of_test_images_are_left_out(tmp_path):
    at = write_folders(tmp_path)
    copied = (at / "clientB/test/nv/ISIC_108.jpg").read_bytes()
    (at / "clientA/train/mel/ISIC_020.jpg").write_bytes(copied)
    pool = load(tmp_path)
    assert counts(pool, False)[0] == [6, 6, 5]
    assert counts(pool, True) == [[3, 3, 3]] * 4


def test_other_sizes_than_the_published_ones_are_said(tmp_path):
    write_folders(tmp_path)
    with pytest.warns(UserWarning, match=r"has 2987, 3868, 1635, 2000 images at its sites, .* has 30, 30, 30, 30"):
        load(tmp_path)


def test_missing_data_say_what_to_do(tmp_path):
    with pytest.raises(ConfigurationError) as said:
        load(tmp_path)
    for name in ("HAM10000_metadata.csv", "HAM10000_images_part_2", "ISIC-2017_Training_Data", "doi.org", "client{A,B"):
        assert name in str(said.value)
    at = write_releases(tmp_path)
    (at / "HAM10000_images_part_1/ISIC_000.jpg").unlink()
    with pytest.raises(ConfigurationError, match="the image ISIC_000 of site A is in none of HAM10000_images_part_1"):
        load(tmp_path)
    (at / "ISIC-2017_Training_Part3_GroundTruth.csv").unlink()
    with pytest.raises(
        ConfigurationError, match=r"unpack there ISIC-2017_Training_Part3_GroundTruth\.csv \(https:[^,]*, or"
    ):
        load(tmp_path)
    with pytest.raises(
        ConfigurationError, match="DermoscopicFL: size: expected a whole number from 1 to 10,000, got 0"
    ):
        DermoscopicFL(size=0)


def test_damaged_lists(tmp_path):
    at = write_releases(tmp_path)
    write_lists(at, make_images())
    path = at / "splits_prrfl/test_clientA.csv"
    whole = path.read_text()
    path.write_text(whole.replace("ISIC_009,0,L000\n", ""))
    with pytest.raises(ConfigurationError, match="no list names the image ISIC_009 of site A; give all twelve lists"):
        load(tmp_path)
    path.write_text(whole + "ISIC_000,0,L000\n")
    with pytest.raises(ConfigurationError, match=r"test_clientA\.csv: the image ISIC_000 is in another list too"):
        load(tmp_path)


def test_damaged_tables(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("image_id,dx\na,nv\n")
    assert read_table(path, ("image_id", "dx")) == [{"image_id": "a", "dx": "nv"}]
    with pytest.raises(ConfigurationError, match=r"table\.csv has no column dataset; take the file of the official"):
        read_table(path, ("image_id", "dataset"))
    path.write_text("image_id,dx\na,nv\nb\n")
    with pytest.raises(ConfigurationError, match=r"table\.csv: line 3 is too short"):
        read_table(path, ("image_id", "dx"))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="cannot read the table"):
        read_table(path, ("image_id",))


def test_lesion_ids_are_needed_to_split_by_them(tmp_path):
    at = write_folders(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"split=lesion needs lesion ids, and 90 .* put PRR-FL's lists into .*splits_prrfl"
    ):
        load(tmp_path, split="lesion")
    write_lists(at, [entry for entry in make_images() if entry[1] == 0])
    for letter in "BC":
        for side in SIDES:
            (at / "splits_prrfl" / f"{side}_client{letter}.csv").unlink()
    with pytest.raises(ConfigurationError, match=r"60 images have none, first ISIC_100 of site B: put"):
        load(tmp_path, split="lesion")
    save(at / "clientD/train/nv/ISIC_000.jpg", 3, 0, 0)
    with pytest.raises(ConfigurationError, match="holds the image ISIC_000 more than once"):
        load(tmp_path)
