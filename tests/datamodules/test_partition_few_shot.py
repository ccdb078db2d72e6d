from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from benchmark.config.files import read_layers
from benchmark.errors import ConfigurationError
from benchmark.records.hashes import manifest_hash
from benchmark.seeds import numpy_generator
from datamodules.digits import DigitDomains
from datamodules.federated import FederatedDataModule
from datamodules.manifest import FromManifest, make_manifest, read_manifest, write_manifest
from datamodules.partition.members import draw_shots
from datamodules.partition_few_shot import (
    BaseToNovel,
    BaseToNovelDomains,
    DirichletFewShot,
    NonOverlapping,
    base_and_novel,
    class_groups,
)
from datamodules.source import ImagePool, ImageSource

CONFIGS = Path(__file__).parents[2] / "configs"


class Source(ImageSource):
    """So many classes, twenty train and six test images each; image i of a class is i places from its first."""

    def __init__(self, classes: int, train: int = 20, test: int = 6) -> None:
        self.class_names = tuple(f"class {c}" for c in range(classes))  # type: ignore[misc]
        self.counts = train, test

    def load(self) -> ImagePool:
        train, test = self.counts
        classes = len(self.class_names)
        labels = torch.arange(classes).repeat_interleave(train + test)
        n = len(labels)
        return ImagePool(
            torch.zeros(n, 3, 1, 1, dtype=torch.uint8),
            labels,
            torch.tensor([False] * train + [True] * test).repeat(classes),
            torch.zeros(n, dtype=torch.int64),
            torch.arange(n),
        )


def classes_of(pool: ImagePool, rows: np.ndarray) -> list[int]:
    return sorted(set(pool.labels.numpy()[rows].tolist()))


def split(partition, pool, seed=0):
    return partition.split(pool, numpy_generator(seed, "partition"))


# Oxford Pets, Flowers-102, DTD, Caltech-101, Food-101: classes of a client and of the last one, base and all classes.
FEDPGP = [
    (37, 19, (2, 1), (4, 1)),
    (102, 51, (5, 6), (10, 12)),
    (47, 24, (2, 6), (5, 2)),
    (100, 50, (5, 5), (10, 10)),
    (101, 51, (5, 6), (10, 11)),
]


@pytest.mark.parametrize(("classes", "half", "base_sizes", "all_sizes"), FEDPGP)
def test_fedpgps_groups(classes, half, base_sizes, all_sizes):
    base, novel = base_and_novel(range(classes))
    assert base == tuple(range(half))
    assert novel == tuple(range(half, classes))
    for among, (usual, last) in ((base, base_sizes), (range(classes), all_sizes)):
        groups = class_groups(among, 10, 2023)
        assert [len(group) for group in groups] == [usual] * 9 + [last]
        assert sorted(c for group in groups for c in group) == list(among)
        assert groups == class_groups(among, 10, 2023)
        assert groups != class_groups(among, 10, 2024)
        assert all(list(group) == sorted(group) for group in groups)


def test_the_groups_are_those_of_fedpgps_code():
    """Slices of ``random.seed(2023); random.shuffle(list(range(19)))``: Oxford Pets' base classes over ten clients."""
    order = [2, 7, 3, 0, 16, 6, 13, 8, 4, 11, 1, 15, 5, 17, 9, 10, 18, 14, 12]
    pairs = [tuple(sorted(order[i : i + 2])) for i in range(0, 18, 2)]
    assert class_groups(range(19), 10, 2023) == [*pairs, (12,)]
    assert class_groups([10 + c for c in range(5)], 2, 2023) == [(10, 12), (11, 13, 14)]  # of [0, 2, 1, 4, 3]


