"""ImageNet's variants, on small images in the layouts in which they are published, and a model scored on them."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning import seed_everything
from PIL import Image

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.checks.outcome import FailedCheck
from benchmark.checks.sources import SourceUnderCheck, check_images, check_sides
from benchmark.errors import ConfigurationError
from benchmark.run.command import resolved
from benchmark.run.fit import fit
from datamodules import (
    ClassesOfDataSets,
    DigitDomains,
    DirichletMerged,
    ImageNet,
    ImageNetA,
    ImageNetR,
    ImageNetSketch,
    ImageNetV2,
    ImagePool,
    ImageSource,
    OODStream,
    SeveralDataSets,
)
from datamodules.federated import FederatedDataModule
from datamodules.imagenet_variants import ImageNetVariant
from methods import ZeroShotCLIP

pytestmark = pytest.mark.filterwarnings("ignore:.*results compare with no published number")

#: In another order than the ids', and with a name twice.
NAMES = {"n04008634": "missile", "n01440764": "tench", "n03773504": "missile", "n02123045": "tabby cat"}
IDS = sorted(NAMES)
EVERY = (ImageNetV2, ImageNetSketch, ImageNetA, ImageNetR)
PLACES = [(kind, place) for kind in EVERY for place in kind.places]


def write(path: Path, *colour: int, side: int = 3) -> None:
    """An image of one colour, wider than high; PNG inside whatever the name is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side + 2, side), colour).save(path, format="PNG")


def name_classes(root: Path, at: str = "imagenet") -> None:
    (root / at).mkdir(parents=True, exist_ok=True)
    (root / at / "classnames.txt").write_text("".join(f"{wnid} {name}\n" for wnid, name in NAMES.items()))


def write_variant(kind: type[ImageNetVariant], root: Path, place: str = "", only: Sequence[int] = range(4)) -> Path:
    """Two images of each class; red is its place among the ids, green the image's number. Returns their folder."""
    at = root / (place or kind.places[0])
    for label in only:
        for number in range(2):
            folder = str(label) if kind is ImageNetV2 else IDS[label]
            write(at / folder / f"{number}.JPEG", 10 * label, number, 0)
    (at / "README.txt").write_text("as A and R have one")
    return at


@pytest.mark.parametrize(("kind", "place"), PLACES, ids=lambda value: getattr(value, "__name__", value))
def test_all_images_test_and_have_imagenets_names(kind: type[ImageNetVariant], place: str, tmp_path: Path) -> None:
    name_classes(tmp_path)
    write_variant(kind, tmp_path, place)
    source = kind(str(tmp_path), size=2)
    assert source.class_names == ("tench", "tabby cat", "missile", "missile (n04008634)")
    pool = source.load()
    assert pool.images.shape == (8, 3, 2, 2)
    assert pool.test.all()
    np.testing.assert_array_equal(10 * pool.labels, pool.images[:, 0, 0, 0])
    assert pool.images[:, 1, 0, 0].tolist() == [0, 1] * 4
    assert len(pool.group.unique()) == 8


def test_the_releases_have_so_many_classes_and_images() -> None:
    sizes = {kind.__name__: kind.sizes for kind in EVERY}
    assert sizes == {
        "ImageNetV2": (1000, 10_000),
        "ImageNetSketch": (1000, 50_889),
        "ImageNetA": (200, 7_500),
        "ImageNetR": (200, 30_000),
    }


def test_other_numbers_of_images_are_told(tmp_path: Path) -> None:
    name_classes(tmp_path)
    write_variant(ImageNetR, tmp_path)
    with pytest.warns(UserWarning, match="ImageNet-R has 200 classes and 30000 images, .* has 4 and 8: results"):
        ImageNetR(str(tmp_path), size=2).load()


def test_v2s_folders_are_numbers_and_not_texts(tmp_path: Path) -> None:
    """Sorted as texts, as torchvision's ImageFolder does, folder 10 would be class 2."""
    names = [f"n{number:08} class {number}" for number in range(12)]
    (tmp_path / "imagenet").mkdir()
    (tmp_path / "imagenet/classnames.txt").write_text("\n".join(names))
    for number in range(12):
        write(tmp_path / ImageNetV2.places[0] / str(number) / "a.jpeg", number, 0, 0)
    source = ImageNetV2(str(tmp_path), size=2)
    pool = source.load()
    assert source.class_names[10] == "class 10"
    np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 0, 0])
    (tmp_path / ImageNetV2.places[0] / "12").mkdir()
    with pytest.raises(ConfigurationError, match="one folder for each of 12 classes; missing: none; unknown: 12"):
        source.load()


