"""Files that are written whole or not at all, and files of others, which are read with care."""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from benchmark.errors import ConfigurationError

NO_FILE = "it is no regular file"

#: Bytes of memory that the values of a JSON text may take, by a rough guess that is rather too high.
MOST_MEMORY = 2 * 10**9


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content becomes the file, so that it is there whole or not at all, also after a power cut.

    Raises:
        ConfigurationError: the file cannot be written: no space, no permission, its folder was removed; or its place is
            taken by what is no regular file, such as a device.
    """
    temporary = path
    try:
        check_replaceable(path)
        remove_unlocked(path.parent, re.compile(re.escape(f".{path.name}.") + r"\d+\.tmp"))
        with begun(path) as stream:
            temporary = Path(stream.name)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            os.replace(temporary, path)  # while it is locked: another process removes what is not
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary != path:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def begun(path: Path) -> BinaryIO:
    """Open a file of a name that no other process has, beside the one that it becomes, and lock it while it is open.

    Process ids would not do: two containers that share a folder may have the same.

    Args:
        path: that it becomes.

    Returns:
        The open file ``.NAME.DIGITS.tmp``.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        stream = path.with_name(f".{path.name}.{secrets.randbits(62)}.tmp").open("xb")
        with contextlib.suppress(OSError):  # a file system without locks, where nothing is removed either
            fcntl.flock(stream, fcntl.LOCK_EX)
        if os.fstat(stream.fileno()).st_nlink:
            return stream
        stream.close()  # another process took it for a killed one's before it was locked


def remove_unlocked(folder: Path, name: re.Pattern[str]) -> None:
    """Remove the files of such names that killed processes were writing; a live one has locked what it writes."""
    try:
        entries = [*os.scandir(folder)]
    except OSError:  # there is none, or none that can be read
        return
    for entry in entries:
        if not name.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):  # it is locked, gone already, or somebody else's
            descriptor = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(descriptor)


def check_replaceable(path: Path) -> None:
    """Refuse to write a file where something stands that is no regular file, and no link to one.

    Raises:
        OSError: it is a folder, a device, a FIFO or a socket.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_regular(os.stat(path).st_mode)


def open_regular(path: str | Path, links: bool = False) -> BinaryIO:
    """Open a file to read that others may have made; nothing is waited for.

    Args:
        path: of the file.
        links: follow a link, which the user has named.

    Raises:
        OSError: it cannot be opened, or is a link, a folder, a FIFO, a socket or a device.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.ELOOP, "it is a link") from None
        if error.errno == errno.ENXIO:  # a socket
            raise OSError(errno.ENXIO, NO_FILE) from None
        raise
    try:
        _check_regular(os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | Path, most: int, links: bool = False) -> bytes:
    """The content of a file that others may have made.

    Args:
        path: of the file.
        most: bytes that it may have.
        links: as in :func:`open_regular`.

    Raises:
        OSError: as :func:`open_regular`, or it has more bytes.
    """
    with open_regular(path, links) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes; at most {most:,} are read")
        return stream.read(size)


def reason(error: Exception) -> str:
    """Return the reason of a file error, without the error's number and the file's name."""
    return getattr(error, "strerror", None) or str(error)


def _check_regular(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, NO_FILE)


def check_no_links(folder: Path) -> None:
    """Refuse a folder of ours that another has filled with what leads elsewhere.

    The folder itself may be a link. In it may be files, folders, and below one of its folders links that stay in that
    one, as W&B makes them.

    Raises:
        ConfigurationError: another link, or a FIFO, a socket or a device, lies in it.
    """
    below = [folder]
    try:
        while below:
            with os.scandir(below.pop()) as entries:
                for entry in entries:
                    mode, path = entry.stat(follow_symlinks=False).st_mode, Path(entry.path)
                    if stat.S_ISDIR(mode):
                        below.append(path)
                    elif not stat.S_ISREG(mode) and not (stat.S_ISLNK(mode) and _is_harmless(path, folder)):
                        kind = "a link that leads elsewhere" if stat.S_ISLNK(mode) else "no file and no folder"
                        raise ConfigurationError(
                            f"{folder} is not used: {path} is {kind}, which no run makes; remove it, or copy there "
                            "what it stands for"
                        )
    except (FileNotFoundError, NotADirectoryError):
        return  # what is not there leads nowhere
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be used: {error.strerror or error}") from error


def _is_harmless(link: Path, folder: Path) -> bool:
    """Return whether a link may stay in ``folder``: it stays within the same direct subfolder, or is a log of W&B.

    W&B puts a link to its service's log, in the home folder, into ``wandb/*run-*/logs``; each process makes a new one.
    """
    parts = link.relative_to(folder).parts
    if len(parts) == 4 and parts[::2] == ("wandb", "logs") and "run-" in parts[1]:
        return True
    return len(parts) > 1 and Path(os.path.realpath(link)).is_relative_to(os.path.realpath(folder / parts[0]))


def refuse_link(folder: Path) -> None:
    """Refuse a link instead of a folder, where the user has named a folder above it and not the link itself.

    Raises:
        ConfigurationError: it is one.
    """
    if folder.is_symlink():
        raise ConfigurationError(f"{folder} is a link, and is not followed; put there the folder that it stands for")


def make_folder(path: Path) -> Path:
    """Make a folder, and those above it, where they are missing; returns it.

    Raises:
        ConfigurationError: it cannot be made: no permission, or a file has its name.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"the folder {path} cannot be made: {error.strerror or error}") from error
    return path


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all (:func:`replacing`)."""
    with replacing(path) as stream:
        stream.write(content)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically (temporary file in the same folder, fsync, ``os.replace``)."""
    write_bytes(path, text.encode())


def json_bytes(value: Any) -> bytes:
    """Spell JSON with its keys sorted. NaN and infinity are refused: they are not JSON.

    Raises:
        ValueError: a number is not finite.
    """
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, as :func:`json_bytes` spells it."""
    write_bytes(path, json_bytes(value))


def parse_json(content: bytes) -> Any:
    """A JSON value.

    Raises:
        ValueError: it is none, holds NaN or infinity, is nested too deeply, or its values would take more than
            :data:`MOST_MEMORY`.
    """
    inner = sum(map(content.count, (b"[", b"{", b":")))
    if len(content) + 50 * content.count(b",") + 100 * inner > MOST_MEMORY:
        raise ValueError("it holds more values than there is memory for")
    try:
        return json.loads(content, parse_constant=_not_json)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _not_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")