@pytest.mark.parametrize(
    ("classes", "clients", "each", "most"), [(5, 10, 0, 5), (15, 10, 2, 8), (3, 2, 2, None), (7, 7, 1, None)]
)
def test_every_client_needs_a_class(classes, clients, each, most):
    if most is None:
        assert all(class_groups(range(classes), clients, 0))
        return
    message = f"{clients} does not fit {classes} classes: with {each} classes each .* use at most {most} clients"
    with pytest.raises(ConfigurationError, match=message):
        class_groups(range(classes), clients, 0)
    assert all(class_groups(range(classes), most, 0))


def test_shots_are_drawn_without_replacement():
    members = [np.arange(5), np.arange(10, 12)]
    drawn = draw_shots(members, 3, np.random.default_rng(0))
    assert [len(set(images.tolist())) for images in drawn] == [3, 2]
    assert set(drawn[0].tolist()) < set(range(5))
    everything = draw_shots(members, None, np.random.default_rng(0))
    assert [images.tolist() for images in everything] == [list(range(5)), [10, 11]]


def test_base_to_novel():
    source = Source(9)
    pool = source.load()
    labels, test = pool.labels.numpy(), pool.test.numpy()
    partition = BaseToNovel(num_clients=3, shots=4)
    splits = split(partition, pool)
    groups = class_groups(range(5), 3, 2023)
    assert [len(group) for group in groups] == [2, 2, 1]
    base, novel = np.flatnonzero(test & (labels < 5)), np.flatnonzero(test & (labels >= 5))
    for client, group in enumerate(groups):
        assert Counter(labels[splits.train[client]].tolist()) == dict.fromkeys(group, 4)
        assert not test[splits.train[client]].any()
        np.testing.assert_array_equal(splits.test[client], np.flatnonzero(test & np.isin(labels, group)))
        np.testing.assert_array_equal(splits.others["base"][client], base)
        np.testing.assert_array_equal(splits.others["novel"][client], novel)
        without = np.flatnonzero(test & (labels < 5) & ~np.isin(labels, group))
        np.testing.assert_array_equal(splits.others["base_excl_local"][client], without)
    first = (0, 1, 2, 3, 4)
    assert splits.label_spaces == {
        "train": first,
        "test": first,
        "base": first,
        "base_excl_local": first,
        "novel": (5, 6, 7, 8),
    }
    assert partition.client_names(source) == ["client 0", "client 1", "client 2"]
    assert partition.description == "BaseToNovel(num_clients=3, shots=4, class_seed=2023)"


def test_base_to_novel_with_one_client():
    pool = Source(4).load()
    splits = split(BaseToNovel(num_clients=1, shots=None), pool)
    assert list(splits.others) == ["base", "novel"]
    assert len(splits.train[0]) == 2 * 20
    np.testing.assert_array_equal(splits.test[0], splits.others["base"][0])


class Domains(Source):
    """The source's images, by turns of three domains."""

    domain_names = ("photo", "sketch", "oil")

    def load(self) -> ImagePool:
        pool = super().load()
        return replace(pool, domains=torch.arange(len(pool.labels)) % 3)


def test_base_to_novel_with_a_domain_a_client():
    source = Domains(5)
    pool = source.load()
    labels, test, domain_of = pool.labels.numpy(), pool.test.numpy(), pool.domains.numpy()
    splits = split(BaseToNovelDomains(shots=4), pool)
    base, novel = np.flatnonzero(test & (labels < 3)), np.flatnonzero(test & (labels >= 3))
    assert len(splits.train) == 3
    for client in range(3):
        assert Counter(labels[splits.train[client]].tolist()) == {0: 4, 1: 4, 2: 4}
        assert set(domain_of[splits.train[client]].tolist()) == {client}
        assert not test[splits.train[client]].any()
        np.testing.assert_array_equal(splits.test[client], base[domain_of[base] == client])
        np.testing.assert_array_equal(splits.others["base"][client], base)
        np.testing.assert_array_equal(splits.others["base_excl_local"][client], base[domain_of[base] != client])
        np.testing.assert_array_equal(splits.others["novel"][client], novel)
    spaces = dict.fromkeys(("train", "test", "base", "base_excl_local"), (0, 1, 2)) | {"novel": (3, 4)}
    assert splits.label_spaces == spaces
    assert BaseToNovelDomains().client_names(source) == ["photo", "sketch", "oil"]
    everything = split(BaseToNovelDomains(shots=None), pool)
    assert sorted(np.concatenate(everything.train)) == np.flatnonzero(~test & (labels < 3)).tolist()


