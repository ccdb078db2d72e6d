"""Decoded images on disk: where they are, what killed runs leave, and files that are no cache."""

import fcntl
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmark.records.hashes import config_hash
from datamodules.decoded_cache import DecodedCache, remove_unfinished, size_said
from datamodules.folders import read_images
from datamodules.own_images import ImageFolders

FILES = ["0.png", "1.png"]
KEY = "0123456789abcdef" * 2


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    root.mkdir()
    for number, file in enumerate(FILES):
        Image.new("RGB", (4, 4), (number + 1, 0, 0)).save(root / file)
    return root


def read(root: Path, cache: str | None = ".cache") -> list[int]:
    return read_images(root, FILES, 4, "squash", cache=cache).images[:, 0, 0, 0].tolist()


def test_what_killed_processes_were_writing_is_removed_and_nothing_else(root: Path, tmp_path: Path) -> None:
    cache, outside = root / ".cache", tmp_path / "outside"
    cache.mkdir()
    outside.write_text("mine")
    dead = [f".{KEY}.npy.abcd_123.tmp", f".{KEY}.digests.npy.abcd_123.tmp"]
    others = [f"{KEY}.npy", f".{KEY}.npy.tmp", f".{KEY}.npy.abcd_123.tmp2", ".thesis.npy.abcd_123.tmp", "a.tmp"]
    for name in dead + others:
        (cache / name).write_text(name)
    link, alive = cache / f".{KEY}.npy.linked__.tmp", cache / f".{KEY}.npy.alive___.tmp"
    link.symlink_to(outside)
    (cache / f".{KEY}.npy.folder__.tmp").mkdir()
    os.mkfifo(cache / f".{KEY}.npy.fifo____.tmp")
    alive.write_text("half")
    with alive.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        remove_unfinished(cache)
    kept = {*others, link.name, alive.name, f".{KEY}.npy.folder__.tmp", f".{KEY}.npy.fifo____.tmp"}
    assert set(os.listdir(cache)) == kept
    assert outside.read_text() == "mine"


def test_what_is_being_written_is_left_alone_and_would_be_removed_after_a_kill(root: Path) -> None:
    kept = DecodedCache(root / ".cache", KEY, (2, 3, 4, 4))
    with kept.writing():
        remove_unfinished(kept.folder)
        (name,) = os.listdir(kept.folder)  # locked
        content = (kept.folder / name).read_bytes()
    (kept.folder / name).write_bytes(content)  # as a kill leaves it
    assert read(root) == [1, 2]
    assert len(os.listdir(kept.folder)) == 4
    assert not [name for name in os.listdir(kept.folder) if name.endswith(".tmp")]


def test_an_array_that_is_removed_before_it_is_locked_is_begun_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, removed = fcntl.flock, []

    def after_another_looked(stream: Any, how: int) -> None:
        if how == fcntl.LOCK_EX and not removed:
            removed.append(stream.name)
            os.unlink(stream.name)
        lock(stream, how)

    monkeypatch.setattr(fcntl, "flock", after_another_looked)
    assert read(root) == [1, 2]
    assert len(removed) == 1
    assert len(os.listdir(root / ".cache")) == 2
    assert not any(name.endswith(".tmp") for name in os.listdir(root / ".cache"))


def _other_form(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, np.zeros((2, 3, 4, 4), np.uint8))


def _longer_than_its_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _of_objects(path: Path) -> None:
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path) -> None:
    elsewhere = path.parent.parent.parent / "elsewhere.npy"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("which", [0, 1], ids=["digests", "images"])
@pytest.mark.parametrize("spoil", [_other_form, _longer_than_its_file, _of_objects, _fifo, _link, _device])
def test_what_is_no_regular_cache_is_made_again(root: Path, spoil, which: int) -> None:
    assert read(root) == [1, 2]
    path = sorted((root / ".cache").iterdir())[which]
    assert ("digests" in path.name) == (which == 0)
    spoil(path)
    elsewhere = root.parent / "elsewhere.npy"
    before = elsewhere.read_bytes() if elsewhere.exists() else None
    assert read(root) == [1, 2]
    assert path.is_file()
    assert not path.is_symlink()
    assert (elsewhere.read_bytes() if elsewhere.exists() else None) == before


def test_a_cache_folder_that_is_a_link_is_not_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (root / ".cache").symlink_to(tmp_path / "home")
    with pytest.warns(UserWarning, match=r"\.cache is a link and is not followed: .* data\.source\.init_args\.cache"):
        assert read(root) == [1, 2]
    assert not [*(tmp_path / "home").iterdir()]


def test_where_decoded_images_are_and_how_large_is_said(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for did in ("written to", "read from"):
        caplog.clear()
        read(root)
        size = size_said(sum(path.stat().st_size for path in (root / ".cache").iterdir()))
        assert caplog.messages == [f"  decoded images {did} {root / '.cache'}: {size}"]


@pytest.mark.parametrize(("size", "said"), [(12, "0.0 kB"), (999_940, "999.9 kB"), (1_505_000_000, "1.5 GB")])
def test_sizes_are_said_in_a_fitting_unit(size: int, said: str) -> None:
    assert size_said(size) == said


def test_another_folder_holds_the_decoded_images_or_none(tmp_path: Path) -> None:
    root = tmp_path / "pets"
    for number in range(10):
        folder = root / "cat" if number % 2 else root / "dog"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / f"{number}.png")
    pools = []
    for cache in (str(tmp_path / "kept/here"), None, ".cache"):
        assert not (root / ".cache").exists()
        pools.append(ImageFolders("Pets", str(root), size=4, cache=cache).load().images.tolist())
    assert pools[0] == pools[1] == pools[2]
    assert [len(os.listdir(folder)) for folder in (tmp_path / "kept/here", root / ".cache")] == [2, 2]


def test_where_decoded_images_are_changes_no_hash_of_a_configuration() -> None:
    before = {"data": {"source": {"class_path": "a.A", "init_args": {"size": 4}}}}
    now = {"data": {"source": {"class_path": "a.A", "init_args": {"size": 4, "cache": "/tmp", "bits": None}}}}
    assert config_hash(now) == config_hash(before)
    now["data"]["source"]["init_args"]["bits"] = 12
    assert config_hash(now) != config_hash(before)
