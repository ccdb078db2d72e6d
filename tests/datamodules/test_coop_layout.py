"""CoOp's data sets, on small images written in every official layout.

CoOp's own split files are checked where they are: in the folder that the environment variable ``COOP_SPLITS`` names,
else in ``data/coop_splits``.
"""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from benchmark.errors import ConfigurationError
from datamodules.caltech101 import Caltech101
from datamodules.coop_layout import TEST, TRAIN, VAL, CoOpSource, DownloadableCoOpSource, draw_sides, read_split
from datamodules.dtd import DTD
from datamodules.eurosat import EuroSAT
from datamodules.flowers102 import Flowers102
from datamodules.food101 import Food101
from datamodules.oxford_pets import OxfordPets
from datamodules.stanford_cars import StanfordCars
from datamodules.ucf101 import UCF101

pytestmark = pytest.mark.filterwarnings("ignore:.*results compare with no published number")

SOURCES: dict[type[CoOpSource], int] = {
    Caltech101: 100,
    OxfordPets: 37,
    Flowers102: 102,
    DTD: 47,
    EuroSAT: 10,
    StanfordCars: 196,
    UCF101: 101,
    Food101: 101,
}
ALL = list(SOURCES)
EUROSAT_FOLDERS = (
    "AnnualCrop",
    "Forest",
    "HerbaceousVegetation",
    "Highway",
    "Industrial",
    "Pasture",
    "PermanentCrop",
    "Residential",
    "River",
    "SeaLake",
)
PER_CLASS = 4


def write(path: Path, label: int, number: int, blue: int = 0) -> None:
    """A 5 x 3 image whose red is the class and whose green is the number; PNG inside whatever the name is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (5, 3), (label, number, blue)).save(path, format="PNG")


def camel(name: str) -> str:
    return name.replace(" ", "")


def files_of(source: type[CoOpSource]) -> list[tuple[str, int, int, bool]]:
    """(path below the folder of images, label, number, official test) in the layout of the official release."""
    rows = []
    at = 0
    for label, name in enumerate(source.class_names):
        for number in range(PER_CLASS):
            at += 1
            test = number == 0
            if source is OxfordPets:
                file = f"{name.replace(' ', '_')}_{number}.jpg"
            elif source is Flowers102:
                file = f"image_{at:05d}.jpg"
            elif source is StanfordCars:
                file = f"{'cars_test' if test else 'cars_train'}/{at:05d}.jpg"
            elif source is UCF101:
                file = f"{name.replace(' ', '_')}/v_{camel(name)}_g{number:02d}_c01.jpg"
            elif source is EuroSAT:
                file = f"{EUROSAT_FOLDERS[label]}/{number}.jpg"
            else:
                folder = name.replace(" ", "_")
                if source is Caltech101:
                    folder = {
                        "face": "Faces",
                        "leopard": "Leopards",
                        "motorbike": "Motorbikes",
                        "airplane": "airplanes",
                    }.get(folder, folder)
                file = f"{folder}/image_{number:04d}.jpg"
            rows.append((file, label, number, test))
    return rows


def write_lists(source: type[CoOpSource], at: Path) -> None:
    """The official lists, without which the layouts of four data sets do not give labels."""
    rows = files_of(source)
    if source is OxfordPets:
        (at / "annotations").mkdir()
        for side in (True, False):
            lines = [f"{file[:-4]} {label + 1} 1 1" for file, label, _, test in rows if test is side]
            (at / "annotations" / ("test.txt" if side else "trainval.txt")).write_text("#comment\n" + "\n".join(lines))
    elif source is Flowers102:
        savemat(at / "imagelabels.mat", {"labels": np.array([[label + 1 for _, label, _, _ in rows]], dtype=np.uint8)})
    elif source is StanfordCars:
        (at / "devkit").mkdir()
        for side, name in ((False, "devkit/cars_train_annos.mat"), (True, "cars_test_annos_withlabels.mat")):
            kind = np.dtype([("bbox_x1", object), ("class", object), ("fname", object)])
            mine = [(1, label + 1, file.split("/")[1]) for file, label, _, test in rows if test is side]
            savemat(at / name, {"annotations": np.array([mine], dtype=kind)})
    elif source is UCF101:
        (at / "ucfTrainTestlist").mkdir()
        for side in (True, False):
            lines = []
            for file, label, _, test in rows:
                if test is side:
                    video = f"{camel(source.class_names[label])}/{Path(file).stem}.avi"
                    lines.append(video if side else f"{video} {label + 1}")
            (at / "ucfTrainTestlist" / f"{'test' if side else 'train'}list01.txt").write_text("\n".join(lines) + "\n")


def write_split(source: type[CoOpSource], path: Path) -> None:
    """A split file: of each class image 0 tests, image 1 validates, the others train."""
    split: dict[str, list[list[object]]] = {"train": [], "val": [], "test": []}
    for file, label, number, _ in reversed(files_of(source)):
        side = {0: "test", 1: "val"}.get(number, "train")
        split[side].append([file, label, source.class_names[label].replace(" ", "_")])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(split))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All eight data sets: four images a class, with official lists, without split files."""
    root = tmp_path_factory.mktemp("data")
    for source in ALL:
        at = root / source.folders[0]
        for file, label, number, _ in files_of(source):
            write(at / source.images / file, label, number)
        write_lists(source, at)
    for name in ("BACKGROUND_Google", "Faces_easy"):
        write(root / "caltech-101/101_ObjectCategories" / name / "image_0001.jpg", 255, 255)
    return root


