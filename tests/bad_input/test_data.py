"""Data folders, images and archives."""

import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import refusal
from federation import CONF, build, fit
from PIL import Image

from benchmark.errors import ConfigurationError
from benchmark.run.cli import main
from datamodules import pixels
from datamodules.domainnet import DomainNet10
from datamodules.folders import list_class_folders, read_images, without_copies
from datamodules.partition import ClientSplits, Partition
from datamodules.source import ImagePool, ImageSource

ROOT = Path("pictures")


class Pictures(ImageSource):
    """Folders of cats and dogs; every third image is a test image."""

    class_names = ("cat", "dog")

    def __init__(self, size: int = 16) -> None:
        self.size = size

    def load(self) -> ImagePool:
        """Read them."""
        files, labels = list_class_folders(ROOT, ".", [["cat"], ["dog"]])
        decoded = read_images(ROOT, files, self.size, "squash")
        return without_copies(decoded, labels, np.arange(len(labels)) % 3 == 0, np.zeros_like(labels))


class Gray(Pictures):
    def load(self) -> ImagePool:
        pool = super().load()
        return replace(pool, images=pool.images[:, :1])


class FewerLabels(Pictures):
    def load(self) -> ImagePool:
        pool = super().load()
        return replace(pool, labels=pool.labels[:-1])


class NamelessLabels(Pictures):
    def load(self) -> ImagePool:
        pool = super().load()
        return replace(pool, labels=pool.labels + 1)


class NumpyLabels(Pictures):
    def load(self) -> ImagePool:
        pool = super().load()
        return replace(pool, labels=pool.labels.numpy())


class FloatLabels(Pictures):
    def load(self) -> ImagePool:
        pool = super().load()
        return replace(pool, labels=pool.labels.float())


class NumberedTest(Pictures):
    def load(self) -> ImagePool:
        pool = super().load()
        return replace(pool, test=pool.test.long())


class InParts(Pictures):
    def load(self) -> ImagePool:
        return {"images": super().load().images}


class NotThere(Pictures):
    def load(self) -> ImagePool:
        np.load("labels.npy")
        return super().load()


class Nameless(ImageSource):
    def load(self) -> ImagePool:
        return Pictures().load()


class Twice(Pictures):
    class_names = ("cat", "cat")


class Empty(Pictures):
    def load(self) -> ImagePool:
        pool = super().load()
        return replace(pool, **{field.name: getattr(pool, field.name)[:0] for field in fields(pool)})


class NamedInAWord(Pictures):
    class_names = "ab"


class NamedByANumber(Pictures):
    class_names = ("cat", 1)


class Nothing(Partition):
    """Gives all test images to the first client."""

    def __init__(self, num_clients: int = 2) -> None:
        self.num_clients = num_clients

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Every second training image for each."""
        train, test = np.flatnonzero(~pool.test.numpy()), np.flatnonzero(pool.test.numpy())
        return ClientSplits([train[::2], train[1::2]], [test, test[:0]])


class Tuple(Partition):
    """Returns the lists themselves."""

    def __init__(self, num_clients: int = 2) -> None:
        self.num_clients = num_clients

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Every second image for each."""
        train, test = np.flatnonzero(~pool.test.numpy()), np.flatnonzero(pool.test.numpy())
        return [train[::2], train[1::2]], [test[::2], test[1::2]]


class OneClient(Partition):
    """Forgets all clients but the first."""

    def __init__(self, num_clients: int = 2) -> None:
        self.num_clients = num_clients

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """All images for one."""
        return ClientSplits([np.flatnonzero(~pool.test.numpy())], [np.flatnonzero(pool.test.numpy())])


class InTables(Tuple):
    """Gives images as rows of one column."""

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Every second image for each."""
        train, test = super().assign(pool, rng)
        return ClientSplits([rows[:, None] for rows in train], test)


class ByMasks(Tuple):
    """Gives masks in place of numbers."""

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Every second image for each."""
        train, test = super().assign(pool, rng)
        return ClientSplits([rows > 3 for rows in train], test)


class NamedTesters(Tuple):
    """Names its testers."""

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Every second image for each."""
        return ClientSplits(*super().assign(pool, rng), testers=["a"])


class NamedClients(Tuple):
    """Names its clients where a function is expected."""

    def __init__(self, num_clients: int = 2) -> None:
        self.num_clients = num_clients
        self.client_names = ["a", "b"]


class NumberedClients(Tuple):
    """Names its clients by numbers."""

    def client_names(self, source: ImageSource) -> list[str]:
        """Numbers."""
        return [0, 1]


class Renamed(Partition):
    """Keeps its argument under another name."""

    def __init__(self, num_clients: int = 2, ratio: float = 0.5) -> None:
        self.num_clients = num_clients
        self.half = ratio

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Every second image for each."""
        train, test = np.flatnonzero(~pool.test.numpy()), np.flatnonzero(pool.test.numpy())
        return ClientSplits([train[::2], train[1::2]], [test[::2], test[1::2]])


