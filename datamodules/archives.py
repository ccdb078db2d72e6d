"""Official archives: downloaded with their checksum, and unpacked into one folder and nowhere else.

pooch and torchvision's helpers would fetch and check as well; neither bounds what an archive may unpack to, nor puts it
there whole or not at all, and a failure has to be one line that says where to put the file by hand.
"""

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

#: Images hardly shrink in an archive: one that unpacks to more than so many times its size holds something else.
LARGEST_RATIO = 10
#: Bytes that may be unpacked besides, since lists in a small archive do shrink.
ALWAYS_ALLOWED = 10**7


def fetch(url: str, to: Path, md5: str) -> None:
    """Download a file. ``to`` appears only when it is complete and has the expected MD5 sum.

    Raises:
        ConfigurationError: no answer, an interrupted transfer, or other content than expected.
    """
    temporary = None
    digest = hashlib.md5(usedforsecurity=False)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=to.parent, prefix=f".{to.name}.", suffix=".tmp")
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
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def unpack_folder(archive: Path, folder: str, to: Path, wanted: Callable[[PurePosixPath], bool]) -> None:
    """Unpack one top folder of a zip archive as ``to``, which appears only when all of it is there.

    Args:
        archive: the zip file.
        folder: name of the top folder in it.
        to: what that folder becomes; must not exist.
        wanted: which files to unpack, by their path in the archive.

    Raises:
        ConfigurationError: no zip file, damaged, encrypted, too large, without what is wanted, or with a path that
            leads out of its folder; or there is no writing beside ``to``.
    """
    beside = None
    try:
        beside = Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}.", suffix=".tmp"))
        with zipfile.ZipFile(archive) as opened:
            for member in (members := _members(opened, archive, folder, wanted)):
                opened.extract(member, beside)
        if not members:
            raise ConfigurationError(
                f"{archive} holds no folder {folder}, or no image in it: this is not the official archive; remove it "
                "and download it again"
            )
        (beside / folder).rename(to)
    except ConfigurationError:
        raise
    except Exception as error:  # damaged archives fail in many ways
        raise ConfigurationError(
            f"cannot unpack {archive} into {to.parent} ({error}); if it is damaged, remove it and download it again"
        ) from error
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)


def _members(
    opened: zipfile.ZipFile, archive: Path, folder: str, wanted: Callable[[PurePosixPath], bool]
) -> list[zipfile.ZipInfo]:
    """The files below ``folder`` that are wanted; refuses what no official archive holds."""
    chosen = []
    for member in opened.infolist():
        path = PurePosixPath(member.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in member.filename:
            raise ConfigurationError(
                f"{archive} holds the path {member.filename!r}, which leads out of its folder: this is not the "
                "official archive; remove it and download it again"
            )
        if not member.is_dir() and path.parts[:1] == (folder,) and len(path.parts) > 1 and wanted(path):
            chosen.append(member)
    if any(member.flag_bits & 1 for member in chosen):
        raise ConfigurationError(f"{archive} is encrypted, as no official archive is; remove it and download it again")
    # What is read of a file is never more than the size that is said here.
    size = sum(member.file_size for member in chosen)
    allowed = ALWAYS_ALLOWED + LARGEST_RATIO * archive.stat().st_size
    if size > allowed:
        raise ConfigurationError(
            f"{archive} unpacks to {size} bytes, more than {allowed}, as images would not: this is not the official "
            "archive; remove it and download it again"
        )
    return chosen