def test_base_to_novel_of_one_domain_is_that_of_one_client():
    pool = Source(4).load()
    ours, known = split(BaseToNovelDomains(3), pool), split(BaseToNovel(1, 3), pool)
    assert [rows.tolist() for rows in ours.test] == [rows.tolist() for rows in known.test]
    assert {name: held[0].tolist() for name, held in ours.others.items()} == {
        name: held[0].tolist() for name, held in known.others.items()
    }
    assert Counter(pool.labels.numpy()[ours.train[0]].tolist()) == {0: 3, 1: 3}


def test_the_seed_draws_the_shots_and_not_the_classes():
    pool = Source(10).load()
    for partition in (BaseToNovel(5, shots=4), NonOverlapping(5, shots=4)):
        first, second = split(partition, pool, 0), split(partition, pool, 1)
        for a, b in zip(first.train, second.train, strict=True):
            assert classes_of(pool, a) == classes_of(pool, b)
            assert not np.array_equal(a, b)
        again = split(partition, pool, 0)
        assert all(np.array_equal(a, b) for a, b in zip(first.train, again.train, strict=True))
    # A class has the same shots whoever holds it.
    few = [np.concatenate(split(NonOverlapping(5, 4, class_seed), pool).train) for class_seed in (1, 2)]
    np.testing.assert_array_equal(np.sort(few[0]), np.sort(few[1]))


def test_non_overlapping():
    source = Source(7)
    pool = source.load()
    labels, test = pool.labels.numpy(), pool.test.numpy()
    splits = split(NonOverlapping(num_clients=3), pool)
    groups = class_groups(range(7), 3, 2023)
    assert [len(group) for group in groups] == [2, 2, 3]
    for client, group in enumerate(groups):
        np.testing.assert_array_equal(splits.train[client], np.flatnonzero(~test & np.isin(labels, group)))
        np.testing.assert_array_equal(splits.test[client], np.flatnonzero(test & np.isin(labels, group)))
        np.testing.assert_array_equal(splits.others["all"][client], np.flatnonzero(test))
    assert splits.label_spaces == {}
    few = split(NonOverlapping(num_clients=3, shots=2), pool)
    assert [len(rows) for rows in few.train] == [4, 4, 6]
    assert all(np.array_equal(a, b) for a, b in zip(few.test, splits.test, strict=True))


def test_dirichlet_few_shot():
    pool = Source(10, test=40).load()
    labels, test = pool.labels.numpy(), pool.test.numpy()
    for seed in range(5):
        splits = split(DirichletFewShot(alpha=0.5, num_clients=5, shots=8, min_size=3), pool, seed)
        trained, tested = np.concatenate(splits.train), np.concatenate(splits.test)
        assert len(set(trained.tolist())) == len(trained)
        assert np.bincount(labels[trained]).tolist() == [8] * 10
        assert not test[trained].any()
        np.testing.assert_array_equal(np.sort(tested), np.flatnonzero(test))
        assert min(map(len, splits.train)) >= 3
        for train, mine, everything in zip(splits.train, splits.test, splits.others["all"], strict=True):
            np.testing.assert_array_equal(everything, np.flatnonzero(test))
            # One cut for both sides: floor(8 x) against floor(40 x).
            shares = np.bincount(labels[train], minlength=10) / 8 - np.bincount(labels[mine], minlength=10) / 40
            assert np.abs(shares).max() < 1 / 8 + 1 / 40
    assert DirichletFewShot(0.5, 5, 8).client_names(Source(10)) == [f"client {k}" for k in range(5)]


