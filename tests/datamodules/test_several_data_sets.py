"""Several data sets in one: FedTPG's clients of nine, what testers hold, and what is refused."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmark.errors import ConfigurationError
from benchmark.records.classes import name_of
from benchmark.run.data_folder import moved
from benchmark.seeds import numpy_generator
from datamodules import (
    DTD,
    ClassesOfDataSets,
    DigitDomains,
    FromManifest,
    Letters,
    MedMNIST,
    OxfordPets,
    SeveralDataSets,
    write_manifest,
)
from datamodules.federated import FederatedDataModule
from datamodules.manifest import make_manifest
from datamodules.source import ImagePool, ImageSource

#: FedTPG's data sets: classes, clients, and classes of the last client ("cross_cls", 20 classes a client).
CROSS_CLS = {
    "Caltech101": (100, 2, 30),
    "Flowers102": (102, 3, 11),
    "FGVCAircraft": (100, 2, 30),
    "UCF101": (101, 3, 11),
    "OxfordPets": (37, 1, 19),
    "Food101": (101, 3, 11),
    "DTD": (47, 1, 24),
    "StanfordCars": (196, 5, 18),
    "SUN397": (397, 10, 19),
}


class Plain(ImageSource):
    """A data set of so many classes, three training images and two test images of each, a pixel each."""

    def __init__(self, name: str, classes: int, size: int = 1, prefix: str = "kind") -> None:
        self.name, self.size = name, size
        self.class_names = tuple(f"{prefix} {c}" for c in range(classes))
        self.template = f"a photo of a {{}}, of {name}."

    def load(self) -> ImagePool:
        labels = torch.arange(len(self.class_names)).repeat_interleave(5)
        own = zlib.crc32(str(self.name).encode())  # no two data sets have an image in common
        images = labels.to(torch.uint8).view(-1, 1, 1, 1).repeat(1, 3, self.size, self.size)
        images[:, 1], images[:, 2] = own % 256, own // 256 % 256
        test, group = torch.arange(len(labels)) % 5 > 2, torch.arange(len(labels)) + 100
        return ImagePool(images, labels, test, torch.zeros_like(labels), group)


def nine() -> SeveralDataSets:
    return SeveralDataSets([Plain(name, classes) for name, (classes, _, _) in CROSS_CLS.items()])


def test_clients_are_those_of_fedtpgs_nine_data_sets() -> None:
    partition, source = ClassesOfDataSets(shots=2), nine()
    pool = source.load()
    splits = partition.split(pool, numpy_generator(0, "partition"))
    names = partition.client_names(source)
    assert (len(names), splits.testers, partition.testers(source)) == (39, 9, 9)
    spaces: Any = splits.label_spaces["train"]
    at = 0
    for number, (name, (classes, clients, last)) in enumerate(CROSS_CLS.items()):
        own = spaces[at : at + clients]
        assert [len(of) for of in own] == [20] * (clients - 1) + [last]
        first = source.data_sets[name][0]
        base = [label for of in own for label in of]
        assert base == list(range(first, first + (classes + 1) // 2))  # consecutive, the first half rounded up
        called = [f"{name} {k}" for k in range(clients)] if clients > 1 else [name]
        assert names[at : at + clients] == called
        tester = 30 + number
        assert names[tester] == f"{name} (whole)"
        for split, expected in (("base", base), ("novel", [*source.data_sets[name][(classes + 1) // 2 :]])):
            assert list(splits.label_spaces[split][tester]) == expected
            assert sorted(set(pool.labels[splits.others[split][tester]].tolist())) == expected
            assert len(splits.others[split][tester]) == 2 * len(expected)
        at += clients
    for client in range(30):
        held = pool.labels[splits.train[client]].bincount(minlength=len(source.class_names))
        assert held[list(spaces[client])].tolist() == [2] * len(spaces[client])
        assert len(splits.test[client]) == 2 * len(spaces[client])


def test_data_sets_that_nobody_trains_on_have_a_tester_each() -> None:
    """FedTPG's "cross_data": five classes a client, and other data sets are tested on."""
    source = SeveralDataSets([Plain("ImageNet", 1000), Plain("DTD", 47), Plain("EuroSAT", 10)])
    partition = ClassesOfDataSets(5, shots=1, novel=False, unseen=2)
    splits = partition.split(source.load(), numpy_generator(0, "partition"))
    assert partition.client_names(source)[199:] == ["ImageNet 199", "DTD (whole)", "EuroSAT (whole)"]
    assert (partition.further_splits, splits.testers) == (("unseen",), 2)
    assert [len(of) for of in splits.label_spaces["unseen"][-2:]] == [47, 10]
    assert {len(of) for of in splits.label_spaces["train"][:200]} == {5}


def test_images_labels_and_groups_are_those_of_each_data_set() -> None:
    source = SeveralDataSets([DigitDomains(), Letters()])
    pool, digits, letters = source.load(), DigitDomains().load(), Letters().load()
    count = len(digits.labels)
    assert torch.equal(pool.images[:count], digits.images)
    assert torch.equal(pool.images[count:], letters.images)
    assert torch.equal(pool.labels[count:], letters.labels + 10)
    assert torch.equal(pool.test, torch.cat([digits.test, letters.test]))
    assert set(pool.group[:count].tolist()).isdisjoint(pool.group[count:].tolist())
    assert pool.domains.bincount().tolist() == [count, len(letters.labels)]
    assert source.class_names == (*DigitDomains.class_names, *Letters.class_names)
    assert (source.recorded_name, source.embedded) == ("DigitDomains+Letters", True)
    nested = {
        "class_path": "datamodules.SeveralDataSets",
        "init_args": {"sources": [{"class_path": "datamodules.digits.DigitDomains"}, "datamodules.Letters"]},
    }
    assert name_of(nested) == source.recorded_name
    assert source.class_templates[9:11] == [DigitDomains.template, Letters.template]


