import hashlib
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmark.errors import ConfigurationError
from benchmark.records.hashes import manifest_hash
from benchmark.seeds import numpy_generator
from datamodules.manifest import FromManifest, make_manifest, read_manifest, write_manifest
from datamodules.partition import ClientSplits, DirichletMerged, DomainPerClient, Partition
from datamodules.source import ImagePool, ImageSource


class Birds(ImageSource):
    class_names = ("wren", "owl")
    domain_names = ("photo", "sketch")


def make_pool():
    n = 40
    return ImagePool(
        images=torch.zeros(n, 3, 1, 1, dtype=torch.uint8),
        labels=torch.arange(n) % 2,
        test=torch.arange(n) % 5 == 0,
        domains=torch.arange(n) // 20,
        group=torch.arange(n),
    )


def make(partition=None, seed=3):
    partition, pool = partition or DirichletMerged(0.5, 3, min_size=4), make_pool()
    splits = partition.split(pool, numpy_generator(seed, "partition"))
    return make_manifest(partition, pool, splits, Birds(), seed), splits


class ByHand(Partition):
    num_clients = 2

    def assign(self, pool, rng):
        return ClientSplits([np.array([2, 1]), np.array([4])], [np.array([0]), np.array([3, 5, 7])])


def test_manifest_by_hand():
    manifest, _ = make(ByHand())
    labels = hashlib.sha256(b"".join((i % 2).to_bytes(8, "little") for i in range(40))).hexdigest()
    train = hashlib.sha256(b"".join(i.to_bytes(8, "little") for i in (1, 2))).hexdigest()
    assert manifest["algorithm"] == "ByHand"
    assert manifest["arguments"] == {}
    assert manifest["seed"] == 3
    assert manifest["class_names"] == ["wren", "owl"]
    assert manifest["domain_names"] == ["photo", "sketch"]
    assert manifest["images"] == 40
    assert manifest["labels_sha256"] == labels
    first, second = manifest["clients"]
    assert (first["name"], first["train"], first["test"], first["train_sha256"]) == ("client 0", [1, 2], [0], train)
    assert (first["train_size"], first["train_classes"], first["test_classes"]) == (2, [1, 1], [1, 0])
    assert (second["test_size"], second["train_classes"], second["test_classes"]) == (3, [1, 0], [0, 3])


def test_written_and_read_back(tmp_path):
    manifest, splits = make()
    path = tmp_path / "made" / "split.json"
    write_manifest(path, manifest)
    assert read_manifest(path) == manifest
    assert os.listdir(path.parent) == ["split.json"]
    assert sum('"train":' in line for line in path.read_text().splitlines()) == 3  # one client a line

    loaded = FromManifest(str(path))
    assert loaded.num_clients == 3
    again = loaded.split(make_pool(), numpy_generator(99, "other"))
    for side in ("train", "test"):
        for a, b in zip(getattr(splits, side), getattr(again, side), strict=True):
            np.testing.assert_array_equal(a, b)
    # A run on a loaded split names the split's own maker and hash.
    assert manifest_hash(make_manifest(loaded, make_pool(), again, Birds(), 99)) == manifest_hash(manifest)


def test_names_of_domains_survive(tmp_path):
    manifest, _ = make(DomainPerClient())
    write_manifest(tmp_path / "split.json", manifest)
    assert FromManifest(str(tmp_path / "split.json")).client_names(Birds()) == ["photo", "sketch"]


def test_hash_tells_partitions_apart_and_ignores_the_order_of_fields():
    manifest, _ = make()
    assert manifest_hash(manifest) != manifest_hash(make(seed=4)[0])
    assert manifest_hash(manifest) == manifest_hash(dict(reversed(manifest.items())))


