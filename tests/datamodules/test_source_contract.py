"""The contract of sources of images: a new one in ``datamodules.__all__`` needs an entry in ``LAYOUTS``."""

import inspect
import io
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import datamodules
from benchmark.checks.outcome import NotCheckedError
from benchmark.checks.sources import CHECKS, SourceUnderCheck
from benchmark.errors import ConfigurationError
from benchmark.records.classes import name_of
from datamodules.coop_layout import CoOpSource
from datamodules.source import ImageSource
from datamodules.tiny_imagenet import CLASSES

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*results compare with no published number", "ignore:.*(train and|images).*, .* has"
)

SOURCES = [
    kind
    for name in sorted(datamodules.__all__)
    if inspect.isclass(kind := getattr(datamodules, name))
    and issubclass(kind, ImageSource)
    # The first two have no image, the last one those of others.
    and kind not in (ImageSource, datamodules.Sites, datamodules.SeveralDataSets)
]


def arguments_of(kind: type[ImageSource]) -> set[str]:
    """Return the names of a constructor's arguments, with those that it passes on to its bases' constructors."""
    made = (vars(base)["__init__"] for base in kind.__mro__[:-1] if "__init__" in vars(base))
    return {name for constructor in made for name in inspect.signature(constructor).parameters}


#: those that read a folder, and do not come with a package
FROM_FILES = [kind for kind in SOURCES if "root" in arguments_of(kind)]

#: those of them whose images are not in files of their own
PACKED = [datamodules.MedMNIST]

#: names in records that are not the class's
CALLED = {
    "ImageNet": "ImageNet",
    "ImageNetA": "ImageNetA",
    "ImageNetR": "ImageNetR",
    "ImageNetSketch": "ImageNetSketch",
    "ImageNetV2": "ImageNetV2",
    "MedMNIST": "PathMNIST",
}

#: path below the folder of all data sets -> colour of the image there, or the text or the bytes of the file
Files = dict[str, tuple[int, int, int] | str | bytes]


def cifar(kind: Any) -> Files:
    """One folder a side and class."""
    return {
        f"{kind.folder}/{side}/{name}/{number}.png": (label, number, tested)
        for tested, side in enumerate(("train", "test"))
        for label, name in enumerate(kind.class_names)
        for number in range(2)
    }


def tiny_imagenet(kind: Any) -> Files:
    """The same, by WordNet's ids."""
    return {
        f"tiny_imagenet_200/{side}/{wnid}/{tested}.JPEG": (label, 0, tested)
        for tested, side in enumerate(("train", "val"))
        for label, wnid in enumerate(CLASSES)
    }


def domains(folder: str) -> Callable[[Any], Files]:
    """One folder a domain and class; the source draws who tests."""

    def files(kind: Any) -> Files:
        return {
            f"{folder}/{domain}/{name}/{number}.png": (label, at, number)
            for at, domain in enumerate(kind.domain_names)
            for label, name in enumerate(kind.class_names)
            for number in range(5)
        }

    return files


def named_domains(kind: Any) -> Files:
    """The same, with the usual names of the folders."""
    return {
        f"{kind.folders[0]}/{kind.spelled(domain)[0]}/{kind.spelled(name)[0]}/{number}.png": (label, at, number)
        for at, domain in enumerate(kind.domain_names)
        for label, name in enumerate(kind.class_names)
        for number in range(5)
    }


def own_folders(*parts: Sequence[str]) -> Callable[[Any], Files]:
    """Folders inside of each other, the last of them the classes, with five images each."""

    def files(kind: Any) -> Files:
        return {
            f"{'/'.join(place)}/{number}.png": (at, number, 0)
            for at, place in enumerate(product(*parts))
            for number in range(5)
        }

    return files


def own_index(kind: Any) -> Files:
    """Images in one folder, and the file that says what they are; groups of two images."""
    rows = [(label, domain, number) for label in ("cat", "dog") for domain in ("ink", "oil") for number in range(20)]
    lines = [f"all/{at}.png,{label},{domain},{at // 2}" for at, (label, domain, _) in enumerate(rows)]
    images: Files = {f"all/{at}.png": (at, 0, 0) for at in range(len(rows))}
    return images | {"index.csv": "\n".join(["path,label,domain,group", *lines])}


def dermoscopic(kind: Any) -> Files:
    """One folder a site, side and diagnosis."""
    return {
        f"dermoscopic_fl/client{site}/{side}/{name}/ISIC_{at}{part}{label}{number}.png": (label, at, 10 * part + number)
        for at, site in enumerate("ABCD")
        for part, side in enumerate(("train", "valid", "test"))
        for label, name in enumerate(("nv", "bkl", "mel"))
        for number in range(2)
    }


