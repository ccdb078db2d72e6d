import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmark.errors import ConfigurationError
from benchmark.predict.files import list_files
from datamodules import folders
from datamodules.folders import list_class_folders, read_images, without_copies


def write(path: Path, colour=(10, 20, 30), size=(8, 8), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def root(tmp_path):
    """Two classes; one pair of identical files."""
    root = tmp_path / "set"
    write(root / "train/cat/b.png", (0, 0, 200))
    write(root / "train/cat/a.PNG", (0, 100, 0))
    write(root / "train/dog/z.png", (50, 0, 0))
    write(root / "train/dog/c.png", (0, 0, 200))
    (root / "train/dog/notes.txt").write_text("no image")
    (root / "train/dog/._c.png").write_text("left by a file manager")
    (root / "train/.hidden").mkdir()
    return root


FILES = ["train/cat/a.PNG", "train/cat/b.png", "train/dog/c.png", "train/dog/z.png"]


def test_listed_by_class_then_name(root):
    files, labels = list_class_folders(root, "train", [["cat"], ["hound", "dog"]])
    assert files == FILES
    assert labels.tolist() == [0, 0, 1, 1]
    files, labels = list_class_folders(root / "train", ".", [["dog"], ["cat"]])
    assert files == ["dog/c.png", "dog/z.png", "cat/a.PNG", "cat/b.png"]
    assert labels.tolist() == [0, 0, 1, 1]


def test_order_on_disk_does_not_matter(root, monkeypatch):
    scandir, listdir = os.scandir, os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listdir(path), reverse=True))
    monkeypatch.setattr(os, "scandir", lambda path: sorted(scandir(path), key=lambda e: e.name, reverse=True))
    assert list_class_folders(root, "train", [["cat"], ["dog"]])[0] == FILES


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([["cat"], ["dog"], ["emu"]], "one folder for each of 3 classes; missing: emu; unknown: none"),
        ([["cat"], ["emu"]], "missing: emu; unknown: dog"),
        ([["cat"]], "missing: none; unknown: dog"),
        ([["cat", "dog"]], "holds class cat twice: cat, dog"),
    ],
)
def test_class_folders_must_be_those_of_the_data_set(root, names, message):
    with pytest.raises(ConfigurationError, match=message):
        list_class_folders(root, "train", names)


KINDS = (".nef", ".CR2", ".svs", ".dicom", ".mha", ".arw", ".raf", ".ima", ".nrrd", ".ndpi", ".mrxs", ".exr", ".j2k")


@pytest.mark.parametrize("name", [*(f"scan{kind}" for kind in (*KINDS, ".jxr")), "IM000001", "1.2.840.113619.2"])
def test_images_of_a_kind_that_is_not_read_do_not_go_unnoticed(root, name):
    content = bytes(128) + (b"" if name.startswith("scan") else b"DICM")
    (root / "train/dog" / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=rf"dog holds 1 images of formats that are not read \(first: {name}\)"):
        list_class_folders(root, "train", [["cat"], ["dog"]])
    found, remarks = list_files([root / "train/dog"])
    assert [path.name for path in found] == ["c.png", "z.png"]
    assert f"1 images in {root / 'train/dog'} are of formats that are not read (first: " in remarks[0]


def test_files_without_a_suffix_that_are_no_dicom_are_passed_over(root):
    (root / "train/dog/README").write_text("DICM")
    os.mkfifo(root / "train/dog/pipe")
    (root / "train/dog/gone").symlink_to("nowhere")
    assert list_class_folders(root, "train", [["cat"], ["dog"]])[0] == FILES


def test_missing_and_empty_folders(root):
    with pytest.raises(ConfigurationError, match=r"cannot read the image folder .*none: No such file"):
        list_class_folders(root, "none", [["cat"]])
    (root / "test/cat").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="holds no image"):
        list_class_folders(root, "test", [["cat"]])


def test_decoded_cached_and_mapped(root, monkeypatch):
    first = read_images(root, FILES, 4, "squash")
    assert first.images.shape == (4, 3, 4, 4)
    assert first.images.dtype == np.uint8
    assert first.images[:, :, 0, 0].tolist() == [[0, 100, 0], [0, 0, 200], [0, 0, 200], [50, 0, 0]]
    assert first.group.tolist() == [0, 1, 1, 3]
    assert isinstance(first.images, np.memmap)
    assert not [name for name in os.listdir(root / ".cache") if name.endswith(".tmp")]

    def never(*arguments):
        raise AssertionError("decoded again")

    with monkeypatch.context() as patch:
        patch.setattr(folders, "decode", never)
        second = read_images(root, FILES, 4, "squash")
        np.testing.assert_array_equal(first.images, second.images)
        assert second.group.tolist() == [0, 1, 1, 3]
        for size, fit in ((5, "squash"), (4, "crop")):
            with pytest.raises(AssertionError, match="decoded again"):
                read_images(root, FILES, size, fit)

    # A write to the map stays in memory.
    second.images[:] = 0
    assert read_images(root, FILES, 4, "squash").images.max() == 200


