import zipfile

import numpy as np
import pytest
from PIL import Image

from benchmark.errors import ConfigurationError
from datamodules import domainnet
from datamodules.domainnet import ARCHIVES, LISTS, DomainNet10, read_list
from datamodules.splitting import draw_in_proportion

pytestmark = pytest.mark.filterwarnings("ignore:DomainNet-10 has")

CLASSES, DOMAINS = DomainNet10.class_names, DomainNet10.domain_names


def number_of(domain, label):
    """Images of a class in a domain: 10 to 12, and 2 more in painting."""
    return 10 + label % 3 + 2 * (domain == 2)


def write_images(at):
    """All different: red is the class, green the domain, blue the number. One class more than the ten."""
    for domain, name in enumerate(DOMAINS):
        for label, folder in enumerate((*CLASSES, "aircraft_carrier")):
            (at / name / folder).mkdir(parents=True)
            for image in range(number_of(domain, label)):
                Image.new("RGB", (6, 4), (label, domain, image)).save(at / name / folder / f"{image:02}.png")


def write_lists(at, tested=3):
    """The first ``tested`` images of each class test, the others train."""
    at.mkdir(exist_ok=True, parents=True)
    for domain, name in enumerate(DOMAINS):
        lines = {"train": [], "test": []}
        for label, folder in enumerate((*CLASSES, "aircraft_carrier")):
            for image in range(number_of(domain, label)):
                lines["test" if image < tested else "train"].append(f"{name}/{folder}/{image:02}.png {200 + label}\n")
        for side, text in lines.items():
            (at / f"{name}_{side}.txt").write_text("".join(text[::-1]))


@pytest.fixture
def root(tmp_path):
    write_images(tmp_path / "domainnet")
    return tmp_path


def load(root, **arguments):
    return DomainNet10(str(root), size=4, **arguments).load()


def counts(pool, test):
    return [int(((pool.test == test) & (pool.domains == domain)).sum()) for domain in range(6)]


def test_names_are_fedbns():
    assert (len(CLASSES), CLASSES[3], CLASSES[8]) == (10, "ice_cream", "wine_glass")
    assert list(CLASSES) == sorted(CLASSES)
    assert DOMAINS == ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


def test_fedbns_split_is_drawn(root):
    pool = load(root)
    np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 0, 0])
    np.testing.assert_array_equal(pool.domains, pool.images[:, 1, 0, 0])
    assert counts(pool, True) == [22, 22, 26, 22, 22, 22]  # of 109 and of 129 images, a fifth rounded up
    assert counts(pool, False) == [87, 87, 103, 87, 87, 87]
    np.testing.assert_array_equal(pool.test, load(root).test)
    assert not np.array_equal(pool.test, load(root, split_seed=1).test)


def test_official_lists(root):
    write_lists(root / "domainnet")
    pool = load(root, split="official")
    np.testing.assert_array_equal(pool.test, pool.images[:, 2, 0, 0] < 3)
    np.testing.assert_array_equal(pool.images, load(root).images)  # one order, whatever the split
    assert counts(pool, True) == [30] * 6
    assert counts(pool, False) == [79, 79, 99, 79, 79, 79]


def test_lists_in_other_places(root):
    write_lists(root / "domainnet/splits")
    write_lists(root / "domainnet/fedbn", tested=2)
    assert counts(load(root, split="official"), True) == [30] * 6
    assert counts(load(root), True) == [20] * 6
    (root / "domainnet/fedbn/real_test.txt").unlink()
    with pytest.raises(ConfigurationError, match=r"fedbn/real_test\.txt is missing: give .* or remove the folder"):
        load(root)


def test_balanced_over_domains_and_by_class(root):
    write_lists(root / "domainnet")
    full = load(root, split="official")
    pool = load(root, split="official", balance=True)
    assert counts(pool, False) == [79] * 6
    assert counts(pool, True) == counts(full, True)
    painting = np.bincount(pool.labels[(pool.domains == 2) & ~pool.test])
    np.testing.assert_allclose(painting, np.array([9, 10, 11] * 3 + [9]) * 79 / 99, atol=1)
    other = load(root, split="official", balance=True, split_seed=1)
    assert not np.array_equal(pool.images, other.images)
    pool = load(root, test_balance=True)
    assert (counts(pool, True), counts(pool, False)) == ([22] * 6, [87, 87, 103, 87, 87, 87])
    assert counts(load(root, balance=True, test_balance=True), False) == [87] * 6


def test_copies_train_where_the_split_is_drawn_and_are_left_out_of_lists(root):
    at = root / "domainnet"
    (at / "sketch/bird/08.png").write_bytes((at / "real/bird/01.png").read_bytes())
    (at / "sketch/bird/09.png").write_bytes((at / "sketch/bird/07.png").read_bytes())
    for seed in range(4):
        pool = load(root, split_seed=seed)
        values, sizes = np.unique(pool.group, return_counts=True)
        assert sorted(sizes)[-2:] == [2, 2]
        assert not pool.test[np.isin(pool.group, values[sizes > 1])].any()
    write_lists(at)
    assert counts(load(root, split="official"), False) == [79, 79, 99, 79, 79, 78]
    assert counts(load(root, split="official", balance=True), False) == [78] * 6


