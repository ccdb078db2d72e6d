"""Images in plain folders, one folder a class: listed in a fixed order, decoded once, memory-mapped after that.

torchvision's ``ImageFolder`` decodes at every read, and the ``datasets`` library caches the coded bytes. A federation
reads thousands of small batches in any order, so decoded pixels are kept here, in one file that all processes map.
"""

import errno
import hashlib
import io
import math
import os
import stat
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from benchmark.errors import ConfigurationError
from benchmark.files import open_regular
from datamodules.source import ImagePool

SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
#: what a file may hold, whatever it is called: releases have GIFs named .jpg. Formats that are programs (EPS) are out.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
#: images that are not read: a folder that holds one is refused, since an image left out would go unnoticed
UNREAD = (
    *(".avif", ".dcm", ".dng", ".eps", ".heic", ".heif", ".ico", ".jp2", ".jpe", ".jxl", ".nii", ".nii.gz", ".npy"),
    *(".pbm", ".pgm", ".ppm", ".psd", ".svg", ".tga"),
)
#: modes whose conversion to RGB by Pillow keeps what one sees; 16-bit grey ("I;16...") is scaled by hand
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
DIGEST_BYTES = 16
CACHE_FORMAT = 2  # raise it when the same files would decode to other values

Fit = Literal["squash", "crop"]
#: gives the file of an image by its place, or the image's name and content
Read = Callable[[int], Path | tuple[str, bytes]]


@dataclass(frozen=True)
class DecodedImages:
    """Decoded images, in the order in which they were asked for.

    Attributes:
        images: uint8, [n, 3, H, W]; memory-mapped where a cache could be written.
        group: int64, [n]; byte-identical files have the value of the first of them.
    """

    images: NDArray[np.uint8]
    group: NDArray[np.int64]


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
    try:
        found = {entry.name for entry in os.scandir(at) if entry.is_dir() and not entry.name.startswith(".")}
    except OSError as error:
        raise ConfigurationError(f"cannot read the image folder {at}: {error.strerror}") from error
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
    unread = [name for name in names if name.lower().endswith(UNREAD) and not name.startswith(".")]
    if unread:
        raise ConfigurationError(
            f"{at} holds {len(unread)} images of formats that are not read (first: {unread[0]}); convert them to PNG "
            "or JPEG, or remove them"
        )
    if not images:
        raise ConfigurationError(f"{at} holds no image ({', '.join(SUFFIXES)})")
    return [(PurePosixPath(folder) / name).as_posix() for name in images]


def without_copies(
    decoded: DecodedImages, labels: NDArray[np.int64], test: NDArray[np.bool_], domains: NDArray[np.int64]
) -> ImagePool:
    """The pool of these images, less every training image that is in one group with a test image.

    So no test image trains, whatever copies of it a release holds on its training side.
    """
    return pool_of(decoded, labels, test, domains, test | ~np.isin(decoded.group, decoded.group[test]))


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


def read_images(root: Path, files: Sequence[str], size: int, fit: Fit) -> DecodedImages:
    """Decode files to one array, or map the array that an earlier call left in ``root/.cache``.

    The cache is keyed by names, sizes and times of change of the files, by ``size`` and by ``fit``, and checked by a
    sum when it is read. Where it cannot be written the images stay in memory, with a warning.

    Args:
        root: folder of the data set.
        files: paths relative to it.
        size: S, height and width of the result in pixels.
        fit: ``squash`` resizes to S x S, ``crop`` resizes the short side to S and cuts out the centre; bicubic.

    Raises:
        ConfigurationError: a file leads outside of ``root``, is missing, no regular file, or cannot be decoded; or the
            images do not fit into memory.
    """
    if size < 1:
        raise ConfigurationError(f"size must be at least 1 pixel, got {size}")
    key = _key(root, files, size, fit)
    images_at, digests_at = (root / ".cache" / f"{key}{suffix}" for suffix in (".npy", ".digests.npy"))
    shape = (len(files), 3, size, size)
    cached = _cached(images_at, digests_at, shape)
    if cached is None:
        digests = np.empty((len(files), DIGEST_BYTES), dtype=np.uint8)
        try:
            with _replacing(images_at, shape) as target:
                _decode_all(lambda row: root / files[row], size, fit, target, digests)
                sums = _sums(target, digests)
            with _replacing(digests_at, (len(files) + 1, DIGEST_BYTES)) as target:
                target[:-1], target[-1] = digests, sums
            cached = _cached(images_at, digests_at, shape)
        except OSError as error:
            warnings.warn(
                f"cannot cache decoded images in {root / '.cache'} ({error.strerror}): kept in memory", stacklevel=2
            )
    if cached is None:
        return decode_images(lambda row: root / files[row], len(files), size, fit, root)
    return _in_groups(*cached)


def decode_images(read: Read, n: int, size: int, fit: Fit, at: Path | str) -> DecodedImages:
    """Decode images into memory.

    Args:
        read: gives the file of an image by its place, or the image's name and content; called by several threads.
        n: how many there are.
        size: S, height and width of the result in pixels.
        fit: as in :func:`read_images`.
        at: what they are images of, for messages.

    Raises:
        ConfigurationError: one cannot be decoded, or they do not fit into memory.
    """
    try:
        images, digests = np.empty((n, 3, size, size), np.uint8), np.empty((n, DIGEST_BYTES), np.uint8)
    except MemoryError as error:
        raise ConfigurationError(
            f"{n} images of {at} with {size} pixels a side take {3 * size * size * n} bytes, more memory than is free; "
            f"take a smaller data.source.init_args.size, or make room on the disk of {at}, from where images in files "
            "are mapped"
        ) from error
    _decode_all(read, size, fit, images, digests)
    return _in_groups(images, digests)


