"""One image, from its file to pixels: as published codes read it, or as one sees it."""

import hashlib
import io
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from benchmark.errors import ConfigurationError

#: what a file may hold, whatever it is called: releases have GIFs named .jpg. Formats that are programs (EPS) are out.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")
#: modes whose conversion to RGB by Pillow keeps what one sees; 16-bit grey ("I;16...") is scaled by hand
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
#: what the pixels of other modes are
NUMBERS = {"I": "whole numbers of 32 bits, or of 16 bits with sign", "F": "floating-point numbers of 32 bits"}
DIGEST_BYTES = 16
LARGEST = 2**16 - 1  #: of 16 bits
#: How 8-bit channels are called, by their number.
CHANNELS = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
#: Where an image says how it is turned, by the names that Pillow has for it.
TURNS = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")

#: What is remembered of an image: whether its values have 16 bits, the largest of them, and whether 8 of 16 were read.
ABOUT = np.dtype([("digest", np.uint8, (DIGEST_BYTES,)), ("deep", "?"), ("largest", "<u2"), ("cut", "?")])

Fit = Literal["squash", "crop"]


@dataclass(frozen=True)
class Decoding:
    """The settings by which a file is decoded to pixels.

    Attributes:
        size: S, height and width of the result in pixels.
        fit: ``squash`` resizes to S x S, ``crop`` resizes the short side to S and cuts out the centre; bicubic.
        as_seen: whether to decode as a viewer shows the image: turned as EXIF says, transparent parts on white; images
            of equal pixels are copies. Else as the codes of published data sets read it: EXIF is ignored except in
            TIFF, transparent parts keep their colours, and byte-identical files are copies.
        bits: bits in use of 16-bit channels, so that ``2 ** bits - 1`` is white; None for all 16.
    """

    size: int
    fit: Fit
    as_seen: bool = False
    bits: int | None = None

    @property
    def white(self) -> int:
        """The largest value of a 16-bit channel."""
        return LARGEST if self.bits is None else 2**self.bits - 1


@dataclass(frozen=True)
class Decoded:
    """An image.

    Attributes:
        pixels: uint8, [3, S, S].
        digest: equal for copies.
        deep: whether its channels have 16 bits.
        largest: the largest value of 16-bit colours; 0 where they have 8, or where 8 of the 16 were read.
        cut: whether 8 of 16 bits were read.
    """

    pixels: NDArray[np.uint8]
    digest: bytes
    deep: bool
    largest: int
    cut: bool

    @property
    def about(self) -> tuple[NDArray[np.uint8], bool, int, bool]:
        """Its properties that a cache keeps, a row of :data:`ABOUT`."""
        return np.frombuffer(self.digest, dtype=np.uint8), self.deep, self.largest, self.cut


def decode(given: Path | tuple[str, bytes], how: Decoding) -> Decoded:
    """Decode an image.

    Args:
        given: the file, or the image's name and content.
        how: to which pixels.

    Raises:
        ConfigurationError: the file cannot be read, is no image, or one too large or with values of no known range; or
            it is to be decoded as seen, and holds several images.
    """
    path = given if isinstance(given, Path) else given[0]
    try:
        content = given.read_bytes() if isinstance(given, Path) else given[1]
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
            _check_mode(opened, path)
            if how.as_seen:
                _check_single(opened, path)
            cut = _is_cut(opened)
            largest = 0
            if opened.mode.startswith("I;16") or (cut and how.as_seen and opened.format == "PNG"):
                cut = False
                image, largest = _from_16_bits(opened, content, how, path)
            else:
                image = opened
            deep = image is not opened or cut
            image = _rgb(image, how.as_seen)
    except ConfigurationError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError) as error:
        raise ConfigurationError(
            f"the image {path} is too large to decode ({str(error) or 'out of memory'}); make it smaller or remove it"
        ) from error
    except Exception as error:  # of damaged bytes, whatever Pillow's parsers say: a TypeError, for example
        # Pillow names the object in memory that it was given.
        reason = "its content is of no known format" if isinstance(error, UnidentifiedImageError) else error
        raise ConfigurationError(
            f"cannot decode the image {path} ({reason}); it is damaged or no image ({', '.join(FORMATS)} are read): "
            "download it again or remove it"
        ) from error
    if how.bits is not None and cut:
        raise ConfigurationError(
            f"the image {path} has colours of 16 bits in {opened.format}, of which the upper 8 are read, and so "
            f"bits={how.bits} cannot be heeded; save it as PNG, or scaled to 8 bits"
        )
    pixels = _fitted(image, how, path)
    digest = hashlib.blake2b(pixels.tobytes() if how.as_seen else content, digest_size=DIGEST_BYTES).digest()
    return Decoded(pixels, digest, deep, largest, cut)