@pytest.fixture(scope="module")
def split_root(root: Path) -> Path:
    """The same with split files, half of them beside the data and half in ``coop_splits``."""
    for number, source in enumerate(ALL):
        folder = root / (source.folders[0] if number % 2 else "coop_splits")
        write_split(source, folder / f"split_zhou_{source.split_name}.json")
    return root


@pytest.mark.parametrize("source", ALL)
def test_names_are_fixed_and_fit_for_prompts(source):
    names = source.class_names
    assert len(names) == len(set(names)) == SOURCES[source]
    assert not [name for name in names if "_" in name or name != name.strip()]
    assert source.template.count("{}") == 1
    assert source.domain_names == ("",)


def test_names_and_templates_that_papers_use():
    assert Caltech101.class_names[:5] == ("face", "leopard", "motorbike", "accordion", "airplane")
    assert OxfordPets.class_names[1] == "american bulldog"
    assert Flowers102.class_names[76] == "passion flower"
    assert EuroSAT.class_names[-1] == "Sea or Lake"
    assert StanfordCars.class_names[13] == "2012 Audi TTS Coupe"
    assert UCF101.class_names[36] == "Handstand Pushups"
    assert Food101.class_names[16:18] == ("cheese plate", "cheesecake")
    assert Caltech101.template == StanfordCars.template == "a photo of a {}."
    assert DTD.template.format(DTD.class_names[0]) == "banded texture."


@pytest.mark.parametrize("source", ALL)
def test_coops_split_is_read(source, split_root):
    pool = source(str(split_root), size=2).load()
    classes = SOURCES[source]
    assert pool.images.shape == (3 * classes, 3, 2, 2)
    np.testing.assert_array_equal(pool.images[:, 0, 0, 0], pool.labels)
    assert pool.labels.tolist() == sorted(pool.labels.tolist())
    assert set(pool.images[pool.test, 1, 0, 0].tolist()) == {0}
    assert set(pool.images[~pool.test, 1, 0, 0].tolist()) == {2, 3}
    assert np.bincount(pool.labels[pool.test]).tolist() == [1] * classes
    assert not pool.domains.any()


@pytest.mark.parametrize("source", ALL)
def test_seeded_split_of_the_same_proportions(source, root):
    pool = source(str(root), split="seeded", size=2).load()
    classes = SOURCES[source]
    np.testing.assert_array_equal(pool.images[:, 0, 0, 0], pool.labels)
    if source in (OxfordPets, StanfordCars, UCF101):  # official test images: one a class; round(0.6) of three validate
        assert set(pool.images[pool.test, 1, 0, 0].tolist()) == {0}
        assert np.bincount(pool.labels[pool.test]).tolist() == [1] * classes
        assert np.bincount(pool.labels[~pool.test]).tolist() == [2] * classes
    else:  # of four images two train, round(0.8) validates, one tests
        assert np.bincount(pool.labels[pool.test]).tolist() == [1] * classes
        assert np.bincount(pool.labels[~pool.test]).tolist() == [2] * classes
        assert len(set(pool.images[pool.test, 1, 0, 0].tolist())) == 4
    again = source(str(root), split="seeded", size=2).load()
    np.testing.assert_array_equal(pool.images, again.images)
    other = source(str(root), split="seeded", split_seed=1, size=2).load()
    assert not np.array_equal(pool.images[:, 1], other.images[:, 1])