def test_a_smaller_pool_that_all_seeds_share():
    pool = Source(10, train=20, test=40).load()
    labels = pool.labels.numpy()

    def drawn(seed: int, **given: int) -> tuple[list[int], list[int], list[list[int]]]:
        splits = split(DirichletFewShot(0.5, 3, 8, **given), pool, seed)
        trained, tested = np.sort(np.concatenate(splits.train)), np.sort(np.concatenate(splits.test))
        assert all(np.array_equal(everything, tested) for everything in splits.others["all"])
        return trained.tolist(), tested.tolist(), [rows.tolist() for rows in splits.test]

    for given in ({"test_shots": 15}, {"test_shots": 15, "pool_seed": 4}):
        trained, tested, mine = drawn(0, **given)
        assert Counter(labels[trained].tolist()) == dict.fromkeys(range(10), 8)
        assert Counter(labels[tested].tolist()) == dict.fromkeys(range(10), 15)
        others = drawn(1, **given)
        assert ("pool_seed" in given) == ((trained, tested) == others[:2])
        assert mine != others[2]
    assert drawn(0, test_shots=15, pool_seed=5)[:2] != (trained, tested)
    # Left at None, a manifest is that of before these options.
    assert "test_shots" not in DirichletFewShot(0.5, 3, 8).arguments()
    assert DirichletFewShot(0.5, 3, 8, pool_seed=0).arguments()["pool_seed"] == 0


def test_all_test_images_are_scored_unless_that_is_switched_off():
    pool = Source(10, train=20, test=40).load()
    both = [split(DirichletFewShot(0.5, 3, 8, score_all=said), pool, 0) for said in (True, False)]
    assert [[*each.others] for each in both] == [["all"], []]
    for side in ("train", "test"):
        kept, left = ([rows.tolist() for rows in getattr(each, side)] for each in both)
        assert kept == left
    assert DirichletFewShot(0.5, 3, 8).further_splits == ("all",)
    assert DirichletFewShot(0.5, 3, 8, score_all=False).further_splits == ()
    assert "score_all" not in DirichletFewShot(0.5, 3, 8).arguments()
    assert DirichletFewShot(0.5, 3, 8, score_all=False).arguments()["score_all"] is False


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DirichletFewShot(0.5, 3, 4, test_shots=0), "test_shots: expected a whole number from 1 .*, got 0"),
        (lambda: BaseToNovelDomains(0), "shots: expected a whole number from 1 to 1,000,000,000 or null, got 0"),
        (lambda: BaseToNovelDomains().client_names(Source(1)), "need a data set of at least 2 classes"),
        (lambda: BaseToNovel(0), "num_clients: expected a whole number from 1 to 1,000,000, got 0"),
        (lambda: BaseToNovel(3, shots=0), "shots: expected a whole number from 1 to 1,000,000,000 or null, got 0"),
        (lambda: NonOverlapping(0), "num_clients: expected a whole number from 1 to 1,000,000, got 0"),
        (lambda: NonOverlapping(3, shots=-1), "shots: expected a whole number from 1 to 1,000,000,000 or null, got -1"),
        (lambda: DirichletFewShot(0.0, 3, 4), "alpha: expected a number above 0 and at most 1,000,000, got 0.0"),
        (lambda: DirichletFewShot(0.5, 0, 4), "num_clients: expected a whole number from 1 to 1,000,000, got 0"),
        (lambda: DirichletFewShot(0.5, 3, 0), "shots: expected a whole number from 1 to 1,000,000,000, got 0"),
        (
            lambda: DirichletFewShot(0.5, 3, 4, min_size=0),
            "min_size: expected a whole number from 1 to 1,000,000,000, got 0",
        ),
        (lambda: BaseToNovel(3).client_names(Source(4)), "num_clients=3 does not fit 2 classes"),
        (lambda: NonOverlapping(5).client_names(Source(4)), "num_clients=5 does not fit 4 classes"),
        (lambda: BaseToNovel(1).client_names(Source(1)), "need a data set of at least 2 classes"),
        (lambda: split(BaseToNovel(3), Source(4).load()), "num_clients=3 does not fit 2 classes"),
        (
            lambda: split(DirichletFewShot(0.5, 30, 1, min_size=2), Source(10).load()),
            "30 clients with at least min_size=2 training images each need 60 training images, the data set has 10",
        ),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    "partition", [BaseToNovel(3, shots=4), NonOverlapping(3, shots=4), DirichletFewShot(1, 3, 8), BaseToNovelDomains(4)]
)
def test_a_manifest_repeats_the_split(partition, tmp_path):
    source = Source(8)
    pool = source.load()
    splits = split(partition, pool)
    manifest = make_manifest(partition, pool, splits, source, 0)
    write_manifest(tmp_path / "manifest.json", manifest)
    assert manifest_hash(read_manifest(tmp_path / "manifest.json")) == manifest_hash(manifest)
    again = split(FromManifest(str(tmp_path / "manifest.json")), pool, seed=1)
    for a, b in (
        (splits.train, again.train),
        (splits.test, again.test),
        *((splits.others[name], again.others[name]) for name in splits.others),
    ):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert again.label_spaces == splits.label_spaces