def test_another_process_makes_the_same_manifest_and_imports_nothing_slow():
    code = (
        "import sys, test_manifest as t; print(t.manifest_hash(t.make()[0]));"
        "print({'lightning', 'torchvision', 'sklearn', 'matplotlib'} & set(sys.modules))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.split("\n")[:2] == [manifest_hash(make()[0]), "set()"]


def test_images_have_a_hash_of_their_own_beside_the_partitions(tmp_path):
    pool = make_pool()
    manifest, splits = make(ByHand())
    content = hashlib.sha256(b"(40, 3, 1, 1)" + bytes(120)).hexdigest()
    assert manifest["images_sha256"] == content
    other = replace(pool, images=pool.images + 1)
    again = make_manifest(ByHand(), other, splits, Birds(), 3)
    assert again["images_sha256"] != content
    assert manifest_hash(again) == manifest_hash(manifest)
    # A run on a recorded split names its own images.
    path = tmp_path / "split.json"
    write_manifest(path, manifest)
    with pytest.warns(UserWarning, match="was made from other images"):
        assert make_manifest(FromManifest(str(path)), other, splits, Birds(), 3) == again
    # A view in another order of memory has the same pixels, and so the same hash.
    mixed = replace(pool, images=torch.arange(120, dtype=torch.uint8).view(40, 3, 1, 1))
    view = replace(mixed, images=mixed.images.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2))
    hashes = [make_manifest(ByHand(), p, splits, Birds(), 3)["images_sha256"] for p in (mixed, view)]
    assert hashes[0] == hashes[1]


def test_other_images_of_a_recorded_split_are_told_of(tmp_path):
    manifest, splits = make()
    write_manifest(tmp_path / "split.json", manifest)
    loaded, pool = FromManifest(str(tmp_path / "split.json")), make_pool()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_manifest(loaded, pool, splits, Birds(), 3)
    other = replace(pool, images=torch.ones_like(pool.images))
    assert loaded.split(other, numpy_generator(0)).train
    with pytest.warns(UserWarning, match=r"split\.json was made from other images: .* where they have another size or"):
        make_manifest(loaded, other, splits, Birds(), 3)


@pytest.mark.filterwarnings("error")
def test_manifests_without_a_hash_of_the_images_are_read(tmp_path):
    manifest, splits = make()
    before = {field: value for field, value in manifest.items() if field != "images_sha256"}
    write_manifest(tmp_path / "split.json", before)
    assert read_manifest(tmp_path / "split.json") == before
    assert make_manifest(FromManifest(str(tmp_path / "split.json")), make_pool(), splits, Birds(), 3) == manifest
    assert manifest_hash(before) == manifest_hash(manifest)


def test_writing_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "split.json"
    write_manifest(path, make()[0])
    before = path.read_text()

    def fail(*paths):
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigurationError, match=r"split\.json cannot be written: disk gone"):
        write_manifest(path, make(seed=4)[0])
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["split.json"]


def count(manifest, client, *place):
    """Raise one of a client's numbers by one."""
    at = manifest["clients"][client]
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] += 1