def test_draw_by_hand():
    labels = np.repeat([0, 1, 2], [7, 5, 3])
    # 6 of 15: shares 2.8, 2.0, 1.2, so that the sixth goes to the remainder 0.8.
    drawn = draw_in_proportion(labels, 6, np.random.default_rng(0))
    assert np.bincount(labels[drawn]).tolist() == [3, 2, 1]
    assert draw_in_proportion(labels, 15, np.random.default_rng(0)).all()
    assert not draw_in_proportion(labels, 0, np.random.default_rng(0)).any()


def test_other_sizes_than_the_published_ones_are_said(root):
    with pytest.warns(UserWarning, match=r"has 526, 657, .* with the fedbn split, .* has 22, 22, 26, 22, 22, 22"):
        load(root)


@pytest.mark.parametrize(
    "line",
    ["clipart/bird", "clipart/bird/x/0.png 3", "../clipart/bird/0.png 3", "real/bird/0.png 3", "clipart/bird/0.png"],
)
def test_damaged_lists_are_named(tmp_path, line):
    path = tmp_path / "clipart_train.txt"
    path.write_text(f"clipart/zebra/a b.png 344\nclipart/dog/1.png 90\n{line}\n")
    with pytest.raises(
        ConfigurationError, match=r"clipart_train\.txt: expected lines of the form clipart/<class>/<file>"
    ):
        read_list(path, "clipart", CLASSES)
    path.write_text("clipart/zebra/a b.png 344\nclipart/dog/1.png 90\n")
    assert read_list(path, "clipart", CLASSES) == [("clipart/zebra/a b.png", 9)]


def test_an_image_is_listed_once_and_is_there(root):
    at = root / "domainnet"
    write_lists(at)
    text = (at / "real_test.txt").read_text()
    (at / "real_test.txt").write_text(text + "real/bird/09.png 200\n")
    with pytest.raises(ConfigurationError, match=r"real/bird/09\.png is listed twice"):
        load(root, split="official")
    (at / "real_test.txt").write_text(text + "real/bird/99.png 200\n")
    with pytest.raises(ConfigurationError, match=r"cannot read the image .*real/bird/99\.png"):
        load(root, split="official")
    for side in ("train", "test"):
        (at / f"real_{side}.txt").write_text("real/dog/1.png 90\n")
    with pytest.raises(ConfigurationError, match=r"the lists of real in .* name no image of the ten classes"):
        load(root, split="official")


def zipped(root, domain, to):
    with zipfile.ZipFile(to / f"{domain}.zip", "w") as archive:
        for file in (root / "domainnet" / domain).rglob("*.png"):
            archive.write(file, file.relative_to(root / "domainnet"))


def test_zip_files_are_unpacked_the_ten_classes_only(root, tmp_path_factory):
    new = tmp_path_factory.mktemp("zipped")
    (new / "domainnet").mkdir()
    for domain in DOMAINS:
        zipped(root, domain, new / "domainnet")
    np.testing.assert_array_equal(load(new).images, load(root).images)
    assert sorted(path.name for path in (new / "domainnet/real").iterdir()) == list(CLASSES)


def test_what_is_missing_is_downloaded(root, tmp_path_factory, monkeypatch):
    new = tmp_path_factory.mktemp("downloaded")
    write_lists(root / "lists")
    asked = {}

    def fetch(url, to, md5):
        asked[url] = md5
        to.parent.mkdir(exist_ok=True)
        if to.suffix == ".zip":
            zipped(root, to.stem, to.parent)
        else:
            to.write_bytes((root / "lists" / to.name).read_bytes())

    monkeypatch.setattr(domainnet, "fetch", fetch)
    assert counts(load(new, split="official", download=True), True) == [30] * 6
    base = "http://csr.bu.edu/ftp/visda/2019/multi-source"
    assert asked[f"{base}/groundtruth/clipart.zip"] == "cd0d8f2d77a4e181449b78ed62bccf1e"
    assert asked[f"{base}/domainnet/txt/real_test.txt"] == "6098816791c3ebed543c71ffa11b9054"
    assert len(asked) == 18
    assert len({md5 for _, md5 in ARCHIVES.values()} | set(LISTS.values())) == 18


def test_missing_data_say_what_to_do(tmp_path, root):
    with pytest.raises(
        ConfigurationError, match=r"not complete in .*: download http://.*clipart\.zip, .*sketch\.zip and put"
    ):
        load(tmp_path / "none")
    with pytest.raises(ConfigurationError) as said:
        load(root, split="official")
    assert "clipart_train.txt, " in str(said.value)
    assert ".zip," not in str(said.value)
    assert "\n" not in str(said.value)
    (root / "domainnet/real/zebra").rename(root / "domainnet/real/okapi")
    with pytest.raises(ConfigurationError, match="missing: zebra; unknown: none"):
        load(root)
    with pytest.raises(ConfigurationError, match="DomainNet10: size: expected a whole number from 1 to 10,000, got 0"):
        DomainNet10(str(root), size=0)