def configured(suite: str, *over: str) -> FederatedDataModule:
    """The datamodule of a suite, with files instead of its own; nothing is read."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(FederatedDataModule, "data")
    (layer,) = read_layers([CONFIGS / f"suites/{suite}.yaml"])
    given = layer.options["data"]
    for name in over:
        given |= yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return parser.instantiate_classes(parser.parse_object({"data": given})).data


FEDPGP = ("oxford_pets", "flowers102", "dtd", "caltech101", "food101")
ATPFL = ("caltech101", "flowers102", "oxford_pets", "dtd", "eurosat", "stanford_cars", "ucf101")
FEW_SHOT = [
    *(("pets_clip", name, f"partitions/{dealt}") for name in FEDPGP for dealt in ("base_to_novel", "non_overlapping")),
    *(("pets_clip_few_shot", name) for name in ATPFL),
    *(("pets_clip", name, "partitions/dirichlet_n100") for name in ("cifar10", "cifar100")),
    *((suite, "digits") for suite in ("digits_clip", "digits_clip_few_shot")),
]


@pytest.mark.parametrize("given", FEW_SHOT, ids="-".join)
def test_configurations_know_their_classes_before_data_are_read(given):
    suite, source, *partition = given
    data = configured(suite, f"sources/{source}", *partition)
    assert data.num_classes == len(data.class_names) == len(data.source.class_names)
    assert data.num_clients == len(data.client_names) == (5 if source == "digits" else 100 if "cifar" in source else 10)
    assert data.batch_size == 32
    assert data.eval_batch_size == 100
    assert data.transform.normalize == ("half" if source == "digits" else "clip")
    assert suite != "pets_clip_few_shot" or data.partition.shots == 4


def test_digits_base_to_novel():
    data = configured("digits_clip")
    data.setup()
    labels = data.pool.labels.numpy()
    assert [len(rows) for rows in data.splits.train] == [16] * 5
    assert sorted(classes_of(data.pool, rows) for rows in data.splits.train) == [[0], [1], [2], [3], [4]]
    assert set(labels[data.splits.others["novel"][0]].tolist()) == {5, 6, 7, 8, 9}
    assert data.label_spaces["novel"] == (5, 6, 7, 8, 9)
    assert isinstance(data.source, DigitDomains)


def test_dirichlet_over_a_hundred_clients_of_cifar_is_found():
    from datamodules.partition import DirichletShared

    for source in (Source(10, 500, 100), Source(100, 50, 10)):  # a tenth of CIFAR-10 and of CIFAR-100
        splits = split(DirichletShared(0.3, 100, min_size=1), source.load())
        assert min(map(len, splits.train)) >= 1
        assert min(map(len, splits.test)) >= 1