def fed_isic(kind: Any) -> Files:
    """FLamby's list, and images in one folder; the last of three of a center and class tests."""
    rows = list(product(range(6), range(8), range(3)))
    lines = [f"I{c}{label}{n},{label},{c},{'test' if n == 2 else 'train'}" for c, label, n in rows]
    folder = "fed_isic2019/ISIC_2019_Training_Input_preprocessed"
    images: Files = {f"{folder}/I{c}{label}{n}.jpg": (label, c, n) for c, label, n in rows}
    return images | {"fed_isic2019/train_test_split": "\n".join(["image,target,center,fold", *lines])}


def camelyon17(kind: Any) -> Files:
    """The table, and patches of five patients a hospital."""
    at, lines, files = "camelyon17_v1.0", [",patient,node,x_coord,y_coord,tumor,slide,center,split"], Files()
    for hospital, patient, tumor in product(range(5), range(5), range(2)):
        called = f"{20 * hospital + patient:03}"
        lines.append(f"{len(lines) - 1},{called},1,{tumor},7,{tumor},0,{hospital},0")
        file = f"patient_{called}_node_1/patch_patient_{called}_node_1_x_{tumor}_y_7.png"
        files[f"{at}/patches/{file}"] = (tumor, hospital, patient)
    return files | {f"{at}/metadata.csv": "\n".join(lines)}


def coop(kind: Any) -> Files:
    """Images anywhere, and the split file that names them."""
    sides: dict[str, list[Any]] = {"train": [], "val": [], "test": []}
    files: Files = {}
    for label, name in enumerate(kind.class_names):
        for number, side in enumerate(sides):
            sides[side].append([f"{label}/{number}.jpg", label, name])
            files[f"{kind.folders[0]}/{kind.images}/{label}/{number}.jpg"] = (label, number, 0)
    return files | {f"{kind.folders[0]}/split_zhou_{kind.split_name}.json": json.dumps(sides)}


def aircraft(kind: Any) -> Files:
    """Images in one folder, and a list a side."""
    at = kind.folders[0]
    files: Files = {}
    for number, side in enumerate(("train", "val", "test")):
        lines = [f"{number}{label:03} {name}" for label, name in enumerate(kind.class_names)]
        files[f"{at}/images_variant_{side}.txt"] = "\n".join(lines)
        files |= {f"{at}/images/{line.split()[0]}.jpg": (label, number, 0) for label, line in enumerate(lines)}
    return files


def imagenet(kind: Any) -> Files:
    """One folder a side and class, and the names of the classes."""
    images: Files = {
        f"imagenet/images/{side}/n0000000{label}/{side}_{number}.JPEG": (label, at, number)
        for at, side in enumerate(("train", "val"))
        for label in range(2)
        for number in range(2)
    }
    return images | {"imagenet/classnames.txt": "n00000000 cat\nn00000001 dog\n"}


def imagenet_variant(kind: Any) -> Files:
    """One folder a class, by WordNet id or number, and ImageNet's names of the classes."""
    folders = ("0", "1") if kind is datamodules.ImageNetV2 else ("n00000000", "n00000001")
    images: Files = {
        f"{kind.places[0]}/{folder}/{number}.jpg": (label, number, 0)
        for label, folder in enumerate(folders)
        for number in range(2)
    }
    return images | {"imagenet/classnames.txt": "n00000000 cat\nn00000001 dog\n"}


def medmnist(kind: Any) -> Files:
    """One file of arrays."""
    labels = np.arange(2 * 9, dtype=np.uint8)[:, None] % 9
    stream = io.BytesIO()
    sides = {
        f"{side}_images": np.full((18, 28, 28, 3), 10 * at, np.uint8)
        + np.arange(18, dtype=np.uint8)[:, None, None, None]
        for at, side in enumerate(("train", "val", "test"), start=1)
    }
    np.savez(stream, **sides, **{f"{side}_labels": labels for side in ("train", "val", "test")})
    return {"medmnist/pathmnist.npz": stream.getvalue()}


#: Per class, or base class, the files of a small release.
LAYOUTS: dict[str, Callable[[Any], Files]] = {
    "CIFAR10": cifar,
    "CIFAR100": cifar,
    "Camelyon17": camelyon17,
    "CoOpSource": coop,
    "DermoscopicFL": dermoscopic,
    "DigitDomains": lambda kind: {},  # made of what comes with scikit-learn
    "Letters": lambda kind: {},  # drawn with the fonts that come with matplotlib
    "DomainFolders": own_folders(("ink", "oil"), ("cat", "dog")),
    "DomainNet10": domains("domainnet"),
    "DomainSource": named_domains,
    "HuggingFaceImages": own_folders(("train", "test"), ("cat", "dog")),
    "ImageFolders": own_folders(("train", "test"), ("cat", "dog")),
    "ImageIndex": own_index,
    "FGVCAircraft": aircraft,
    "FedISIC2019": fed_isic,
    "ImageNet": imagenet,
    "ImageNetVariant": imagenet_variant,
    "MedMNIST": medmnist,
    "TinyImageNet": tiny_imagenet,
}


