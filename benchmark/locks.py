"""One process at a time: locks that the kernel frees when their last holder ends, however it ends.

filelock does as much, and does not say who holds a lock, nor hands it on to the processes of a run.
"""

import fcntl
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmark.errors import ConfigurationError
from benchmark.files import make_folder

#: What a lock's file holds: nothing, or a state and who had it.
OWN_TEXT = re.compile(r"\Z|\w+: process \d+ on ")


class FileLock:
    """An advisory lock on a file, which says who has it.

    Processes that inherit the descriptor hold the lock too, until the last of them ends.

    Args:
        path: the file; it is made, and so is its folder.

    Raises:
        ConfigurationError: it can't be made, or something else than a lock has its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path.parent)
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if path.is_symlink():
                raise self._no_lock() from None
            raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode) or not OWN_TEXT.match(self.read()):
            os.close(self.descriptor)
            raise self._no_lock()

    def _no_lock(self) -> ConfigurationError:
        return ConfigurationError(f"{self.path} is no lock of a run, and would be written over; move it away")

    def acquire(self) -> bool:
        """Take the lock if it is free, else let go of the file.

        Raises:
            ConfigurationError: the file system has no locks.
        """
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.descriptor)
            return False
        except OSError as error:
            os.close(self.descriptor)
            raise ConfigurationError(
                f"{self.path} cannot be locked ({error.strerror or error}): give a folder on a file system with locks"
            ) from error
        if os.fstat(self.descriptor).st_nlink == 0:  # whoever held it removed it: the next process makes another
            os.close(self.descriptor)
            return False
        return True

    def take(self, refusal: Callable[[str], str]) -> None:
        """Take the lock and note this process.

        Args:
            refusal: makes the line of an error of who holds the lock, such as ``process 7 on host``.

        Raises:
            ConfigurationError: another process has it, or the file system has no locks.
        """
        holder = self.read().partition(":")[2].strip() or "another process"
        if not self.acquire():
            raise ConfigurationError(refusal(holder))
        with self.released_on_error():
            self.write("held")

    def read(self) -> str:
        """Return the text that was written last; empty for a new file."""
        return os.pread(self.descriptor, 4096, 0).decode(errors="replace")

    def write(self, state: str, more: str = "") -> None:
        """Replace the file's text by a state, this process and a further line.

        Raises:
            ConfigurationError: it cannot be written.
        """
        text = f"{state}: process {os.getpid()} on {socket.gethostname()}\n{more}\n"
        try:
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, text.encode()[:4096], 0)
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def release(self) -> None:
        """Let go of the file, and of the lock unless a child holds it."""
        os.close(self.descriptor)

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Let go of the lock if an error comes out of what is done inside."""
        try:
            yield
        except BaseException:
            self.release()
            raise