def test_the_way_of_splitting_shows_in_the_test_flags(split_root):
    flags = [
        EuroSAT(str(split_root), split=split, split_seed=seed, size=2).load().test.tolist()
        for split, seed in (("coop", 0), ("seeded", 0), ("seeded", 1))
    ]
    assert len({tuple(flag) for flag in flags}) == 3


def test_official_class_sizes_give_coops_sizes():
    # Caltech-101's faces and Oxford Pets' Abyssinians: 435 and 198 images in CoOp's files.
    labels = np.repeat([0, 1], [435, 9])
    sides = draw_sides(labels, None, np.random.default_rng(0))
    assert [np.count_nonzero(sides[:435] == side) for side in (TRAIN, VAL, TEST)] == [218, 87, 130]
    official = np.arange(198) >= 100
    sides = draw_sides(np.zeros(198, dtype=np.int64), official, np.random.default_rng(0))
    assert [np.count_nonzero(sides == side) for side in (TRAIN, VAL, TEST)] == [80, 20, 98]
    assert (sides[official] == TEST).all()


def test_torchvisions_folders_are_read_too(root, tmp_path):
    (tmp_path / "caltech101").symlink_to(root / "caltech-101")
    (tmp_path / "dtd").mkdir()
    (tmp_path / "dtd/dtd").symlink_to(root / "dtd")
    (tmp_path / "oxford-iiit-pet").symlink_to(root / "oxford_pets")
    (tmp_path / "flowers-102").symlink_to(root / "oxford_flowers")
    for source in (Caltech101, DTD, OxfordPets, Flowers102):
        pool = source(str(tmp_path), split="seeded", size=2).load()
        assert len(pool.labels) == 3 * SOURCES[source]


def test_images_are_cropped_as_clip_tests(tmp_path):
    stripes = np.zeros((4, 12, 3), dtype=np.uint8)
    stripes[:, 4:8] = 200  # the centre square
    for label, folder in enumerate(EUROSAT_FOLDERS):
        for number in range(3):
            path = tmp_path / "eurosat/2750" / folder / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            stripes[0, 0] = label, number, 0
            Image.fromarray(stripes).save(path)
    pool = EuroSAT(str(tmp_path), split="seeded", size=4).load()
    assert (pool.images == 200).all()


def test_copies_of_test_images_do_not_train(tmp_path):
    for file, label, number, _ in files_of(EuroSAT):
        write(tmp_path / "eurosat/2750" / file, label, number)
    write(tmp_path / "eurosat/2750/Forest/2.jpg", 1, 0)  # what Forest/0.jpg shows
    write_split(EuroSAT, tmp_path / "eurosat/split_zhou_EuroSAT.json")
    pool = EuroSAT(str(tmp_path), size=2).load()
    assert len(pool.labels) == 29
    assert np.bincount(pool.labels[~pool.test]).tolist() == [2, 1] + [2] * 8
    assert np.bincount(pool.labels[pool.test]).tolist() == [1] * 10
    assert len(pool.group.unique()) == 29


def test_other_sizes_than_coops_are_said(root):
    with pytest.warns(
        UserWarning, match=r"EuroSAT has 13500 train and 8100 test images in CoOp's split, .* has 20 and 10"
    ):
        EuroSAT(str(root), split="seeded", size=2).load()