def test_a_changed_file_is_decoded_again(root):
    read_images(root, FILES, 4, "squash")
    write(root / FILES[0], (1, 2, 3))
    os.utime(root / FILES[0], ns=(0, 12345))
    assert read_images(root, FILES, 4, "squash").images[0, :, 0, 0].tolist() == [1, 2, 3]


def test_a_damaged_cache_is_made_again(root):
    expected = read_images(root, FILES, 4, "squash").images.copy()
    for cached in (root / ".cache").iterdir():
        cached.write_bytes(cached.read_bytes()[:-7])
    np.testing.assert_array_equal(read_images(root, FILES, 4, "squash").images, expected)


@pytest.mark.parametrize("at", [0, -1])
def test_a_cache_of_other_content_is_made_again(root, at):
    expected = read_images(root, FILES, 4, "squash").images.copy()
    images, digests = sorted((root / ".cache").iterdir(), key=lambda path: "digests" in path.name)
    pixels = np.load(images)
    pixels[at] = 0
    np.save(images, pixels)
    with pytest.warns(UserWarning, match=r"the cache .* is damaged: made again"):
        np.testing.assert_array_equal(read_images(root, FILES, 4, "squash").images, expected)
    rows = np.load(digests)
    rows[0] = rows[1]  # two files would count as copies
    np.save(digests, rows)
    with pytest.warns(UserWarning, match=r"the cache .* is damaged: made again"):
        assert read_images(root, FILES, 4, "squash").group.tolist() == [0, 1, 1, 3]


def test_without_a_cache_images_stay_in_memory(root):
    (root / ".cache").write_text("in the way")
    with pytest.warns(UserWarning, match="cannot cache decoded images"):
        decoded = read_images(root, FILES, 4, "squash")
    assert not isinstance(decoded.images, np.memmap)
    assert decoded.images[:, :, 0, 0].tolist() == [[0, 100, 0], [0, 0, 200], [0, 0, 200], [50, 0, 0]]
    assert decoded.group.tolist() == [0, 1, 1, 3]


def test_squash_and_crop(tmp_path):
    image = np.zeros((8, 24, 3), dtype=np.uint8)  # height 8, width 24: red, green, blue thirds
    for third in range(3):
        image[:, 8 * third : 8 * third + 8, third] = 255
    Image.fromarray(image).save(tmp_path / "wide.png")
    cropped = read_images(tmp_path, ["wide.png"], 8, "crop").images[0]
    np.testing.assert_array_equal(cropped, image[:, 8:16].transpose(2, 0, 1))
    squashed = read_images(tmp_path, ["wide.png"], 8, "squash").images[0]
    expected = Image.fromarray(image).resize((8, 8), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(squashed, np.asarray(expected).transpose(2, 0, 1))
    assert squashed[0, 4, 0] > 200  # red is still there
    assert squashed[2, 4, 7] > 200  # and so is blue


def test_crop_is_torchvisions(tmp_path):
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

    noise = np.random.default_rng(0).integers(0, 256, (37, 50, 3), dtype=np.uint8)
    for name, pixels in (("wide.png", noise), ("tall.png", noise.transpose(1, 0, 2))):
        Image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / name)
        expected = Compose([Resize(16, InterpolationMode.BICUBIC), CenterCrop(16)])(Image.open(tmp_path / name))
        got = read_images(tmp_path, [name], 16, "crop").images[0]
        np.testing.assert_array_equal(got, np.asarray(expected).transpose(2, 0, 1))


def test_other_modes_become_rgb(tmp_path):
    write(tmp_path / "grey.png", 77, mode="L")
    write(tmp_path / "alpha.png", (1, 2, 3, 0), mode="RGBA")
    images = read_images(tmp_path, ["grey.png", "alpha.png"], 8, "squash").images
    assert images[:, :, 0, 0].tolist() == [[77, 77, 77], [1, 2, 3]]


