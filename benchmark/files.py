"""Files that are written whole or not at all."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from benchmark.errors import ConfigurationError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content becomes the file, so that it is there whole or not at all, also after a power cut.

    Raises:
        ConfigurationError: the file cannot be written: no space, no permission, its folder was removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


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