@pytest.mark.parametrize("source", ALL)
def test_missing_data_say_what_to_do(source, tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        source(str(tmp_path)).load()
    message = str(caught.value)
    assert "\n" not in message
    assert f"{source.title} is not in {tmp_path}: download it from " in message
    assert "http" in message
    assert f"and put it there as {source.folders[0]}/{source.layout}" in message
    assert "give that as data.source.init_args.root" in message
    assert message.endswith("with data.source.init_args.download=true") is issubclass(source, DownloadableCoOpSource)


@pytest.mark.parametrize("source", [source for source in ALL if issubclass(source, DownloadableCoOpSource)])
def test_torchvision_downloads(source, root, tmp_path, monkeypatch):
    from torchvision import datasets

    name = {OxfordPets: "OxfordIIITPet"}.get(source, source.__name__)
    given = []

    def offline(at, download):
        given.append((at, download))
        raise OSError("no network")

    monkeypatch.setattr(datasets, name, offline)
    with pytest.raises(ConfigurationError, match=f"{source.title} is not in .*; downloading it failed: no network"):
        source(str(tmp_path), split="seeded", size=2, download=True).load()

    def online(at, download):
        (Path(at) / source.folders[-1]).parent.mkdir(exist_ok=True)
        (Path(at) / source.folders[-1]).symlink_to(root / source.folders[0])

    monkeypatch.setattr(datasets, name, online)
    loaded = source(str(tmp_path), split="seeded", size=2, download=True)
    assert len(loaded.load().labels) == 3 * SOURCES[source]
    monkeypatch.setattr(datasets, name, offline)
    loaded.load()  # it is there: no download
    assert given == [(tmp_path, True)]


def test_no_split_file(tmp_path):
    for file, label, number, _ in files_of(EuroSAT):
        write(tmp_path / "eurosat/2750" / file, label, number)
    with pytest.raises(
        ConfigurationError,
        match=r"EuroSAT has no split file: put split_zhou_EuroSAT\.json from https\S+ .* at .*eurosat/split\S+ or "
        r".*coop_splits/split\S+, or set split to seeded",
    ):
        EuroSAT(str(tmp_path)).load()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "is not a split file: it is not JSON"),
        ("[" * 100_000, "is not a split file: it is not JSON"),
        ("[]", "expected a JSON object of lists train, val, test"),
        ('{"train": [], "val": []}', "expected a JSON object of lists train, val, test"),
        ('{"train": [["a.jpg", "0", "cat"]], "val": [], "test": []}', "a row of 'train' is not .*'0'"),
        ('{"train": [["a.jpg", 0]], "val": [], "test": []}', "a row of 'train' is not"),
        ('{"train": [], "val": [["a.jpg", 2, "cat"]], "test": []}', "a.jpg has label 2, expected 0 to 1"),
        ('{"train": [], "val": [["a.jpg", -1, "cat"]], "test": []}', "a.jpg has label -1, expected 0 to 1"),
        ('{"train": [["a.jpg", 0, "ice_dog"]], "val": [], "test": []}', "class 0 is called 'ice_dog', expected 'cat'"),
        (
            '{"train": [["a.jpg", 0, "cat"]], "val": [], "test": [["b", 0, "cat"], ["a.jpg", 0, "cat"]]}',
            "lists a.jpg more than once",
        ),
        ('{"train": [], "val": [], "test": []}', r"split.json lists no image under 'train'; get the split file"),
        ('{"train": [["a.jpg", 0, "cat"]], "val": [], "test": []}', r"split.json lists no image under 'test'; get"),
    ],
)
def test_damaged_split_files(tmp_path, content, message):
    (tmp_path / "split.json").write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        read_split(tmp_path / "split.json", ("cat", "ice bear"))


def test_a_split_file_by_hand(tmp_path):
    (tmp_path / "split.json").write_text(
        json.dumps(
            {
                "train": [["b/2.jpg", 1, "ice_bear"], ["c/1.jpg", 0, "cat"]],
                "val": [["b/3.jpg", 1, "ice_bear"]],
                "test": [["c/4.jpg", 0, "cat"]],
            }
        )
    )
    listing = read_split(tmp_path / "split.json", ("cat", "ice bear"))
    assert listing.files == ["b/2.jpg", "c/1.jpg", "b/3.jpg", "c/4.jpg"]
    assert listing.labels.tolist() == [1, 0, 1, 0]
    assert listing.sides.tolist() == [TRAIN, TRAIN, VAL, TEST]
    with pytest.raises(ConfigurationError, match=r"cannot read the split file .*none\.json: No such file"):
        read_split(tmp_path / "none.json", ("cat",))


def test_a_split_file_cannot_lead_elsewhere(tmp_path):
    for file, label, number, _ in files_of(EuroSAT):
        write(tmp_path / "eurosat/2750" / file, label, number)
    write(tmp_path / "private.jpg", 0, 0)
    path = tmp_path / "eurosat/split_zhou_EuroSAT.json"
    for bad, message in (
        ("../../private.jpg", "leads outside of the data set's folder"),
        (str(tmp_path / "private.jpg"), "leads outside of the data set's folder"),
        ("Forest/gone.jpg", r"cannot read the image .*Forest/gone\.jpg: No such file"),
    ):
        write_split(EuroSAT, path)
        split = json.loads(path.read_text())
        split["train"][0][0] = bad
        path.write_text(json.dumps(split))
        with pytest.raises(ConfigurationError, match=message):
            EuroSAT(str(tmp_path), size=2).load()


def bare(source: type[CoOpSource], root: Path) -> CoOpSource:
    """Only the folder of the images, empty."""
    (root / source.folders[0] / source.images).mkdir(parents=True, exist_ok=True)
    return source(str(root), split="seeded", size=2)


