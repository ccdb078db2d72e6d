"""Official archives: downloaded with their checksum, and unpacked into one folder and nowhere else."""

import hashlib
import http.client
import os
import shutil
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from benchmark.errors import ConfigurationError

BLOCK = 1 << 20


def fetch(url: str, to: Path, md5: str) -> None:
    """Download a file. ``to`` appears only when it is complete and has the expected MD5 sum.

    Raises:
        ConfigurationError: no answer, an interrupted transfer, or other content than expected.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=to.parent, prefix=f".{to.name}.", suffix=".tmp")
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(url, timeout=60) as answer:
            while block := answer.read(BLOCK):
                file.write(block)
                digest.update(block)
        if digest.hexdigest() != md5:
            raise ConfigurationError(
                f"{url} has the MD5 sum {digest.hexdigest()}, expected is {md5}: the transfer was damaged or the file "
                f"was changed; get the file from elsewhere and put it at {to}"
            )
        os.chmod(temporary, 0o644)
        os.replace(temporary, to)
    except (OSError, http.client.HTTPException) as error:
        raise ConfigurationError(
            f"cannot download {url} ({error}); download it by other means and put it at {to}"
        ) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def unpack_folder(archive: Path, folder: str, to: Path, wanted: Callable[[PurePosixPath], bool]) -> None:
    """Unpack one top folder of a zip archive as ``to``, which appears only when all of it is there.

    Args:
        archive: the zip file.
        folder: name of the top folder in it.
        to: what that folder becomes; must not exist.
        wanted: which files to unpack, by their path in the archive.

    Raises:
        ConfigurationError: no zip file, damaged, without this folder, or with a path that leads out of it.
    """
    beside = Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}.", suffix=".tmp"))
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [member for member in opened.infolist() if not member.is_dir()]
            for member in members:
                path = PurePosixPath(member.filename)
                if path.is_absolute() or ".." in path.parts or "\\" in member.filename:
                    raise ConfigurationError(
                        f"{archive} holds the path {member.filename!r}, which leads out of its folder: this is not the "
                        "official archive; remove it and download it again"
                    )
                if path.parts[:1] == (folder,) and wanted(path):
                    opened.extract(member, beside)
        if not (beside / folder).is_dir():
            raise ConfigurationError(f"{archive} holds no folder {folder}: this is not the official archive")
        (beside / folder).rename(to)
    except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError) as error:
        raise ConfigurationError(
            f"cannot unpack {archive} ({error}); if it is damaged, remove it and download it again"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