def tampered(tmp_path, change):
    manifest = make()[0]
    change(manifest)
    path = tmp_path / "split.json"
    path.write_text(json.dumps(manifest))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("clients"), "field 'clients' is missing or of a wrong type"),
        (lambda m: m.update(seed="3"), "field 'seed' is missing or of a wrong type"),
        (lambda m: m.update(format=2), "has manifest format 2, this version reads format 1"),
        (lambda m: m["clients"].append([]), "client 3 needs the fields name, train_sha256"),
        (lambda m: m["clients"][1].pop("test"), "client 1 needs the fields"),
        (lambda m: m["clients"][0].update(train=["../x"]), "train indices of client 0 must be a list of integers"),
        (lambda m: m["clients"][0].update(train=[True]), "train indices of client 0 must be a list of integers"),
        (lambda m: m["clients"][2]["test"].append(40), "test index of client 2 is outside of the 40 images"),
        (lambda m: m["clients"][0]["train"].pop(), "train indices of client 0 do not have the recorded sha256"),
        (lambda m: m["clients"].clear(), "field 'clients' is empty; a partition has at least one client"),
        (lambda m: m["clients"][2].update(name="client 0"), "clients 0 and 2 are both called 'client 0'"),
        (lambda m: m["clients"][1].update(name=7), "'name' of client 1 must be of type str"),
        (lambda m: m["clients"][1].pop("train_classes"), "client 1 needs the fields"),
        (lambda m: m["clients"][1].update(train_classes="many"), "'train_classes' of client 1 must be of type list"),
        (lambda m: m["clients"][1].update(train_classes=[0] * 10**6), "client 1: train_classes must be 2 numbers"),
        (lambda m: m["clients"][1].update(test_classes=[[], []]), "client 1: test_classes must be 2 numbers"),
        (lambda m: m["clients"][1]["train_classes"].append(0), "client 1: train_classes must be 2 numbers of images"),
        (lambda m: count(m, 1, "train_classes", 0), "client 1: train_classes must be 2 numbers of images, one a class"),
        (lambda m: count(m, 1, "train_size"), r"client 1 has train_size \d+, but \d+ train indices"),
        (lambda m: m["clients"][0].update(test_size=1.0), "'test_size' of client 0 must be of type int"),
        (lambda m: m.update(class_names=[]), "field 'class_names' must be a list of names"),
        (lambda m: m.update(domain_names=[0]), "field 'domain_names' must be a list of names"),
        (lambda m: m.update(images_sha256=0), "field 'images_sha256' is of a wrong type"),
    ],
)
def test_files_that_are_no_manifest(tmp_path, change, message):
    with pytest.raises(ConfigurationError, match=message):
        read_manifest(tampered(tmp_path, change))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot read the partition manifest .*none.json: No such file"):
        FromManifest(str(tmp_path / "none.json"))
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ConfigurationError, match="it is not JSON"):
        read_manifest(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="expected a JSON object"):
        read_manifest(tmp_path / "list.json")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"labels": torch.arange(40) // 20}, "the labels of the images differ"),
        ({"test": torch.zeros(40, dtype=torch.bool)}, "the train/test flags of the images differ"),
        ({"domains": torch.zeros(40, dtype=torch.int64)}, "the domains of the images differ"),
        ({"group": torch.zeros(40, dtype=torch.int64)}, "on both the train and the test side"),
    ],
)
def test_other_data_are_refused(tmp_path, other, message):
    write_manifest(tmp_path / "split.json", make()[0])
    with pytest.raises(ConfigurationError, match=message):
        FromManifest(str(tmp_path / "split.json")).split(replace(make_pool(), **other), numpy_generator(0))


def test_another_number_of_images_is_refused(tmp_path):
    write_manifest(tmp_path / "split.json", make()[0])
    pool = make_pool()
    smaller = ImagePool(pool.images[:9], pool.labels[:9], pool.test[:9], pool.domains[:9], pool.group[:9])
    with pytest.raises(ConfigurationError, match="was made from 40 images, the data set has 9"):
        FromManifest(str(tmp_path / "split.json")).split(smaller, numpy_generator(0))


def test_another_order_of_classes_is_refused(tmp_path):
    class Swapped(Birds):
        class_names = ("owl", "wren")

    class OneDomain(Birds):
        domain_names = ("photo",)

    manifest, splits = make()
    write_manifest(tmp_path / "split.json", manifest)
    loaded = FromManifest(str(tmp_path / "split.json"))
    with pytest.raises(ConfigurationError, match=r"order of class names: .* class 0 is 'owl', recorded is 'wren'"):
        make_manifest(loaded, make_pool(), splits, Swapped(), 3)
    with pytest.raises(ConfigurationError, match="order of domain names: the data set has 1, the manifest 2"):
        make_manifest(loaded, make_pool(), splits, OneDomain(), 3)


def test_class_counts_are_those_of_the_images(tmp_path):
    def change(manifest):
        manifest["clients"][1]["train_classes"].reverse()  # their sum is still right

    assert read_manifest(tampered(tmp_path, lambda m: None))
    loaded = FromManifest(str(tampered(tmp_path, change)))
    with pytest.raises(ConfigurationError, match="train_classes of client 1 are not those of its images"):
        loaded.assign(make_pool(), None)