def test_official_lists_are_checked(tmp_path):
    at = tmp_path / "oxford_pets"
    pets = bare(OxfordPets, tmp_path)
    with pytest.raises(ConfigurationError, match=r"cannot read the list .*trainval\.txt"):
        pets.load()
    (at / "annotations").mkdir()
    for content, message in (
        ("# nothing\n", r"the list .*trainval\.txt is empty"),
        ("Bengal_1 cat 1 1\n", "must have lines of image, class number, species and breed"),
        ("Bengal_1\n", "must have lines of image, class number, species and breed"),
        ("Bengal_1 38 1 1\n", "must number its images' classes from 1 to 37"),
        ("Bengal_1 0 1 1\n", "must number its images' classes from 1 to 37"),
    ):
        (at / "annotations/trainval.txt").write_text(content)
        with pytest.raises(ConfigurationError, match=message):
            pets.load()

    ucf = bare(UCF101, tmp_path)
    (tmp_path / "ucf101/ucfTrainTestlist").mkdir()
    (tmp_path / "ucf101/ucfTrainTestlist/trainlist01.txt").write_text("Sleeping/v_Sleeping_g01_c01.avi 1\n")
    with pytest.raises(ConfigurationError, match=r"must have lines of <class>/<video>\.avi, got 'Sleeping/"):
        ucf.load()

    flowers = bare(Flowers102, tmp_path)
    labels = tmp_path / "oxford_flowers/imagelabels.mat"
    with pytest.raises(ConfigurationError, match=r"cannot read 'labels' from .*imagelabels\.mat \(FileNotFound"):
        flowers.load()
    labels.write_bytes(b"no MATLAB file" * 20)
    with pytest.raises(ConfigurationError, match=r"cannot read 'labels' from .*imagelabels\.mat .*download it again"):
        flowers.load()
    savemat(labels, {"other": [1]})
    with pytest.raises(ConfigurationError, match=r"cannot read 'labels' from .*KeyError"):
        flowers.load()
    savemat(labels, {"labels": [1, 103]})
    with pytest.raises(ConfigurationError, match="must number its images' classes from 1 to 102"):
        flowers.load()

    cars = bare(StanfordCars, tmp_path)
    (tmp_path / "stanford_cars/devkit").mkdir()
    savemat(tmp_path / "stanford_cars/devkit/cars_train_annos.mat", {"annotations": [1, 2]})
    with pytest.raises(ConfigurationError, match="must hold annotations with fields fname and class"):
        cars.load()


def test_class_folders_are_checked(tmp_path):
    for file, label, number, _ in files_of(EuroSAT):
        write(tmp_path / "eurosat/2750" / file, label, number)
    write(tmp_path / "eurosat/2750/Desert/1.jpg", 0, 0)
    with pytest.raises(ConfigurationError, match="one folder for each of 10 classes; missing: none; unknown: Desert"):
        EuroSAT(str(tmp_path), split="seeded").load()


def test_size_must_be_positive():
    with pytest.raises(ConfigurationError, match="DTD: size: expected a whole number from 1 to 10,000, got 0"):
        DTD(size=0)
    assert EuroSAT().size == 64
    assert DTD().size == 224


@pytest.mark.parametrize("source", ALL)
def test_coops_own_split_files(source):
    folder = Path(os.environ.get("COOP_SPLITS", Path(__file__).parents[2] / "data" / "coop_splits"))
    path = folder / f"split_zhou_{source.split_name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    listing = read_split(path, source.class_names)
    assert tuple(np.count_nonzero(listing.sides == side) for side in (TRAIN, TEST)) == source.sizes
    assert set(listing.labels.tolist()) == set(range(SOURCES[source]))
    # A seeded split has CoOp's numbers in every class.
    official = listing.sides == TEST if source in (OxfordPets, StanfordCars, UCF101) else None
    drawn = draw_sides(listing.labels, official, np.random.default_rng(0))
    for side in (TRAIN, VAL, TEST):
        assert Counter(listing.labels[listing.sides == side].tolist()) == Counter(
            listing.labels[drawn == side].tolist()
        )
    # A class's files are where the source looks for them.
    if source not in (OxfordPets, Flowers102, StanfordCars):
        for file, label in zip(listing.files, listing.labels, strict=True):
            assert Path(file).parent.as_posix() == source().class_folder(source.class_names[label])