def release(kind: type[ImageSource], root: Path) -> ImageSource:
    """The source of a class, on a small release of its data set written below ``root``."""
    found = [LAYOUTS[base.__name__] for base in kind.__mro__ if base.__name__ in LAYOUTS]
    assert found, (
        f"{kind.__name__} is a source of datamodules.__all__ without an entry here: add to LAYOUTS in "
        f"{Path(__file__).name} a function that gives the files of a small release of it, their paths below the folder "
        "of all data sets and a colour of each, two images a class at least"
    )
    side = {"CIFAR10": 32, "CIFAR100": 32, "TinyImageNet": 64}.get(kind.__name__, 4)
    for path, content in found[0](kind).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        content = content.encode() if isinstance(content, str) else content
        (root / path).write_bytes(content if isinstance(content, bytes) else encoded(content, side))
    return kind(**arguments(kind, root))


def arguments(kind: type[ImageSource], root: Path) -> dict[str, Any]:
    """Return the arguments of a source of this class, with data below ``root`` and small images."""
    asked = arguments_of(kind)
    given = {"name": "Pets", "root": str(root), "size": 28 if kind is datamodules.MedMNIST else 4}
    return {name: value for name, value in given.items() if name in asked}


@cache
def encoded(colour: tuple[int, int, int], side: int) -> bytes:
    """A square of one colour; PNG inside whatever a file is called, so that colours are exact."""
    stream = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(stream, format="PNG")
    return stream.getvalue()


@pytest.fixture(scope="module", params=SOURCES, ids=lambda kind: kind.__name__)
def given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SourceUnderCheck:
    """A source on its small release, the same for all tests of the class."""
    root = tmp_path_factory.mktemp(request.param.__name__)
    release(request.param, root)
    return SourceUnderCheck(request.param, arguments(request.param, root))


def test_all_sources_are_found() -> None:
    assert datamodules.DigitDomains in SOURCES
    known = {base.__name__ for kind in SOURCES for base in kind.__mro__}
    assert set(LAYOUTS) <= known, "an entry of LAYOUTS is of no source"
    assert sum(issubclass(kind, CoOpSource) for kind in SOURCES) == 10


@pytest.mark.parametrize("kind", SOURCES, ids=lambda kind: kind.__name__)
def test_names_are_known_before_anything_is_read(kind: type[ImageSource], tmp_path: Path) -> None:
    from_data = not hasattr(kind, "class_names")
    made = release(kind, tmp_path) if from_data else kind(**arguments(kind, tmp_path / "nothing"))
    assert from_data or (made.class_names, made.domain_names) == (kind.class_names, kind.domain_names)
    for names in (made.class_names, made.domain_names):
        assert isinstance(names, tuple)
        assert all(isinstance(name, str) for name in names)
        assert len(set(names)) == len(names) > 0
    assert all(made.class_names)
    assert made.template.count("{}") == 1
    assert made.recorded_name == CALLED.get(kind.__name__, "Pets" if from_data else kind.__name__)
    # Whoever reads a record finds the same name in its configuration.
    told = {"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": arguments(kind, tmp_path)}
    assert name_of(told) == made.recorded_name


@pytest.mark.parametrize("kind", FROM_FILES, ids=lambda kind: kind.__name__)
def test_data_that_are_not_there_are_said_in_one_line(kind: type[ImageSource], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"put|download") as refused:
        kind(**arguments(kind, tmp_path / "nothing")).load()
    assert str(tmp_path / "nothing") in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_source_keeps_what_it_must(check: Callable[[Any], None], given: SourceUnderCheck) -> None:
    in_files = given.kind in FROM_FILES and given.kind not in PACKED
    with nullcontext() if in_files else suppress(NotCheckedError):
        check(given)


def test_every_class_is_trained_on_and_tested_on(given: SourceUnderCheck) -> None:
    source, pool = given.source, given.pool
    assert pool.images.dtype == torch.uint8
    assert pool.domains.unique().tolist() == list(range(len(source.domain_names)))
    assert not source.test_only or bool(pool.test.all())
    for side in (pool.test,) if source.test_only else (~pool.test, pool.test):
        assert pool.labels[side].unique().tolist() == list(range(len(source.class_names)))