@pytest.mark.parametrize("kind", [ImageNetA, ImageNetR])
def test_a_subset_has_the_classes_that_it_has_folders_of(kind: type[ImageNetVariant], tmp_path: Path) -> None:
    name_classes(tmp_path)
    at = write_variant(kind, tmp_path, only=(1, 3))
    source = kind(str(tmp_path), size=2)
    # The name is the one that ImageNet itself gives the class, though the other missile is not there.
    assert source.class_names == ("tabby cat", "missile (n04008634)")
    pool = source.load()
    assert pool.labels.tolist() == [0, 0, 1, 1]
    assert pool.images[:, 0, 0, 0].tolist() == [10, 10, 30, 30]
    write(at / "n09999999/0.jpg", 0, 0, 0)
    with pytest.raises(ConfigurationError, match=r"imagenet-\w must hold folders .* does not name n09999999; take"):
        kind(str(tmp_path))
    for folder in ("n09999999", IDS[1]):
        shutil.rmtree(at / folder)
    with pytest.raises(ConfigurationError, match=r"must hold a folder for each of 200 classes, it has 1; download"):
        kind(str(tmp_path))


@pytest.mark.parametrize("kind", [ImageNetV2, ImageNetSketch])
def test_a_whole_variant_has_all_classes(kind: type[ImageNetVariant], tmp_path: Path) -> None:
    name_classes(tmp_path)
    write_variant(kind, tmp_path, only=(0, 1, 3))
    missing = "2" if kind is ImageNetV2 else IDS[2]
    with pytest.raises(ConfigurationError, match=f"one folder for each of 4 classes; missing: {missing}; unknown"):
        kind(str(tmp_path)).load()


