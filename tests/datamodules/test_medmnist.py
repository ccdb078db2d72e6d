"""MedMNIST, on small files of the published form."""

import io
import zipfile

import numpy as np
import pytest

from benchmark.errors import ConfigurationError
from datamodules.medmnist import SUBSETS, MedMNIST

pytestmark = pytest.mark.filterwarnings("ignore:.*results compare with no published number")

SIDES = ("train", "val", "test")


def arrays(classes, size=28, grey=False, each=2):
    """Images of a colour each: red is the class, green the side, blue the number; grey ones have the sum of these."""
    found = {}
    for at, side in enumerate(SIDES):
        labels = np.repeat(np.arange(classes, dtype=np.uint8), each)
        colours = np.stack(
            [labels, np.full_like(labels, 50 * at), np.tile(np.arange(each, dtype=np.uint8) * 20, classes)], 1
        )
        images = np.broadcast_to(colours[:, None, None], (len(labels), size, size, 3))
        found[f"{side}_images"] = images.sum(-1).astype(np.uint8) if grey else images
        found[f"{side}_labels"] = labels[:, None]
    return found


def write(root, name, **content):
    path = root / "medmnist" / name
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **content)
    return path


@pytest.mark.parametrize("use_valid", ["none", "train"])
def test_colours_labels_and_sides_are_the_files(tmp_path, use_valid):
    write(tmp_path, "bloodmnist.npz", **arrays(8))
    pool = MedMNIST(str(tmp_path), "bloodmnist", use_valid=use_valid).load()
    assert pool.images.shape == (8 * 2 * (3 if use_valid == "train" else 2), 3, 28, 28)
    np.testing.assert_array_equal(pool.labels, pool.images[:, 0, 5, 7])
    np.testing.assert_array_equal(pool.test, pool.images[:, 1, 5, 7] == 100)
    assert (50 in pool.images[:, 1, 5, 7].tolist()) is (use_valid == "train")
    assert not pool.domains.any()


def test_grey_images_get_three_channels_at_any_size(tmp_path):
    content = arrays(2, 64, grey=True)
    content["train_images"] = content["train_images"].copy()
    content["train_images"][0, 3, 9] = 201  # rows before columns
    write(tmp_path, "pneumoniamnist_64.npz", **content)
    source = MedMNIST(str(tmp_path), "pneumoniamnist", size=64)
    pool = source.load()
    assert pool.images.shape == (8, 3, 64, 64)
    assert (pool.images[:, :1] == pool.images).all()
    assert pool.images[0, :, 3, 9].tolist() == [201] * 3
    assert (source.recorded_name, source.class_names) == ("PneumoniaMNIST", ("normal", "pneumonia"))


def test_a_training_copy_of_a_test_image_is_left_out(tmp_path):
    content = {name: values.copy() for name, values in arrays(8).items()}
    content["train_images"][5] = content["test_images"][0]
    content["train_images"][7] = content["train_images"][6]
    write(tmp_path, "bloodmnist.npz", **content)
    pool = MedMNIST(str(tmp_path), "bloodmnist").load()
    assert (int((~pool.test).sum()), int(pool.test.sum())) == (15, 16)
    assert len(pool.group.unique()) == 30


def test_each_set_is_named_and_of_its_size():
    assert len(SUBSETS) == 11
    for key, subset in SUBSETS.items():
        source = MedMNIST(subset=key)
        assert source.recorded_name.lower() == key
        assert source.class_names == subset.class_names
        assert len(set(subset.class_names)) == len(subset.class_names) > 1
    with pytest.raises(ConfigurationError, match="subset"):
        MedMNIST(subset="chestmnist")
    with pytest.raises(ConfigurationError, match="size"):
        MedMNIST(size=32)


def test_other_sizes_than_the_published_ones_are_said(tmp_path):
    write(tmp_path, "bloodmnist.npz", **arrays(8))
    with pytest.warns(
        UserWarning, match="BloodMNIST has 11959, 1712, 3421 train, validation .* has 16, 16, 16: results"
    ):
        MedMNIST(str(tmp_path), "bloodmnist").load()


def refused(root, match):
    with pytest.raises(ConfigurationError, match=match) as caught:
        MedMNIST(str(root), "bloodmnist").load()
    assert "\n" not in str(caught.value)
    assert "zenodo.org" in str(caught.value)


def test_missing_files_say_what_to_do(tmp_path):
    refused(tmp_path, r"BloodMNIST is not in .*medmnist: download bloodmnist\.npz from https\S+ and put it there")


def test_pickled_content_is_refused(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    content = arrays(8)
    content["test_labels"] = np.array([Harmful()], dtype=object)
    path = write(tmp_path, "bloodmnist.npz", **content)
    refused(tmp_path, "cannot read test_labels from .*allow_pickle=False")
    path.write_bytes(b"\x80\x04cos\nsystem\n")
    refused(tmp_path, r"cannot read train_labels from .*\.npz")
    assert not (tmp_path / "made").exists()


def test_damaged_files_and_other_arrays_are_refused(tmp_path):
    path = write(tmp_path, "bloodmnist.npz", **arrays(8))
    whole = path.read_bytes()
    for damaged in (b"", whole[:200], whole[: len(whole) // 2], whole[:100] + b"\xff" * 400 + whole[500:]):
        path.write_bytes(damaged)
        refused(tmp_path, r"cannot read train_(labels|images) from .*bloodmnist\.npz")
    np.save(path.with_suffix(".npy"), np.zeros(3))
    path.with_suffix(".npy").rename(path)
    refused(tmp_path, "cannot read train_labels from")
    for name, values, match in (
        (
            "train_images",
            np.zeros((16, 32, 32, 3), np.uint8),
            r"must be uint8 \[16, 28, 28\] .*got uint8 \[16, 32, 32, 3\]",
        ),
        ("train_images", np.zeros((15, 28, 28, 3), np.uint8), r"got uint8 \[15, 28, 28, 3\]"),
        ("train_images", np.zeros((16, 28, 28, 28), np.uint8), r"got uint8 \[16, 28, 28, 28\]"),
        ("test_images", np.zeros((16, 28, 28, 3), np.float32), "got float32"),
        ("test_labels", np.zeros((16, 14), np.uint8), r"whole numbers from 0 to 7, \[n, 1\], got uint8 \[16, 14\]"),
        ("val_labels", np.zeros(16, np.uint8), r"got uint8 \[16\]"),
        ("test_labels", np.zeros((0, 1), np.uint8), r"got uint8 \[0, 1\]"),
        ("test_labels", np.full((16, 1), 8, np.uint8), "from 0 to 7"),
        ("test_labels", np.full((16, 1), -1, np.int64), "from 0 to 7"),
        ("test_labels", np.full((16, 1), 0.5), "got float64"),
    ):
        write(tmp_path, "bloodmnist.npz", **{**arrays(8), name: values})
        refused(tmp_path, match)


def test_a_file_that_claims_more_than_memory_is_refused(tmp_path):
    path = write(tmp_path, "bloodmnist.npz", **arrays(8))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**15, 1)})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("train_labels.npy", header.getvalue())
    refused(tmp_path, r"what .*bloodmnist\.npz holds takes more memory than is free")