def test_sixteen_bits_of_grey_become_eight(tmp_path):
    levels = np.array([[0, 128, 129, 257, 30000, 65406, 65407, 65535]], dtype=np.uint16).repeat(8, axis=0)
    Image.fromarray(levels).save(tmp_path / "grey.png")
    Image.fromarray(levels).save(tmp_path / "grey.tif")
    for image in read_images(tmp_path, ["grey.png", "grey.tif"], 8, "squash").images:
        assert image[0, 0].tolist() == [0, 0, 1, 1, 117, 254, 255, 255]
        assert (image == image[0, 0]).all()


@pytest.mark.parametrize("name", ["x.bmp", "x.gif", "x.tif", "x.webp", "x.jfif", "x.jpg"])
def test_other_formats_are_read(root, name):
    write(root / "train/cat/x.png", (255, 255, 255))
    saved = {"x.jfif": "JPEG", "x.jpg": "GIF"}.get(name)  # some releases have GIFs of that name
    Image.open(root / "train/cat/x.png").save(root / "train/cat" / name, format=saved)
    (root / "train/cat/x.png").unlink()
    files, _ = list_class_folders(root, "train", [["cat"], ["dog"]])
    assert files[2] == f"train/cat/{name}"
    assert read_images(root, files, 4, "squash").images[2].min() >= 254


@pytest.mark.parametrize("content", [b"", b"no image at all", None])
def test_a_damaged_image_is_named(root, content):
    damaged = root / FILES[2]
    if content is None:  # cut off in the middle
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(damaged)
        content = damaged.read_bytes()[:4000]
    damaged.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"cannot decode the image .*c\.png"):
        read_images(root, FILES, 4, "squash")
    assert list((root / ".cache").iterdir()) == []


def test_nothing_outside_of_the_root_is_read(root, tmp_path):
    write(tmp_path / "private/secret.png")
    (root / "train/dog/link.png").symlink_to(tmp_path / "private/secret.png")
    (root / "train/away").symlink_to(tmp_path / "private")
    for file in (
        "train/dog/link.png",
        "train/away/secret.png",
        "../private/secret.png",
        str(tmp_path / "private/secret.png"),
    ):
        with pytest.raises(ConfigurationError, match="leads outside of the data set's folder"):
            read_images(root, [file], 4, "squash")
    with pytest.raises(ConfigurationError, match=r"cannot read the image .*gone\.png: No such file"):
        read_images(root, ["train/dog/gone.png"], 4, "squash")
    for name in ("train/dog/\0.png", "train/dog/\ud800.png"):
        with pytest.raises(ConfigurationError, match="is no name of an image"):
            read_images(root, [name], 4, "squash")


def test_links_inside_of_the_root_and_a_linked_root_are_read(root, tmp_path):
    (root / "train/dog/link.png").symlink_to(root / "train/cat/a.PNG")
    (tmp_path / "data").symlink_to(root)
    decoded = read_images(tmp_path / "data", ["train/dog/link.png", "train/cat/a.PNG"], 4, "squash")
    assert decoded.group.tolist() == [0, 0]


def test_size_must_be_positive(root):
    with pytest.raises(ConfigurationError, match="size must be at least 1 pixel, got 0"):
        read_images(root, FILES, 0, "squash")


def test_folders_of_other_classes_and_images_one_level_down(root):
    assert list_class_folders(root, "train", [["dog"]], others=True)[0] == FILES[2:]
    with pytest.raises(ConfigurationError, match="missing: emu; unknown: none"):
        list_class_folders(root, "train", [["dog"], ["emu"]], others=True)
    write(root / "deep/cat/images/a.png")
    files, labels = list_class_folders(root, "deep", [["cat"]], inside="images")
    assert (files, labels.tolist()) == (["deep/cat/images/a.png"], [0])
    with pytest.raises(ConfigurationError, match=r"cannot read the image folder .*deep/cat/none: No such file"):
        list_class_folders(root, "deep", [["cat"]], inside="none")


def test_training_copies_of_test_images_are_left_out_of_the_pool(root):
    decoded = read_images(root, FILES, 4, "squash")
    labels, domains = np.array([0, 0, 1, 1]), np.arange(4)
    pool = without_copies(decoded, labels, np.array([False, False, True, False]), domains)
    assert pool.domains.tolist() == [0, 2, 3]
    assert pool.labels.tolist() == [0, 1, 1]
    assert pool.group.tolist() == [0, 1, 3]
    assert pool.images[:, 2, 0, 0].tolist() == [0, 200, 0]
    pool = without_copies(decoded, labels, np.array([False, True, True, False]), domains)
    assert pool.images.data_ptr() == torch.from_numpy(decoded.images).data_ptr()  # nothing is copied
