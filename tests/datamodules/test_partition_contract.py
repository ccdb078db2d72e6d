"""What every partition must keep: a new one in ``datamodules.__all__`` needs an entry in ``ARGUMENTS``."""

import inspect
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import datamodules
from datamodules.manifest import FromManifest, make_manifest, read_manifest, write_manifest
from datamodules.partition import ClientSplits, Partition
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
    "DirichletFewShot": {"alpha": 1.0, "num_clients": 3, "shots": 12},
    "DirichletMerged": {"alpha": 0.5, "num_clients": 5},
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
}


class Names(ImageSource):
    """The names of ``pool``'s classes and domains."""

    class_names = tuple("abcdefgh")
    domain_names = ("north", "east", "south", "west")


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
        write_manifest(tmp_path / "given.json", make_manifest(other, pool, split(other, pool), Names(), 3))
        return FromManifest(str(tmp_path / "given.json"))
    return kind(**ARGUMENTS[kind.__name__])


every = pytest.mark.parametrize("made", PARTITIONS, indirect=True, ids=lambda kind: kind.__name__)


def split(partition: Partition, pool: ImagePool, seed: int = 3) -> ClientSplits:
    return partition.split(pool, np.random.default_rng(seed))


def assert_same(left: ClientSplits, right: ClientSplits) -> None:
    """The same clients hold the same images on every side, which are told apart among the same classes."""
    assert left.label_spaces == right.label_spaces
    assert left.others.keys() == right.others.keys()
    for mine, theirs in [(left.train, right.train), (left.test, right.test)] + [
        (held, right.others[name]) for name, held in left.others.items()
    ]:
        assert len(mine) == len(theirs)
        for rows, others in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(rows, others)
            assert rows.dtype == others.dtype == np.int64


def test_all_partitions_are_found() -> None:
    assert datamodules.IID in PARTITIONS
    assert set(ARGUMENTS) == {kind.__name__ for kind in PARTITIONS}, "an entry of ARGUMENTS is of no partition"


@every
def test_a_split_depends_on_pool_and_seed_alone(made: Partition, pool: ImagePool) -> None:
    first = split(made, pool)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    torch.manual_seed(1)
    states = np.random.get_state()[1].tobytes(), random.getstate(), torch.get_rng_state()  # type: ignore[index]  # noqa: NPY002
    assert_same(split(made, pool), first)
    # What the images look like has no say, and neither has where they lie.
    other = replace(pool, images=255 - pool.images, labels=torch.cat([pool.labels, pool.labels])[: len(pool.labels)])
    assert_same(split(made, other), first)
    assert np.random.get_state()[1].tobytes() == states[0]  # type: ignore[index]  # noqa: NPY002
    assert random.getstate() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


@every
def test_the_arguments_in_a_record_make_the_same_split(made: Partition, pool: ImagePool) -> None:
    again = type(made)(**made.arguments())
    assert again.description == made.description
    assert again.arguments() == made.arguments()
    assert_same(split(again, pool), split(made, pool))


@every
def test_nothing_that_is_trained_on_is_tested_on(made: Partition, pool: ImagePool) -> None:
    for seed in range(3):
        splits = split(made, pool, seed)
        held = [splits.train, splits.test, *splits.others.values()]
        assert len({len(rows) for rows in held}) == 1
        assert all(len(rows) and np.all(np.diff(rows) > 0) for side in held for rows in side), "ascending, none empty"
        groups = pool.group.numpy()
        trained = np.concatenate([np.unique(groups[rows]) for rows in splits.train])
        tested = np.unique(groups[np.concatenate([rows for side in held[1:] for rows in side])])
        assert not np.intersect1d(trained, tested).size
        images = np.concatenate(splits.train)
        assert len(np.unique(images)) == len(images), "an image trains at one client"
        for name, classes in splits.label_spaces.items():
            side = {"train": splits.train, "test": splits.test, **splits.others}[name]
            assert set(pool.labels[np.concatenate(side)].tolist()) <= set(classes)


@every
def test_clients_have_names_before_the_images_are_read(made: Partition, pool: ImagePool) -> None:
    names = made.client_names(Names())
    assert len(names) == len(split(made, pool).train)
    assert len(set(names)) == len(names)
    assert made.num_clients in (None, len(names))
    assert all(isinstance(name, str) and name for name in names)


@every
def test_a_manifest_gives_the_split_back(made: Partition, pool: ImagePool, tmp_path: Path) -> None:
    splits, source = split(made, pool), Names()
    manifest = make_manifest(made, pool, splits, source, 3)
    write_manifest(tmp_path / "manifest.json", manifest)
    assert datamodules.manifest_hash(read_manifest(tmp_path / "manifest.json")) == datamodules.manifest_hash(manifest)
    read = FromManifest(str(tmp_path / "manifest.json"))
    assert_same(split(read, pool, seed=9), splits)
    assert read.client_names(source) == made.client_names(source)
    assert make_manifest(read, pool, split(read, pool), source, 9) == manifest
