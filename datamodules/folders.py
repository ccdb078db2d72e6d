"""Images in plain folders, one folder a class: listed in a fixed order, decoded once, memory-mapped after that.

torchvision's ``ImageFolder`` decodes at every read, and the ``datasets`` library caches the coded bytes. A federation
reads thousands of small batches in any order, so decoded pixels are kept here, in one file that all processes map.
"""

import hashlib
import logging
import os
import re
import stat
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from benchmark.errors import ConfigurationError, listed
from benchmark.files import open_regular
from datamodules.decoded_cache import BESIDE, About, DecodedCache, cache_folder, size_said
from datamodules.pixels import ABOUT, LARGEST, Decoding, Fit, decode
from datamodules.source import ImagePool

log = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
#: images that are not read: a folder that holds one is refused, since an image left out would go unnoticed
UNREAD = (
    # pictures and drawings
    *(".apng", ".avif", ".eps", ".exr", ".heic", ".heif", ".ico", ".j2c", ".j2k", ".jp2", ".jpe", ".jpf", ".jpx"),
    *(".jxl", ".jxr", ".pam", ".pbm", ".pcx", ".pgm", ".pnm", ".ppm", ".psd", ".qoi", ".sgi", ".svg", ".tga", ".wdp"),
    # of cameras
    *(".arw", ".cr2", ".cr3", ".crw", ".dng", ".nef", ".nrw", ".orf", ".pef", ".raf", ".raw", ".rw2", ".sr2", ".srf"),
    # of radiology and microscopes
    *(".bif", ".czi", ".dcm", ".dicom", ".ima", ".lif", ".mha", ".mhd", ".mnc", ".mrxs", ".nd2", ".ndpi", ".nhdr"),
    *(".nii", ".nii.gz", ".npy", ".nrrd", ".scn", ".svs", ".vms", ".vsi"),
)
#: what a DICOM file has after 128 bytes of anything
DICOM = b"DICM"
#: folders that file managers and systems make: no classes, passed over like those whose names begin with a dot
NO_CLASSES = frozenset(
    {"__macosx", "@eadir", "lost+found", "#recycle", "$recycle.bin", "system volume information", "thumbs.db"}
)
CACHE_FORMAT = 3  # raise it when the same files would decode to other values
SEEN_FORMAT = 4  # the same, for images that are decoded as one sees them

#: gives the file of an image by its place, or the image's name and content
Read = Callable[[int], Path | tuple[str, bytes]]


@dataclass(frozen=True)
class DecodedImages:
    """Decoded images, in the order in which they were asked for.

    Attributes:
        images: uint8, [n, 3, H, W]; memory-mapped where a cache could be written.
        group: int64, [n]; copies have the value of the first of them (:class:`Decoding` says which are).
    """

    images: NDArray[np.uint8]
    group: NDArray[np.int64]