DATA = [f"--data.source={__name__}.Pictures", "--data.partition=IID", "--data.partition.num_clients=2"]
DATA += ["--data.clients_per_round=2"]
BASE = ["--config", str(CONF / "base.yaml"), "--run_dir=run"]
CNN = ["--config", str(CONF / "FedAvg.yaml")]
EMBEDDED = ["--config", str(CONF / "HeadTune.yaml")]
EMBEDDED += [f"--model.init_args.backbone.init_args.{given}" for given in ("name=micro_vit", "weights=embedded")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["source", "Gray"],
            "a source's images must be uint8 [n, 3, H, W], got torch.uint8 (18, 1, 16, 16);",
        ),
        (["source", "FewerLabels"], "a source has 18 rows of images, and 17 labels"),
        (
            ["source", "NamelessLabels"],
            "NamelessLabels has labels from 1 to 2, and names for 2 of them; expected 0 to 1",
        ),
        (["source", "NumpyLabels"], "a source's labels must be a torch tensor, got ndarray; torch.as_tensor makes one"),
        (["source", "FloatLabels"], "a source's labels must be int64 [n], got torch.float32 (18,)"),
        (["source", "NumberedTest"], "a source's test must be bool [n], got torch.int64 (18,)"),
        (["source", "InParts"], "InParts.load must return an ImagePool, got dict"),
        (
            ["source", "NotThere"],
            "NotThere.load cannot read its data: [Errno 2] No such file or directory: 'labels.npy'",
        ),
        (["source", "Nameless"], "Nameless has no class_names; a source sets them, in the class or in its constructor"),
        (["source", "Twice"], "Twice has 'cat' twice in its class_names; give each a name of its own"),
        (["source", "Empty"], "Empty.load gives no images, expected at least one: see that it reads the right folder"),
        (["source", "NamedInAWord"], "NamedInAWord has the text 'ab' as its class_names; expected a tuple of texts"),
        (["source", "NamedByANumber"], "NamedByANumber has 1 (int) in its class_names; expected a tuple of texts"),
        (
            ["partition", "Nothing"],
            "1 of 2 clients have no test images (first: client 1); use fewer clients, or let Nothing.assign give every",
        ),
        (["partition", "Tuple"], "Tuple.assign must return ClientSplits(train, test), got tuple"),
        (
            ["partition", "InTables"],
            "InTables.assign gives client 0 train images as int64 of shape (6, 1); expected int64 [n], numbers of",
        ),
        (["partition", "ByMasks"], "ByMasks.assign gives client 0 train images as bool of shape (6,); expected int64"),
        (["partition", "NamedTesters"], "NamedTesters.assign gives testers=['a']; expected how many there are"),
        (
            ["partition", "NamedClients"],
            "NamedClients.client_names is a list, not a function; write def client_names(self, source) that returns a",
        ),
        (["partition", "NumberedClients"], "NumberedClients.client_names must return a list of texts, one for each cl"),
        (["partition", "OneClient"], "OneClient has given images to 1 clients, and there are 2; assign must return a"),
        (
            ["partition", "Renamed"],
            "Renamed must keep its argument ratio as self.ratio: the record and the manifest say",
        ),
    ],
)
def test_mistakes_in_a_source_or_a_partition_of_ones_own_are_told_in_a_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    part, name = arguments
    given = [f"--data.{part}={__name__}.{name}"]
    assert said in refused(capsys, *given)


@pytest.fixture(autouse=True)
def _pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine images of each class in ``pictures``."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in Pictures.class_names:
        (ROOT / name).mkdir(parents=True)
        for i in range(9):
            Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(ROOT / name / f"{i}.png")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, method: list[str] = CNN) -> str:
    """The line with which ``fit`` refuses these arguments."""
    return refusal.refused(capsys, main, ["fit", *BASE, *method, *DATA, *arguments])