@pytest.mark.parametrize("kind", EVERY)
def test_what_is_missing_or_damaged_is_said_in_a_line(kind: type[ImageNetVariant], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{kind.title} is not in .*: download it from http.*{kind.places[0]}"):
        kind(str(tmp_path))
    at = write_variant(kind, tmp_path)
    with pytest.raises(ConfigurationError, match=r"has no names of classes: put classnames\.txt from http"):
        kind(str(tmp_path))
    name_classes(tmp_path, str(Path(kind.places[0]).parent))  # CoOp's copy
    source = kind(str(tmp_path), size=2)
    assert source.class_names[0] == "tench"
    damaged = sorted(at.glob("*/*.JPEG"))[0]
    damaged.write_bytes(damaged.read_bytes()[:30])
    with pytest.raises(ConfigurationError, match=str(damaged)):
        source.load()


# --------------------------------------------------------------------------------- in a federation


class OnlyTested(ImageSource):
    """Two classes; says that all images test, and may not keep it."""

    test_only = True
    class_names = ("a", "b")

    def __init__(self, trains: int = 0, labels: int = 2, size: int = 2) -> None:
        self.trains, self.labels, self.size = trains, labels, size

    def load(self) -> ImagePool:
        images, rows = torch.zeros(4, 3, self.size, self.size, dtype=torch.uint8), torch.arange(4)
        return ImagePool(images, rows % self.labels, rows >= self.trains, torch.zeros_like(rows), rows)


def test_a_source_that_says_test_only_keeps_it() -> None:
    for check in (check_sides, check_images):
        check(SourceUnderCheck(OnlyTested, {}))
    with pytest.raises(FailedCheck, match="1 images train, and test_only says that all test"):
        check_sides(SourceUnderCheck(OnlyTested, {"trains": 1}))
    with pytest.raises(FailedCheck, match=r"no test image is of the class \['b'\]"):
        check_images(SourceUnderCheck(OnlyTested, {"labels": 1}))


def test_nobody_trains_on_a_variant() -> None:
    with pytest.raises(ConfigurationError, match=r"OnlyTested has test images alone, .*SeveralDataSets, with .*unseen"):
        FederatedDataModule(OnlyTested(), ClassesOfDataSets())
    for unseen, sources in ((0, [DigitDomains(), OnlyTested()]), (1, [OnlyTested(), DigitDomains()])):
        partition = ClassesOfDataSets(novel=False, unseen=unseen)
        with pytest.raises(ConfigurationError, match=f"OnlyTested has test images alone, and with unseen={unseen}"):
            FederatedDataModule(SeveralDataSets(sources), partition)


def test_a_partition_that_merges_train_and_test_is_refused_beside_a_variant() -> None:
    source = SeveralDataSets([DigitDomains(), OnlyTested(size=32)])
    data = FederatedDataModule(source, DirichletMerged(alpha=100, num_clients=2, min_size=2))
    with pytest.raises(ConfigurationError, match="DirichletMerged has clients train on OnlyTested, which has test"):
        data.setup()
    with pytest.raises(ConfigurationError, match="SeveralDataSets has test images alone"):
        FederatedDataModule(SeveralDataSets([OnlyTested(), Another()]), ClassesOfDataSets())


class Another(OnlyTested):
    """A second one of them."""


def test_a_variant_is_a_stream_of_another_data_sets_images(tmp_path: Path) -> None:
    name_classes(tmp_path)
    write_variant(ImageNetA, tmp_path)
    foreign = OODStream(ImageNetA(str(tmp_path), size=2), images=5).read(DigitDomains().load(), ["test"])
    assert foreign.images.shape == (5, 3, 32, 32)
    assert (foreign.facts["source"], foreign.facts["images"]) == ("ImageNetA", 5)


def test_variants_take_the_place_of_a_suites_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name_classes(tmp_path / "data")
    for kind in EVERY:
        write_variant(kind, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    names = ["--config=methods/fedtpg", "--config=suites/nine_data_sets_clip"]
    names += ["--data=sources/imagenet_and_variants", "--data=partitions/imagenet_to_variants"]
    source = resolved(names)["data"]["source"]
    parser = ArgumentParser()
    parser.add_subclass_arguments(ImageSource, "source")
    several = parser.instantiate_classes(parser.parse_object({"source": source})).source
    whole = [f"{kind.__name__} (whole)" for kind in EVERY]
    assert ClassesOfDataSets(5, novel=False, unseen=4).client_names(several) == ["ImageNet", *whole]


def test_a_model_of_imagenets_classes_is_scored_once_on_each_variant(tmp_path: Path) -> None:
    """Each tester's accuracy is that of open_clip's own towers, over the classes that the variant has."""
    name_classes(tmp_path)
    draws = np.random.default_rng(0)

    def noise(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path, format="PNG")

    for label, wnid in enumerate(IDS):
        for number in range(6):
            for side in ("train", "val"):
                noise(tmp_path / "imagenet/images" / side / wnid / f"{number}.JPEG")
            noise(tmp_path / ImageNetV2.places[0] / str(label) / f"{number}.jpeg")
            if label in (0, 3):
                noise(tmp_path / ImageNetA.places[0] / wnid / f"{number}.jpg")
    root = str(tmp_path)
    sources = [ImageNet(root, size=32), ImageNetV2(root, size=32), ImageNetA(root, size=32)]
    partition = ClassesOfDataSets(classes_per_client=2, shots=2, novel=False, unseen=2)
    seed_everything(0)
    data = FederatedDataModule(SeveralDataSets(sources), partition)
    clip = PromptedCLIP()
    run = fit(ZeroShotCLIP(data.num_clients, data.class_names, clip), data, rounds=1, enable_progress_bar=False)
    assert data.client_names == ["ImageNet 0", "ImageNet 1", "ImageNetV2 (whole)", "ImageNetA (whole)"]
    assert [len(rows) for rows in data.splits.train] == [4, 4, 0, 0]
    scores = run.metrics.query("split == 'unseen' and metric == 'accuracy' and point == 'server' and client >= 0")
    found = scores[scores["round"] == scores["round"].max()].set_index("client")["value"]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (clip.mean, clip.std))
    expected = {}
    for client, source in ((2, sources[1]), (3, sources[2])):
        pool = source.load()
        with torch.no_grad():
            prompts = clip.tokenizer([f"a photo of a {name}." for name in source.class_names])
            texts = clip.model.encode_text(prompts)
            images = clip.model.encode_image((pool.images / 255 - mean) / std)
        closest = (images @ torch.nn.functional.normalize(texts, dim=-1).T).argmax(1)
        expected[client] = float((closest == pool.labels).float().mean())
    assert found.to_dict() == pytest.approx(expected)