def subfolders(at: Path) -> list[str]:
    """Names of the folders in a folder that may be classes or domains, in no order.

    Raises:
        ConfigurationError: the folder cannot be read.
    """
    try:
        found = [entry.name for entry in os.scandir(at) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise ConfigurationError(f"cannot read the image folder {at}: {error.strerror}") from error
    passed = sorted(name for name in found if name.casefold() in NO_CLASSES)
    if passed:  # of one text and place, so that it is said once
        warnings.warn(f"folders of the system are no classes and passed over: {', '.join(passed)}", stacklevel=1)
    return [name for name in found if name not in passed]


def list_class_folders(
    root: Path, below: str, folders: Sequence[Sequence[str]], inside: str = ".", others: bool = False
) -> tuple[list[str], NDArray[np.int64]]:
    """Image files of ``root/below/<class>/``, class by class, sorted by name within a class.

    Args:
        root: folder of the data set.
        below: folder in it that holds the class folders, e.g. ``train``; ``.`` for the root itself.
        folders: for each class the names its folder may have, the usual one first.
        inside: folder in each class folder that holds its images; ``.`` for the class folder itself.
        others: whether folders of other classes may be there; they are passed over.

    Returns:
        Paths relative to ``root`` with forward slashes, and the labels, [n].

    Raises:
        ConfigurationError: a class folder is missing, empty, there twice or (unless ``others``) unknown.
    """
    at = root / below
    found = set(subfolders(at))
    known = {name for names in folders for name in names}
    missing = [names[0] for names in folders if not found & set(names)]
    unknown = [] if others else sorted(found - known)
    if missing or unknown:
        raise ConfigurationError(
            f"{at} must hold one folder for each of {len(folders)} classes; missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(unknown) or 'none'}"
        )
    files: list[str] = []
    labels: list[int] = []
    for label, names in enumerate(folders):
        present = [name for name in names if name in found]
        if len(present) > 1:
            raise ConfigurationError(
                f"{at} holds class {names[0]} twice: {', '.join(present)}; keep one of the folders"
            )
        images = list_images(root, (PurePosixPath(below) / present[0] / inside).as_posix())
        files += images
        labels += [label] * len(images)
    return files, np.array(labels, dtype=np.int64)


def list_images(root: Path, folder: str) -> list[str]:
    """Image files of ``root/folder``, sorted by name: paths relative to ``root`` with forward slashes.

    Raises:
        ConfigurationError: the folder cannot be read, holds no image, or holds one of a format that is not read.
    """
    at = root / folder
    try:
        names = sorted(os.listdir(at))
    except OSError as error:
        raise ConfigurationError(f"cannot read the image folder {at}: {error.strerror}") from error
    images = [name for name in names if name.lower().endswith(SUFFIXES) and not name.startswith(".")]
    unread = unread_in(at, [name for name in names if not name.startswith(".")])
    if unread:
        raise ConfigurationError(
            f"{at} holds {len(unread)} images of formats that are not read (first: {unread[0]}); convert them to PNG "
            "or JPEG, or remove them"
        )
    if not images:
        raise ConfigurationError(f"{at} holds no image ({', '.join(SUFFIXES)})")
    return [(PurePosixPath(folder) / name).as_posix() for name in images]


def unread_in(at: Path, names: Sequence[str]) -> list[str]:
    """Return which files of a folder are images that are not read, by their suffix; without one, DICOM by content."""
    return [
        name
        for name in names
        if name.lower().endswith(UNREAD) or (not re.search(r"\.\w*[a-z]\w*$", name, re.I) and _is_dicom(at / name))
    ]


def _is_dicom(path: Path) -> bool:
    """Return whether it is a file of DICOM, whose name may be but a number with points."""
    try:
        with open_regular(path, links=True) as file:
            return file.read(128 + len(DICOM))[128:] == DICOM
    except OSError:
        return False


def without_copies(
    decoded: DecodedImages, labels: NDArray[np.int64], test: NDArray[np.bool_], domains: NDArray[np.int64]
) -> ImagePool:
    """The pool of these images, less every training image that is in one group with a test image.

    So no test image trains, whatever copies of it a release holds on its training side.
    """
    return pool_of(decoded, labels, test, domains, no_copies(decoded.group, test))


def no_copies(group: NDArray[np.int64], test: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which images stay: test images, and training images of whose group no test image is."""
    return test | ~np.isin(group, group[test])


def pool_of(
    decoded: DecodedImages,
    labels: NDArray[np.int64],
    test: NDArray[np.bool_],
    domains: NDArray[np.int64],
    keep: NDArray[np.bool_],
) -> ImagePool:
    """The pool of the images where ``keep`` is True; they stay memory-mapped where it is True everywhere."""
    images = decoded.images if keep.all() else decoded.images[keep]
    rest = (torch.from_numpy(values[keep]) for values in (labels, test, domains, decoded.group))
    return ImagePool(torch.from_numpy(images), *rest)


def read_images(
    root: Path,
    files: Sequence[str],
    size: int,
    fit: Fit,
    as_seen: bool = False,
    bits: int | None = None,
    cache: str | None = BESIDE,
) -> DecodedImages:
    """Decode files to one array, or map the array that an earlier call left in ``root/.cache``.

    The cache is keyed by names, sizes and times of change of the files and by what says how they are decoded, and
    checked by a sum when it is read. Where it cannot be written the images stay in memory, with a warning.

    Args:
        root: folder of the data set.
        files: paths relative to it.
        size: S, height and width of the result in pixels.
        fit: ``squash`` resizes to S x S, ``crop`` resizes the short side to S and cuts out the centre; bicubic.
        as_seen: as :class:`datamodules.pixels.Decoding` says; one's own images are, published data sets are read as
            their codes do.
        bits: of the values in 16-bit channels; None: 16.
        cache: folder of the decoded images, seen from ``root``; None: they are kept in memory.

    Raises:
        ConfigurationError: a file leads outside of ``root``, is missing, no regular file, or cannot be decoded; or the
            images do not fit into memory.
    """
    if size < 1:
        raise ConfigurationError(f"size must be at least 1 pixel, got {size}")
    how = Decoding(size, fit, as_seen, bits)
    key = _key(root, files, how)

    def read(row: int) -> Path:
        return root / files[row]

    folder = cache_folder(root, cache)
    kept = None if folder is None else DecodedCache(folder, key, (len(files), 3, size, size))
    found = None if kept is None else _from_cache(kept, read, how)
    if found is None:
        return decode_images(read, len(files), how, root)
    return _in_groups(*found, how, root)


def _from_cache(kept: DecodedCache, read: Read, how: Decoding) -> tuple[NDArray[np.uint8], About] | None:
    """The images from a cache, which is made where there is none; None where it cannot be."""
    found, did = kept.read(), "read from"
    if found is None:
        try:
            with kept.writing() as (images, about):
                _decode_all(read, how, images, about)
            found, did = kept.read(), "written to"
        except OSError as error:
            warnings.warn(
                f"cannot cache decoded images in {kept.folder} ({error.strerror}): kept in memory", stacklevel=3
            )
    if found is not None:
        log.info(f"  decoded images {did} {kept.folder}: {size_said(kept.bytes)}")
    return found


def decode_images(read: Read, n: int, how: Decoding, at: Path | str, of_run: bool = False) -> DecodedImages:
    """Decode images into memory.

    Args:
        read: gives the file of an image by its place, or the image's name and content; called by several threads.
        n: how many there are.
        how: to which pixels.
        at: what they are images of, for messages.
        of_run: as :func:`tell_of_16_bits` says.

    Raises:
        ConfigurationError: one cannot be decoded, or they do not fit into memory.
    """
    size = how.size
    try:
        images, about = np.empty((n, 3, size, size), np.uint8), np.zeros(n, ABOUT)
    except MemoryError as error:
        raise ConfigurationError(
            f"{n} images of {at} with {size} pixels a side take {3 * size * size * n} bytes, more memory than is free; "
            f"take a smaller data.source.init_args.size, or make room on the disk of {at}, from where images in files "
            "are mapped"
        ) from error
    _decode_all(read, how, images, about)
    return _in_groups(images, about, how, at, of_run)


def _in_groups(
    images: NDArray[np.uint8], about: About, how: Decoding, at: Path | str, of_run: bool = False
) -> DecodedImages:
    """The images, and which of them are copies."""
    if how.as_seen:
        tell_of_16_bits(about, how, at, of_run)
    _, first, inverse = np.unique(about["digest"], axis=0, return_index=True, return_inverse=True)
    return DecodedImages(images, first[inverse.reshape(-1)].astype(np.int64))


def tell_of_16_bits(about: About, how: Decoding, at: Path | str, of_run: bool = False) -> None:
    """Warn of values in 16 bits that are nearly black, and of colours of which 8 bits were read.

    Args:
        about: the images.
        how: they were decoded.
        at: what they are images of, for messages.
        of_run: whether they are new images for a run that was trained, which has chosen ``how``.

    Raises:
        ConfigurationError: ``bits`` is given for these images, and none has 16.
    """
    deep, cut = int(about["deep"].sum()), int(about["cut"].sum())
    if how.bits is not None and not deep and not of_run:
        raise ConfigurationError(
            f"bits={how.bits} says how many of 16 bits are in use, and no image of {at} has 16; leave it out"
        )
    largest = int(about["largest"].max(initial=0))
    if deep > cut and how.bits is None and largest <= LARGEST // 4:
        mend = f"give data.source.init_args.bits={max(largest.bit_length(), 8)}"
        if of_run:
            mend = "the run was trained without data.source.init_args.bits: scale them as its training images were"
        warnings.warn(
            f"{at}: {deep - cut} images have 16 bits and are nearly black: largest value {largest} of {LARGEST}; "
            f"{mend}",
            stacklevel=2,
        )
    if cut:
        warnings.warn(
            f"{at}: {cut} TIFF images have colours of 16 bits, of which the upper 8 are read; save them as PNG, or "
            "scaled to 8 bits, if their values do not use all of the range",
            stacklevel=2,
        )


def file_statuses(root: Path, files: Sequence[str]) -> list[os.stat_result]:
    """The status of each image's file, behind links.

    Raises:
        ConfigurationError: a file leads outside of ``root``, is missing, or no regular file.
    """
    inside = os.path.realpath(root)
    checked: set[str] = set()
    statuses = []
    for file in files:
        path = os.path.join(inside, file)
        try:
            status = os.lstat(path)
            link = stat.S_ISLNK(status.st_mode)
            if link:
                status = os.stat(path)
        except OSError as error:
            missing = sum(not os.path.exists(os.path.join(inside, each)) for each in files)
            others = f" ({missing} of {len(files)} files are missing)" if missing > 1 else ""
            raise ConfigurationError(f"cannot read the image {root / file}: {error.strerror}{others}") from error
        except ValueError as error:  # a list of images can name what no file is called
            raise ConfigurationError(f"{str(root / file)!r} is no name of an image ({error})") from error
        # Resolving is slow, and a folder needs it once.
        where = path if link else os.path.dirname(path)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"{root / file} is no regular file, and so no image; remove it")
        if where not in checked:
            if os.path.commonpath([inside, os.path.realpath(where)]) != inside:
                raise ConfigurationError(
                    f"{root / file} leads outside of the data set's folder {root}; copy the images there instead of "
                    "linking to them"
                )
            checked.add(where)
        statuses.append(status)
    return statuses


def _key(root: Path, files: Sequence[str], how: Decoding) -> str:
    """Name of the cache of these files; refuses files outside of ``root`` on the way."""
    said = f"{SEEN_FORMAT if how.as_seen else CACHE_FORMAT} {how.size} {how.fit} {how.as_seen} {how.bits}"
    key = hashlib.blake2b(said.encode(), digest_size=16)
    for file, status in zip(files, file_statuses(root, files), strict=True):
        # Names on a disk need not be UTF-8.
        key.update(os.fsencode(f"\0{file}\0{status.st_size}\0{status.st_mtime_ns}"))
    return key.hexdigest()


def _decode_all(read: Read, how: Decoding, images: NDArray[np.uint8], about: About) -> None:
    """Fill ``images`` and ``about`` from what is read, with threads: decoding lets go of the interpreter lock.

    Raises:
        ConfigurationError: images cannot be decoded; says why for the first, and names the others.
    """

    def chunk(start: int) -> list[tuple[str, str]]:
        refused = []  # the texts alone: an exception would keep the file's content
        for row in range(start, min(start + 256, len(images))):
            given = read(row)
            try:
                decoded = decode(given, how)
            except ConfigurationError as error:
                refused.append((str(given if isinstance(given, Path) else given[0]), str(error)))
            else:
                images[row], about[row] = decoded.pixels, decoded.about
        return refused

    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        warnings.filterwarnings("ignore", "Corrupt EXIF data")  # then nothing is turned
        futures = [threads.submit(chunk, start) for start in range(0, len(images), 256)]
        try:
            refused = [each for future in futures for each in future.result()]
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    if refused:
        first, others = refused[0][1], [name for name, _ in refused[1:]]
        also = f" ({len(others)} more of the {len(images)} cannot be read: {listed(others)})" if others else ""
        raise ConfigurationError(f"{first}{also}")
