"""Image files that are to be classified: found, and decoded a few at a time as the run decoded its own."""

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmark.errors import ConfigurationError
from benchmark.files import read_regular, reason
from benchmark.predict.given import NEEDED, check_there
from benchmark.run.federation_file import FederationFacts
from datamodules.folders import NO_CLASSES, SUFFIXES, tell_of_16_bits, unread_in
from datamodules.pixels import ABOUT, Decoded, Decoding, decode
from datamodules.tables import read_table

#: Files that list images, in a column ``path`` as seen from their own folder.
LISTS = (".csv", ".tsv", ".parquet")
MOST_BYTES = 2**30
#: Files that are decoded at a time.
TOGETHER = 64


def list_files(given: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Return the image files that paths stand for, and what was passed over.

    Args:
        given: images; folders, of which all images below are taken, sorted; and lists of images, see :data:`LISTS`.

    Raises:
        ConfigurationError: there is nothing at a path, or no image.
    """
    files: list[Path] = []
    remarks: list[str] = []
    for path in given:
        if path.is_dir():
            found, unread = _below(path)
            if unread:
                remarks.append(
                    f"{len(unread)} images in {path} are of formats that are not read (first: {unread[0]}); convert "
                    "them to PNG or JPEG"
                )
            if not found:
                raise ConfigurationError(f"{path} holds no image ({', '.join(SUFFIXES)})")
            files += found
        elif path.suffix.lower() in LISTS:
            files += [path.parent / row["path"] for row in read_table(path, ("path",))]
        else:
            check_there(path)
            files.append(path)
    if not files:
        raise ConfigurationError(f"no image to classify; {NEEDED}")
    return files, remarks


def _below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the images below a folder, and those of formats that are not read, both sorted."""
    found: list[Path] = []
    unread: list[Path] = []

    def refuse(error: OSError) -> None:
        raise ConfigurationError(f"cannot read the image folder {error.filename}: {error.strerror}") from error

    for at, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name.casefold() not in NO_CLASSES]
        shown = [name for name in names if not name.startswith(".")]
        found += [Path(at, name) for name in shown if name.lower().endswith(SUFFIXES)]
        unread += [Path(at, name) for name in unread_in(Path(at), shown)]
    return sorted(found), sorted(unread)


def decoded(files: Sequence[Path], how: Decoding) -> Iterator[tuple[Path, NDArray[np.uint8] | str]]:
    """Yield each file with its pixels, uint8 [3, S, S], or the reason why it has none; a few are held at a time.

    After the last one a warning tells of values in 16 bits that are nearly black.
    """

    def read(path: Path) -> Decoded | str:
        try:
            return decode((str(path), read_regular(path, MOST_BYTES, links=True)), how)
        except ConfigurationError as error:
            return str(error)
        except (OSError, ValueError) as error:  # ValueError: a list can name what no file is called
            return f"cannot read the image {path}: {reason(error)}"

    about = np.zeros(len(files), ABOUT)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for start in range(0, len(files), TOGETHER):
            some = files[start : start + TOGETHER]
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                warnings.filterwarnings("ignore", "Corrupt EXIF data")
                made = list(threads.map(read, some))
            for row, (path, each) in enumerate(zip(some, made, strict=True), start=start):
                if not isinstance(each, str):
                    about[row] = each.about
                yield path, each if isinstance(each, str) else each.pixels
    if how.as_seen:
        tell_of_16_bits(about, how, "the images to classify", of_run=True)


def decoding_of(facts: FederationFacts) -> Decoding:
    """Return how files become images as a run stores its own.

    Raises:
        ConfigurationError: these are no squares, and nothing says how files become such.
    """
    height, width = facts.image_size
    if facts.decoding is not None:
        return facts.decoding
    if height != width:
        raise ConfigurationError(
            f"the run stores images of {height} x {width} pixels, and its source does not say how a file becomes one "
            "(ImageSource.decoding); give the pixels from Python, uint8 [n, 3, H, W]"
        )
    return Decoding(height, "squash", as_seen=True)