def _check_mode(opened: Image.Image, path: Path | str) -> None:
    """Refuse values of no known range."""
    if opened.mode in MODES or opened.mode.startswith("I;16"):
        return
    kind = NUMBERS.get(opened.mode)
    raise ConfigurationError(
        f"the image {path} cannot be taken: its pixels are numbers of mode {opened.mode}, of no known range"
        f"{f' ({kind})' if kind else ''}; choose the range that shows what matters, scale it to 0 to 255 (or 0 to "
        "65535), and save it with 8 bits (or 16 without sign)"
    )


def _check_single(opened: Image.Image, path: Path | str) -> None:
    """Refuse a file of several images, of which one would be read; JPEG's further ones (MPO) go with what one sees."""
    count = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)
    if count > 1:
        raise ConfigurationError(
            f"the image {path} is a {opened.format} file of {count} images, as pages of a scan or an animation; save "
            "those that are to be used in a file each"
        )


def _is_cut(opened: Image.Image) -> bool:
    """Return whether Pillow reads only the upper 8 of 16 bits, as it does for all but grey images."""
    return (
        opened.format in ("PNG", "TIFF")
        and not opened.mode.startswith("I;16")
        and any(";16" in str(tile.args) for tile in getattr(opened, "tile", []))
    )


def _from_16_bits(opened: Image.Image, content: bytes, how: Decoding, path: Path | str) -> tuple[Image.Image, int]:
    """The image with channels of 8 bits, and its largest value.

    Raises:
        ConfigurationError: there is a value above what ``how.bits`` can say.
    """
    grey = opened.mode.startswith("I;16")
    values = np.asarray(opened)[..., None] if grey else _all_of_16_bits(opened, content)
    colours = values[..., : 1 if values.shape[-1] < 3 else 3]
    hidden = np.zeros(values.shape[:2], dtype=bool)
    if how.as_seen and (transparent := opened.info.get("transparency")) is not None:
        hidden = (colours == np.array(transparent)).all(-1)
    largest = int(colours.max(initial=0, where=~hidden[..., None]))
    if largest > how.white:
        raise ConfigurationError(
            f"the image {path} has the value {largest}, and bits={how.bits} says that {how.white} is the largest; give "
            f"bits={largest.bit_length()} or leave it out"
        )
    scaled = _in_8_bits(how.white)[colours]
    scaled[hidden] = 255
    if values.shape[-1] > colours.shape[-1]:  # alpha has all bits
        scaled = np.concatenate([scaled, _in_8_bits(LARGEST)[values[..., -1:]]], axis=-1)
    image = Image.fromarray(scaled.squeeze(-1) if scaled.shape[-1] == 1 else scaled, CHANNELS[scaled.shape[-1]])
    image.info = {name: value for name, value in opened.info.items() if name in TURNS}
    return image, largest


def _all_of_16_bits(opened: Image.Image, content: bytes) -> NDArray[np.uint16]:
    """Return the values of a PNG with 16-bit colours, or grey with alpha: [H, W, channels].

    Pillow has no image of such values, and unpacks half of their bytes, by the raw mode that a tile names: all bytes
    are had by naming others. It reads damaged files to an error, where other decoders end the process.
    """
    assert isinstance(opened, ImageFile.ImageFile)
    raw = str(opened.tile[0].args)
    if raw == "LA;16B":  # the bytes of a pixel, as if they were red, green, blue and alpha
        opened.tile = [tile._replace(args="RGBA") for tile in opened.tile]
        halves = np.asarray(opened)
        upper, lower = halves[..., ::2], halves[..., 1::2]
    else:
        upper = np.asarray(opened)
        with Image.open(io.BytesIO(content), formats=("PNG",)) as again:
            again.tile = [tile._replace(args=raw.replace(";16B", ";16L")) for tile in again.tile]
            lower = np.asarray(again)
    return upper.astype(np.uint16) << 8 | lower


@lru_cache(maxsize=4)
def _in_8_bits(white: int) -> NDArray[np.uint8]:
    """Return what each 16-bit value is in 8 bits where ``white`` is 255; values above it do not occur."""
    return np.round(np.arange(LARGEST + 1) / (white / 255)).clip(max=255).astype(np.uint8)


def _rgb(image: Image.Image, as_seen: bool) -> Image.Image:
    """The image with three channels of 8 bits, turned and composed where it is to be as one sees it."""
    if not as_seen:
        return image.convert("RGB")
    image.load()
    _turn_upright(image)
    if image.has_transparency_data:
        straight = image.convert(image.mode.upper()) if image.mode in ("La", "RGBa") else image
        shown = straight.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown)
    return image.convert("RGB")


def _turn_upright(image: Image.Image) -> None:
    """Turn it as its EXIF says; EXIF that cannot be read says nothing."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # of damaged bytes, whatever Pillow's parser says
        return


def _fitted(image: Image.Image, how: Decoding, path: Path | str) -> NDArray[np.uint8]:
    """Return the image's pixels at the size and by the fit of ``how``, uint8 [3, S, S]."""
    size = how.size
    if how.fit == "crop":
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
    return np.asarray(image).transpose(2, 0, 1)
