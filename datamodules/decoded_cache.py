"""Decoded images on disk: arrays that all processes map, in files that are whole or not there.

Files in a data set's folder may come from anywhere: a cache is a regular file of the right form, or none.
"""

import os
import re
import stat
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmark.files import begun, remove_unlocked
from benchmark.paths import user_path
from datamodules.pixels import ABOUT, DIGEST_BYTES

#: Seen from a data set's folder.
BESIDE = ".cache"
#: An array that is being written; earlier versions had eight letters for the digits.
UNFINISHED = re.compile(r"\.[0-9a-f]{32}(\.digests)?\.npy\.(\d+|\w{8})\.tmp", re.ASCII)

Images = NDArray[np.uint8]
About = NDArray[np.void]


@dataclass(frozen=True)
class DecodedCache:
    """The decoded images of one list of files.

    Attributes:
        folder: of this cache and of others.
        key: of the files and of how they are decoded.
        shape: of the images.
    """

    folder: Path
    key: str
    shape: tuple[int, ...]

    def read(self) -> tuple[Images, About] | None:
        """Images, and what is remembered of each; None where they are not there or damaged.

        What killed processes left in the folder is removed first.
        """
        remove_unfinished(self.folder)
        images = _mapped(self._images, np.dtype(np.uint8), self.shape)
        about = _mapped(self._about, ABOUT, (self.shape[0] + 1,))
        if images is None or about is None:
            return None
        if np.array_equal(about["digest"][-1], _sums(images, about[:-1])):
            return images, about[:-1]
        warnings.warn(f"the cache {self._images} is damaged: made again from the images", stacklevel=4)
        return None

    @contextmanager
    def writing(self) -> Iterator[tuple[Images, About]]:
        """Arrays to fill, which become the cache when they are full.

        Raises:
            OSError: they cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        about = np.zeros(self.shape[0] + 1, dtype=ABOUT)
        with _replacing(self._images, np.dtype(np.uint8), self.shape) as images:
            yield images, about[:-1]
            about["digest"][-1] = _sums(images, about[:-1])
        with _replacing(self._about, ABOUT, about.shape) as target:
            target[:] = about

    @property
    def bytes(self) -> int:
        """The size of the files in bytes."""
        return sum(path.stat().st_size for path in (self._images, self._about))

    @property
    def _images(self) -> Path:
        return self.folder / f"{self.key}.npy"

    @property
    def _about(self) -> Path:
        return self.folder / f"{self.key}.digests.npy"


def cache_folder(root: Path, given: str | None) -> Path | None:
    """The folder of caches, or None where there is to be none.

    Args:
        root: the data set's folder.
        given: the folder, seen from ``root``; None: none.
    """
    if given is None:
        return None
    folder = root / user_path(given)
    # A link that came with the data set would have files written anywhere.
    if given == BESIDE and folder.is_symlink():
        warnings.warn(
            f"{folder} is a link and is not followed: decoded images are kept in memory; to keep them elsewhere, give "
            "the folder as data.source.init_args.cache, where the source has it",
            stacklevel=3,
        )
        return None
    return folder


def size_said(size: int) -> str:
    """A number of bytes, in words."""
    power = min(max(len(str(size)) - 1, 3) // 3, 4)
    return f"{size / 1000**power:.1f} {('', 'kB', 'MB', 'GB', 'TB')[power]}"


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes were writing; what a live one writes is locked by it."""
    remove_unlocked(folder, UNFINISHED)


def _sums(images: Images, about: About) -> Images:
    """CRC-32 of both, [DIGEST_BYTES]: against damage, at 3 GB/s."""
    sums = [zlib.crc32(images.data), zlib.crc32(np.ascontiguousarray(about).tobytes())]
    return np.frombuffer(np.array(sums, dtype="<u8").tobytes(), dtype=np.uint8, count=DIGEST_BYTES)


def _mapped(path: Path, kind: np.dtype, shape: tuple[int, ...]) -> NDArray | None:
    """The cached array, or None where there is no regular file of this form."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        # Copy-on-write: torch wants a writable array, the file never changes.
        array = np.lib.format.open_memmap(path, mode="c")
    except (OSError, ValueError, EOFError):
        return None
    fits = array.dtype == kind and array.shape == shape and array.flags.c_contiguous
    return array if fits else None


@contextmanager
def _replacing(path: Path, kind: np.dtype, shape: tuple[int, ...]) -> Iterator[NDArray]:
    """A mapped array to fill, which takes the place of ``path`` when it is full."""
    with begun(path) as stream:
        try:
            array = np.lib.format.open_memmap(stream.name, mode="w+", dtype=kind, shape=shape)
            # Claim the space now: writing to a map on a full disk kills the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(stream.fileno(), 0, os.fstat(stream.fileno()).st_size)
            yield array
            array.flush()
            os.chmod(stream.name, 0o644)
            os.replace(stream.name, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(stream.name)
            raise