def test_a_manifest_gives_label_spaces_and_testers_back(tmp_path: Path) -> None:
    source, partition = nine(), ClassesOfDataSets(shots=1)
    pool = source.load()
    splits = partition.split(pool, numpy_generator(0, "partition"))
    write_manifest(tmp_path / "split.json", make_manifest(partition, pool, splits, source, 0))
    read = FromManifest(str(tmp_path / "split.json"))
    again = read.split(pool, numpy_generator(1, "partition"))
    assert (again.label_spaces, again.testers, read.testers(source)) == (splits.label_spaces, 9, 9)
    assert all(np.array_equal(a, b) for a, b in zip(again.others["base"], splits.others["base"], strict=True))


def test_two_data_sets_may_share_a_name_and_have_templates_of_their_own() -> None:
    source = SeveralDataSets([Plain("Pets", 4), Plain("Birds", 4)])
    assert source.class_names[0] == source.class_names[4]
    data = FederatedDataModule(source, ClassesOfDataSets(2, shots=1))
    data.setup()
    assert data.class_templates[3:5] == ["a photo of a {}, of Pets.", "a photo of a {}, of Birds."]


def test_one_folder_of_all_data_sets_is_enough() -> None:
    source = SeveralDataSets([OxfordPets(root="here"), DTD(), Letters()], root="elsewhere")
    assert [each.root.name for each in source.sources[:2]] == ["elsewhere", "elsewhere"]  # type: ignore[attr-defined]
    nested = [{"class_path": "datamodules.OxfordPets", "init_args": {"root": "data"}}, "datamodules.Letters"]
    given = {"class_path": "datamodules.SeveralDataSets", "init_args": {"sources": nested, "root": None}}
    config = {"data": {"source": given}, "model": {"init_args": {}}}
    assert moved(config, "/images") == {"data.source.init_args.root": "/images"}
    assert (
        moved({**config, "data": {"source": {**given, "init_args": {"sources": ["datamodules.Letters"]}}}}, "/images")
        == {}
    )


class Shared(ImageSource):
    """A data set of two classes, five images of each, the last of which is tested; some are another data set's."""

    domain_names, image_columns = ("",), ("place",)

    def __init__(self, name: str, values: list[int]) -> None:
        self.name, self.values = name, values
        self.class_names = (f"{name} a", f"{name} b")

    def load(self) -> ImagePool:
        labels = torch.arange(2).repeat_interleave(5)
        images = torch.tensor(self.values, dtype=torch.uint8).view(-1, 1, 1, 1).repeat(1, 3, 2, 2)
        images[:, :, 1] = 7  # all of one middle row
        return ImagePool(images, labels, torch.arange(10) % 5 == 4, torch.zeros_like(labels), torch.arange(10))

    def image_column(self, name: str) -> list[str]:
        return [f"{self.name} {row}" for row in range(10)]


def test_no_image_trains_in_one_data_set_and_is_tested_in_another() -> None:
    first = Shared("One", list(range(10)))
    # Row 0 is a test image of One, row 1 trains in both, row 9 trains in One, and the others are another's.
    second = Shared("Two", [4, 6, *range(20, 27), 2])
    source = SeveralDataSets([first, second])
    with pytest.warns(UserWarning, match=r"^One\+Two: 2 training images are copies of test images of another data set"):
        pool = source.load()
    gone = {"One 2", "Two 0"}
    assert source.image_column("place") == [
        place for each in (first, second) for place in each.image_column("place") if place not in gone
    ]
    assert len(pool.labels) == 18
    trained, tested = (set(pool.images[side, 0, 0, 0].tolist()) for side in (~pool.test, pool.test))
    assert trained.isdisjoint(tested)
    values = pool.images[:, 0, 0, 0]
    assert len(pool.group[values == 6].unique()) == 1
    assert len(pool.group.unique()) == 17


def test_a_class_without_an_image_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="all training images of Two a have the pixels of a test image of"):
        SeveralDataSets([Shared("One", list(range(10))), Shared("Two", [4, 4, 9, 9, *range(20, 26)])]).load()


@pytest.mark.filterwarnings("error")
def test_copies_within_one_data_set_are_that_data_sets_own_matter() -> None:
    source = SeveralDataSets([Shared("One", [1] * 10), Shared("Two", [2] * 10)])
    assert source.load().group.tolist() == list(range(20))
    assert len(source.image_column("place")) == 20


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SeveralDataSets([DigitDomains()]), "sources has 1 data sets; give two or more"),
        (
            lambda: SeveralDataSets([Letters(), MedMNIST()], root="x"),
            "root does not reach MedMNIST, which looks into its",
        ),
        (lambda: SeveralDataSets([Letters(), Letters()]), "sources has Letters twice"),
        (
            lambda: SeveralDataSets([Plain("A", 2), Plain("B", 2, size=2)]).load(),
            r"A stores images of \(1, 1\) pixels and B of \(2, 2\)",
        ),
        (lambda: ClassesOfDataSets().client_names(Letters()), "divides several data sets, got Letters"),
        (lambda: ClassesOfDataSets(unseen=9).client_names(nine()), "unseen=9 leaves none of the 9 data sets"),
    ],
)
def test_what_makes_no_federation_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()
