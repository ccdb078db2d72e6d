"""The contract of partitions: a new one in ``datamodules.__all__`` needs an entry in ``ARGUMENTS``."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import datamodules
from benchmark.checks.partitions import CHECKS, PartitionUnderCheck
from datamodules.manifest import FromManifest, make_manifest, write_manifest
from datamodules.partition import Partition
from datamodules.several_data_sets import SeveralDataSets
from datamodules.source import ImagePool, ImageSource

PARTITIONS = [
    kind
    for name in sorted(datamodules.__all__)
    if inspect.isclass(kind := getattr(datamodules, name)) and issubclass(kind, Partition) and kind is not Partition
]
#: Arguments that fit ``pool``: 8 classes in 4 domains, 1,024 images of which a quarter are test images.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AtMostClasses": {"classes": 2, "num_clients": 8},
    "BaseToNovel": {"num_clients": 3, "shots": 5},
    "BaseToNovelDomains": {"shots": 5},
    "ClassesOfDataSets": {"classes_per_client": 1, "shots": 5, "unseen": 1},
    "DirichletFewShot": {"alpha": 1.0, "num_clients": 3, "shots": 12},
    "DirichletMerged": {"alpha": 0.5, "num_clients": 5},
    "DirichletPFLlib": {"alpha": 0.5, "num_clients": 5},
    "DirichletShared": {"alpha": 0.5, "num_clients": 5, "min_size": 5},
    "DisjointClasses": {"classes_per_client": 2},
    "DomainPerClient": {},
    "DomainsPerClient": {"domains": 2, "random": True},
    "FromManifest": {},  # of a file that the test writes
    "IID": {"num_clients": 5},
    "IIDPFLlib": {"num_clients": 5},
    "LeaveOneDomainOut": {"target": 1},
    "NonOverlapping": {"num_clients": 3, "shots": 5},
    "PathologicalPFLlib": {"classes_per_client": 2, "num_clients": 8},
    "PathologicalRandom": {"classes_per_client": 3, "num_clients": 6},
    "QuantitySkew": {"alpha": 0.5, "num_clients": 5},
    "SkewedDomains": {"clients_per_domain": 2, "alpha": 0.5, "shots": 6},
}


class Names(ImageSource):
    """The names of ``pool``'s classes and domains."""

    class_names = tuple("abcdefgh")
    domain_names = ("north", "east", "south", "west")


class Half(Names):
    """The names of half of the classes."""

    def __init__(self, half: int) -> None:
        self.name = f"half {half}"
        self.class_names = tuple("abcdefgh")[4 * half : 4 * half + 4]


@pytest.fixture(scope="module")
def pool() -> ImagePool:
    """Two images show the same thing where both train or both are tested; image by image another class and domain."""
    at = torch.arange(1024)
    pixels = at.view(-1, 1, 1, 1).expand(-1, 3, 1, 1) % 256
    pair = torch.where(at // 32 % 2 == 1, at - 32, at)  # of the same class, domain and side
    return ImagePool(pixels.to(torch.uint8), at % 8, at // 64 % 4 == 0, at // 8 % 4, pair)


@pytest.fixture
def made(request: pytest.FixtureRequest, pool: ImagePool, tmp_path: Path) -> Partition:
    kind: type[Partition] = request.param
    assert kind.__name__ in ARGUMENTS, (
        f"{kind.__name__} is a partition of datamodules.__all__ without an entry here: add its constructor's arguments "
        f"to ARGUMENTS in {Path(__file__).name}, chosen to fit the {len(pool.labels)} images of the fixture pool"
    )
    if kind is FromManifest:
        other = datamodules.IID(4)
        write_manifest(
            tmp_path / "given.json", make_manifest(other, pool, under_check(other, pool).split(), Names(), 3)
        )
        return FromManifest(str(tmp_path / "given.json"))
    return kind(**ARGUMENTS[kind.__name__])


every = pytest.mark.parametrize("made", PARTITIONS, indirect=True, ids=lambda kind: kind.__name__)


def under_check(made: Partition, pool: ImagePool) -> PartitionUnderCheck:
    if isinstance(made, datamodules.ClassesOfDataSets):
        return PartitionUnderCheck(made, replace(pool, domains=pool.labels // 4), SeveralDataSets([Half(0), Half(1)]))
    return PartitionUnderCheck(made, pool, Names())


def test_all_partitions_are_found() -> None:
    assert datamodules.IID in PARTITIONS
    assert set(ARGUMENTS) == {kind.__name__ for kind in PARTITIONS}, "an entry of ARGUMENTS is of no partition"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@every
def test_every_partition_keeps_what_it_must(check: Callable[[Any], None], made: Partition, pool: ImagePool) -> None:
    check(under_check(made, pool))
