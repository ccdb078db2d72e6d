"""Features on disk: what frozen parts make of a data set's images, for all runs that make the same."""

import hashlib
import logging
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import Buffer

from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.files import make_folder, open_regular, replacing
from benchmark.locks import FileLock
from benchmark.paths import user_path

log = logging.getLogger(__name__)

#: Bytes of images that are hashed at once.
TOGETHER = 2**24
#: Seconds between two looks whether another process has made the features.
PAUSE = 0.2


class FeatureFile:
    """The file of one set of features; safetensors, which processes of one machine map together.

    Its name is a hash of the images' pixels and of the features of the first batch, bit for bit. These are made anew in
    each run, so that other weights, settings, code, processors or libraries have another file.

    Args:
        folder: of the files, made where it is missing.
        images: stored images, uint8 [n, 3, h, w].
        rows: which of them have features, in their order, int64 [m].
        first: features of the first batch of them, per name [B, ...].
    """

    def __init__(self, folder: str, images: Tensor, rows: np.ndarray, first: Values) -> None:
        digest = hashlib.blake2b(digest_size=16)
        digest.update(str(images.shape[1:]).encode())
        together = max(1, TOGETHER // images[0].numel())
        for start in range(0, len(rows), together):
            digest.update(_bytes(images[torch.from_numpy(rows[start : start + together])]))
        for name, value in sorted(first.items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(_bytes(value))
        self.path = make_folder(user_path(folder)) / f"{digest.hexdigest()}.safetensors"
        self._form = {name: ((len(rows), *value.shape[1:]), value.dtype) for name, value in first.items()}

    def read(self) -> Values | None:
        """Return the features, per name [m, ...]; None where there is no file of them, or a damaged one."""
        try:
            open_regular(self.path, links=True).close()
            with safe_open(self.path, "pt") as opened:
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
                sums = opened.metadata()
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError):
            found, sums = {}, None
        if {name: (tuple(v.shape), v.dtype) for name, v in found.items()} == self._form and sums == _sums(found):
            return found
        log.warning("%s is damaged: its features are made again", self.path)
        return None

    @contextmanager
    def made_once(self) -> Iterator[None]:
        """Let one process at a time read or make the features, so that runs started together make them once.

        A process that ends, however it ends, makes way for the next. Where no lock can be had, nobody waits.
        """
        try:
            lock = self._lock()
        except ConfigurationError as error:
            log.info("  runs that start together may each make these features: %s", error)
            yield
            return
        try:
            yield
        finally:
            with suppress(OSError):
                lock.path.unlink()
            lock.release()

    def _lock(self) -> FileLock:
        """Wait until no other process has the lock, and take it."""
        path, told = self.path.with_suffix(".lock"), False
        while not (lock := FileLock(path)).acquire():
            if not told:
                log.info("  waiting for another run, which reads or makes the same (%s)", path)
                told = True
            time.sleep(PAUSE)
        return lock

    def write(self, made: Values) -> None:
        """Write the features, per name [m, ...]; the file is there whole or not at all, for example on a full disk."""
        there = {name: value.cpu() for name, value in made.items()}
        try:
            with replacing(self.path) as stream:
                save_file(there, stream.name, _sums(there))
            log.info("  cached in %s", self.path)
        except (ConfigurationError, SafetensorError) as error:  # the run goes on without the file
            log.warning("%s is not written, and other runs make these features anew: %s", self.path, error)


def _bytes(value: Tensor) -> Buffer:
    """Return the bytes of a tensor in host memory, without a copy where it lies in one piece there."""
    return cast(Buffer, value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _sums(values: Values) -> dict[str, str]:
    """Return CRC-32 of each tensor, against damage."""
    return {name: f"{zlib.crc32(_bytes(value)):08x}" for name, value in values.items()}