def test_a_run_does_not_go_on_with_other_images(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *BASE, *CNN, *DATA, "--trainer.max_epochs=1"])
    Image.new("RGB", (16, 16)).save(ROOT / "cat/1.png")
    more = ["--trainer.max_epochs=2", "--ckpt_path=run/checkpoints/last.ckpt", "--run_dir=other"]
    assert "made with other images than this run reads" in refused(capsys, *more)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("normalize=imagenet", "data.transform.init_args.normalize=imagenet, but the backbone's weights were trained"),
        ("size=24", "data.transform.init_args.size=24, but the backbone takes 32 x 32 pixels"),
    ],
)
def test_data_and_backbone_agree(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    transform = ["--data.transform=ImageTransform", f"--data.transform.init_args.{argument}"]
    assert message in refused(capsys, *transform, method=EMBEDDED)


def test_images_are_resized_and_normalised_for_the_backbone() -> None:
    method, data = build("HeadTune", *DATA)
    assert data.transform.size is None
    fit(method, data, 0)
    assert (data.transform.size, data.transform.statistics) == (32, ((0.5,) * 3, (0.5,) * 3))


def _float(path: Path) -> None:
    Image.fromarray(np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)).save(path, format="TIFF")


def _postscript(path: Path) -> None:
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n%%EOF\n")


def _huge(path: Path) -> None:
    """13,000 x 13,000 pixels in 21 kB."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 13_000, 13_000, 1, 0, 0, 0, 0)
    body = b"IDAT" + zlib.compress(bytes(13_000 * 1626))
    parts = [struct.pack(">I", len(p) - 4) + p + struct.pack(">I", zlib.crc32(p)) for p in (header, body, b"IEND")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is no regular file, and so no image; remove it"),
        (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
        (Path.mkdir, "is no regular file"),
        (_float, "its pixels are numbers of mode F, of no known range"),
        (_postscript, "is damaged or no image (JPEG, PNG, BMP, GIF, TIFF, WEBP are read)"),
        (_huge, "is too large to decode (Image size (169000000 pixels) exceeds limit"),
        (
            lambda path: path.with_suffix(".heic").write_bytes(b""),
            "images of formats that are not read (first: x.heic)",
        ),
    ],
)
def test_files_that_are_no_images(
    make: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(ROOT / "dog/x.png")
    line = refused(capsys)
    assert message in line
    assert "pictures/dog" in line


def test_all_damaged_images_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("dog/x.png", "cat/y.png", "dog/z.png"):
        (ROOT / name).write_bytes(b"no image")
    line = refused(capsys)
    first, others = line.split(" (2 more of the ")
    assert "pictures/cat/y.png (its content is of no known format); it is damaged or no image" in first
    assert others.rstrip().endswith("cannot be read: pictures/dog/x.png, pictures/dog/z.png)")


def test_a_strip_is_not_blown_up(tmp_path: Path) -> None:
    Image.new("1", (100_000, 1)).save("x.png")
    with refusal.within(2), pytest.raises(ConfigurationError, match="too long a strip to resize its short side to 224"):
        read_images(tmp_path, ["x.png"], 224, "crop")


def test_names_need_not_be_utf8() -> None:
    os.rename(ROOT / "dog/3.png", os.fsencode(ROOT / "dog") + b"/\xff\xfe.png")
    main(["fit", *BASE, *CNN, *DATA, "--trainer.max_epochs=1"])
    assert Path("run/record.json").is_file()


def test_images_that_do_not_fit_into_memory() -> None:
    (ROOT / ".cache").write_text("in the way")
    with (
        pytest.warns(UserWarning, match="cannot cache"),
        pytest.raises(ConfigurationError, match=r"bytes, more memory than is free; take a smaller data\.source"),
    ):
        Pictures(size=10**6).load()


def test_no_memory_to_decode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(pixels, "_rgb", full)
    assert "pictures/cat/0.png is too large to decode (out of memory)" in refused(capsys)


@pytest.mark.parametrize(
    ("source", "names", "message"),
    [
        ("TinyImageNet", ["tiny-imagenet-200.zip"], "cannot unpack data/tiny-imagenet-200.zip into data (File is not"),
        ("DomainNet10", [f"domainnet/{name}.zip" for name in DomainNet10.domain_names], "clipart.zip holds no folder"),
    ],
)
def test_archives_that_are_none(
    source: str, names: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (Path("data") / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        if source == "TinyImageNet":
            path.write_bytes(b"no archive")
        else:  # a file where the folder should be
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr(path.stem, "")
    assert message in refused(capsys, f"--data.source={source}", "--data.source.root=data")
    assert sorted(path.suffix for path in Path("data").rglob("*") if path.is_file()) == [".zip"] * len(names)