def _in_groups(images: NDArray[np.uint8], digests: NDArray[np.uint8]) -> DecodedImages:
    """The images, and which of them are of byte-identical files."""
    _, first, inverse = np.unique(digests, axis=0, return_index=True, return_inverse=True)
    return DecodedImages(images, first[inverse.reshape(-1)].astype(np.int64))


def _key(root: Path, files: Sequence[str], size: int, fit: Fit) -> str:
    """Name of the cache of these files; refuses files outside of ``root`` on the way."""
    inside = os.path.realpath(root)
    checked: set[str] = set()
    key = hashlib.blake2b(f"{CACHE_FORMAT} {size} {fit}".encode(), digest_size=16)
    for file in files:
        path = os.path.join(inside, file)
        try:
            status = os.lstat(path)
            link = stat.S_ISLNK(status.st_mode)
            if link:
                status = os.stat(path)
        except OSError as error:
            raise ConfigurationError(f"cannot read the image {root / file}: {error.strerror}") from error
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
        # Names on a disk need not be UTF-8.
        key.update(os.fsencode(f"\0{file}\0{status.st_size}\0{status.st_mtime_ns}"))
    return key.hexdigest()


def _cached(
    images_at: Path, digests_at: Path, shape: tuple[int, ...]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]] | None:
    """Images and digests from the cache; None where it is not there or damaged."""
    images = _mapped(images_at, shape)
    stored = _mapped(digests_at, (shape[0] + 1, DIGEST_BYTES))
    if images is None or stored is None:
        return None
    if np.array_equal(stored[-1], _sums(images, stored[:-1])):
        return images, stored[:-1]
    warnings.warn(f"the cache {images_at} is damaged: made again from the images", stacklevel=3)
    return None


def _sums(images: NDArray[np.uint8], digests: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """CRC-32 of both, [DIGEST_BYTES]: against damage, at 3 GB/s."""
    sums = [zlib.crc32(images.data), zlib.crc32(np.ascontiguousarray(digests).data)]
    return np.frombuffer(np.array(sums, dtype="<u8").tobytes(), dtype=np.uint8)


def _mapped(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
    """The cached array, or None where there is none of this form."""
    try:
        open_regular(path).close()
        # Copy-on-write: torch wants a writable array, the file never changes.
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return array if array.dtype == np.uint8 and array.shape == shape else None


@contextmanager
def _replacing(path: Path, shape: tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
    """A mapped array to fill, which takes the place of ``path`` when it is full."""
    if path.parent.is_symlink():
        raise OSError(errno.ELOOP, "it is a link")
    path.parent.mkdir(exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        array = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)
        # Claim the space now: writing to a map on a full disk kills the process.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, os.fstat(handle).st_size)
        yield array
        array.flush()
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(handle)


def _decode_all(read: Read, size: int, fit: Fit, images: NDArray[np.uint8], digests: NDArray[np.uint8]) -> None:
    """Fill ``images`` and ``digests`` from what is read, with threads: decoding lets go of the interpreter lock."""

    def chunk(start: int) -> None:
        for row in range(start, min(start + 256, len(images))):
            content, images[row] = decode(read(row), size, fit)
            digest = hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
            digests[row] = np.frombuffer(digest, dtype=np.uint8)

    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        futures = [threads.submit(chunk, start) for start in range(0, len(images), 256)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def decode(given: Path | tuple[str, bytes], size: int, fit: Fit) -> tuple[bytes, NDArray[np.uint8]]:
    """An image's content and its pixels, [3, size, size].

    Args:
        given: the file, or the image's name and content.
        size: S, height and width of the result in pixels.
        fit: as in :func:`read_images`.

    Raises:
        ConfigurationError: the file cannot be read, is no image, or one too large or with values of no known range.
    """
    path = given if isinstance(given, Path) else given[0]
    try:
        content = given.read_bytes() if isinstance(given, Path) else given[1]
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
            image = _rgb(opened)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError) as error:
        raise ConfigurationError(
            f"the image {path} is too large to decode ({str(error) or 'out of memory'}); make it smaller or remove it"
        ) from error
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigurationError(
            f"cannot decode the image {path} ({error}); it is damaged or no image ({', '.join(FORMATS)} are read): "
            "download it again or remove it"
        ) from error
    if fit == "crop":
        short = min(image.size)
        width, height = (size * side // short for side in image.size)
        if width * height > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise ConfigurationError(
                f"the image {path} of {image.size[0]} x {image.size[1]} pixels is too long a strip to resize its short "
                f"side to {size}; remove it"
            )
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        left, top = round((width - size) / 2), round((height - size) / 2)
        image = image.crop((left, top, left + size, top + size))
    elif image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    return content, np.asarray(image).transpose(2, 0, 1)


def _rgb(opened: Image.Image) -> Image.Image:
    """The image with three channels of 8 bits.

    Raises:
        ValueError: its values have no known range.
    """
    if opened.mode.startswith("I;16"):
        values = np.asarray(opened).astype(np.float64)
        return Image.fromarray(np.round(values / 257).astype(np.uint8)).convert("RGB")
    if opened.mode not in MODES:
        raise ValueError(f"its pixels are numbers of mode {opened.mode}, of no known range: save it with 8 or 16 bits")
    return opened.convert("RGB")
