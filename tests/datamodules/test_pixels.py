"""Pixels of one image: turned, composed and scaled as one sees it, or read as published codes do."""

import io
import pickle
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmark.errors import ConfigurationError
from benchmark.predict.files import decoded
from datamodules.folders import read_images
from datamodules.pixels import Decoding, decode

SEEN, PUBLISHED = Decoding(4, "squash", as_seen=True), Decoding(4, "squash")
#: What undoes the turn of each orientation that EXIF knows: the way in which a camera stores an upright picture.
STORED = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x),
    7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
    8: lambda x: np.rot90(x, -1),
}
PICTURE = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def png16(values: np.ndarray, kind: int, more: bytes = b"", last: bytes = b"", bits: int = 16) -> bytes:
    """A PNG of 16 bits, which Pillow does not write: values [H, W, channels], colour type, a chunk, and a last one."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    more, last = (chunk(each[:4], each[4:]) if each else b"" for each in (more, last))
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], bits, kind, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(f">u{bits // 8}").tobytes() for row in values)
    parts = [chunk(b"IHDR", header), more, chunk(b"IDAT", zlib.compress(rows)), last, chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff16(values: np.ndarray, signed: bool = False) -> bytes:
    """An uncompressed TIFF of 16 bits: values [H, W, channels]."""
    height, width, channels = values.shape
    bits, content = struct.pack(f"<{channels}H", *[16] * channels), values.astype("<i2" if signed else "<u2").tobytes()
    entries = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, channels, 16 if channels == 1 else 8)]
    entries += [(259, 3, 1, 1), (262, 3, 1, 2 if channels == 3 else 1), (273, 4, 1, 8 + len(bits))]
    entries += [(277, 3, 1, channels), (278, 4, 1, height), (279, 4, 1, len(content))]
    entries += [(339, 3, 1, 2)] if signed else []
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(bits) + len(content)) + bits + content + directory


def pixels(content: bytes, how: Decoding = SEEN) -> np.ndarray:
    """[H, W, 3]."""
    return decode(("it", content), how).pixels.transpose(1, 2, 0)


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize(("form", "options"), [("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True})])
def test_a_photo_is_upright_in_every_format(form: str, options: dict[str, Any], orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.ascontiguousarray(STORED[orientation](PICTURE))
    content = encoded(Image.fromarray(stored), form, exif=exif, **options)
    np.testing.assert_array_equal(pixels(content), PICTURE)
    if form != "TIFF":
        np.testing.assert_array_equal(pixels(content, PUBLISHED), stored)


def test_a_jpeg_and_16_bits_are_upright_too() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    above = np.zeros((32, 32, 3), dtype=np.uint8)
    above[:16] = 200
    content = encoded(Image.fromarray(np.ascontiguousarray(np.rot90(above))), "JPEG", exif=exif)
    assert pixels(content)[:2].mean() > 190
    assert pixels(content)[2:].mean() < 10
    grey = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4000
    content = encoded(Image.fromarray(np.ascontiguousarray(np.rot90(grey))), "PNG", exif=exif)
    np.testing.assert_array_equal(pixels(content)[..., 0], np.round(grey / 257))


def test_exif_that_cannot_be_read_says_nothing() -> None:
    for damaged in (b"Exif\0\0no directory", b"Exif\0\0II*\0\xff\xff\xff\xff", b"MM\0*" + bytes(4) + b"\xff" * 9):
        np.testing.assert_array_equal(pixels(encoded(Image.fromarray(PICTURE), "PNG", exif=damaged)), PICTURE)


def palette() -> Image.Image:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([255, 0, 0, 0, 255, 0] + [0] * 762)
    image.putpixel((0, 0), 0)
    return image


@pytest.mark.parametrize(
    ("content", "first", "other"),
    [
        (encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 0)), "PNG"), [255, 255, 255], [255, 255, 255]),
        (encoded(Image.new("RGBA", (4, 4), (10, 20, 30, 255)), "PNG"), [10, 20, 30], [10, 20, 30]),
        (encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 51)), "PNG"), [255, 204, 204], [255, 204, 204]),
        (encoded(Image.new("LA", (4, 4), (0, 51)), "PNG"), [204] * 3, [204] * 3),
        (encoded(palette(), "PNG", transparency=0), [255] * 3, [0, 255, 0]),
        (encoded(palette(), "GIF", transparency=0), [255] * 3, [0, 255, 0]),
        (encoded(Image.new("RGB", (4, 4), (9, 8, 7)), "PNG", transparency=(9, 8, 7)), [255] * 3, [255] * 3),
        (encoded(Image.new("L", (4, 4), 9), "PNG", transparency=9), [255] * 3, [255] * 3),
        (encoded(Image.new("L", (4, 4), 9), "PNG", transparency=8), [9] * 3, [9] * 3),
        (png16(np.full((4, 4, 1), 257), 0, b"tRNS\x01\x01"), [255] * 3, [255] * 3),
        (png16(np.full((4, 4, 4), (65535, 0, 0, 13107)), 6), [255, 204, 204], [255, 204, 204]),
    ],
)
def test_what_is_transparent_is_composed_on_white(content: bytes, first: list[int], other: list[int]) -> None:
    assert pixels(content)[0, 0].tolist() == first
    assert pixels(content)[3, 3].tolist() == other


LEVELS = np.linspace(0, 4095, 16).round().astype(np.uint16).reshape(4, 4, 1)


@pytest.mark.parametrize(
    "content",
    [
        png16(LEVELS, 0),
        tiff16(LEVELS),
        png16(LEVELS.repeat(3, axis=2), 2),
        png16(np.concatenate([LEVELS, np.full_like(LEVELS, 65535)], axis=2), 4),
    ],
    ids=["grey", "TIFF", "colours", "alpha"],
)
def test_twelve_bits_in_sixteen_keep_all_their_levels(content: bytes) -> None:
    found = decode(("it", content), Decoding(4, "squash", as_seen=True, bits=12))
    for channel in found.pixels:
        np.testing.assert_array_equal(channel, np.arange(16).reshape(4, 4) * 17)
    assert (found.deep, found.largest, found.cut) == (True, 4095, False)
    with pytest.raises(ConfigurationError, match=r"it has the value 4095, and bits=11 says that 2047 is .*bits=12"):
        decode(("it", content), Decoding(4, "squash", as_seen=True, bits=11))


def test_all_of_sixteen_bits_of_colours_count() -> None:
    values = np.random.default_rng(0).integers(0, 65536, (4, 4, 3))
    np.testing.assert_array_equal(pixels(png16(values, 2)), np.round(values / 257))


@pytest.mark.parametrize(("kind", "channels"), [(2, 3), (4, 2), (6, 4)], ids=["colours", "grey with alpha", "alpha"])
def test_a_damaged_file_of_sixteen_bits_does_not_end_the_process(kind: int, channels: int) -> None:
    """Decode files with single bits flipped in another process, since their decoder once ended its own."""
    sound = png16(np.random.default_rng(0).integers(0, 65536, (16, 16, channels)), kind)
    start = sound.index(b"IDAT") + 4
    (size,) = struct.unpack(">I", sound[start - 8 : start - 4])
    places = [*range(start, start + size + 4, 37), start + size - 1, start + size]  # the last is of the sum
    damaged = [sound[:place] + bytes([sound[place] ^ 4]) + sound[place + 1 :] for place in places]
    rows = zlib.compress(zlib.decompress(sound[start : start + size])[:-100])
    damaged += [sound[: start + size // 2], sound[: start - 8] + struct.pack(">I", len(rows)) + b"IDAT" + rows]
    program = (
        "import pickle, sys\n"
        "from benchmark.errors import ConfigurationError\n"
        "from datamodules.pixels import Decoding, decode\n"
        "refused = 0\n"
        "for content in pickle.load(sys.stdin.buffer):\n"
        "    try: decode(('it', content), Decoding(4, 'squash', as_seen=True))\n"
        "    except ConfigurationError as error: refused += str(error).startswith('cannot decode the image it (')\n"
        "print(refused)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(damaged), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert int(done.stdout) > len(damaged) // 2


@pytest.mark.parametrize(("kind", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
@pytest.mark.parametrize("bits", [9, 16])
def test_sixteen_bits_are_rounded_to_the_nearest_of_eight(kind: int, channels: int, bits: int) -> None:
    values = np.random.default_rng(kind).integers(0, 2**bits, (4, 4, channels))
    if alpha := channels in (2, 4):
        values[..., -1] = 65535
    expected = np.round(values[..., : channels - alpha] / ((2**bits - 1) / 255))
    found = pixels(png16(values, kind), Decoding(4, "squash", as_seen=True, bits=bits))
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


EXIF = Image.Exif()
EXIF[0x0112] = 6
PROFILE = b"\nexif\n%8d\n" % len(EXIF.tobytes()) + EXIF.tobytes().hex().encode() + b"\n"
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("last", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "chunk",
    [
        b"eXIf" + EXIF.tobytes().removeprefix(b"Exif\0\0"),
        b"zTXtRaw profile type exif\0\0" + zlib.compress(PROFILE),
        b"iTXtXML:com.adobe.xmp\0\0\0\0\0" + XMP,
    ],
    ids=["EXIF", "profile", "XMP"],
)
def test_a_png_is_turned_wherever_it_says_so(chunk: bytes, last: bool, bits: int) -> None:
    """Sixteen bits of colours are turned as eight are."""
    stored = np.rot90(PICTURE).astype(np.int64) * (257 if bits == 16 else 1)
    content = png16(stored, 2, *((b"", chunk) if last else (chunk,)), bits=bits)
    np.testing.assert_array_equal(pixels(content), PICTURE)


def test_the_transparent_one_of_sixteen_bit_colours_is_white() -> None:
    values = np.full((4, 4, 3), (2570, 20, 30))
    values[0, 0, 2] = 31  # is another colour, though not in 8 bits
    found = decode(("it", png16(values, 2, b"tRNS" + struct.pack(">3H", 2570, 20, 30))), SEEN)
    assert found.pixels[:, 0, 0].tolist() == [10, 0, 0]
    assert (found.pixels.reshape(3, 16)[:, 1:] == 255).all()
    assert found.largest == 2570


def broken_tiff() -> bytes:
    """A TIFF whose second directory, which has no image, lies in its pixels."""
    content = bytearray(encoded(Image.fromarray(PICTURE), "TIFF"))
    (start,) = struct.unpack_from("<I", content, 4)
    (entries,) = struct.unpack_from("<H", content, start)
    struct.pack_into("<I", content, start + 2 + 12 * entries, len(content))
    return bytes(content) + struct.pack("<H", 1) + bytes(16)


def test_whatever_pillow_says_of_a_damaged_file_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot decode the image it \(Missing dimensions\); it is damaged"):
        decode(("it", broken_tiff()), SEEN)
    (name,) = saved(tmp_path, broken_tiff(), suffix="tif")
    ((_, said),) = decoded([tmp_path / name], SEEN)
    assert isinstance(said, str)
    assert "(Missing dimensions); it is damaged" in said


def saved(root: Path, *contents: bytes, suffix: str = "png") -> list[str]:
    for number, content in enumerate(contents):
        (root / f"{number}.{suffix}").write_bytes(content)
    return [f"{number}.{suffix}" for number in range(len(contents))]


@pytest.mark.filterwarnings("error")
def test_nearly_black_images_of_sixteen_bits_are_told_of_each_time(tmp_path: Path) -> None:
    dark, bright = png16(np.full((4, 4, 1), 2999), 0), png16(np.full((4, 4, 1), 16384), 0)
    eight = encoded(Image.new("L", (4, 4), 3), "PNG")
    files = saved(tmp_path, dark, dark, eight, bright)
    said = r"2 images have 16 bits and are nearly black: largest value 2999 of 65535; give .*init_args\.bits=12"
    for _ in range(2):  # decoded, and from the cache
        with pytest.warns(UserWarning, match=said):
            read_images(tmp_path, files[:3], 4, "squash", as_seen=True)
    found = read_images(tmp_path, files[:3], 4, "squash", as_seen=True, bits=12)
    assert found.images[:, 0, 0, 0].tolist() == [187, 187, 3]
    read_images(tmp_path, files, 4, "squash", as_seen=True)  # one uses its range
    read_images(tmp_path, files[2:3], 4, "squash", as_seen=True)
    read_images(tmp_path, files[:2], 4, "squash")
    with pytest.raises(ConfigurationError, match=r"bits=12 says .* and no image of .* has 16; leave it out"):
        read_images(tmp_path, files[2:3], 4, "squash", as_seen=True, bits=12)


def test_colours_of_which_eight_bits_are_read_are_told_of(tmp_path: Path) -> None:
    files = saved(tmp_path, tiff16(np.full((4, 4, 3), 2999)), suffix="tif")
    with pytest.warns(UserWarning, match=r"1 TIFF images have colours of 16 bits, of which the upper 8 are read; save"):
        assert read_images(tmp_path, files, 4, "squash", as_seen=True).images.max() == 11
    with pytest.raises(ConfigurationError, match=r"0\.tif has colours of 16 bits in TIFF, .* bits=12 cannot be heeded"):
        read_images(tmp_path, files, 4, "squash", as_seen=True, bits=12)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (encoded(Image.fromarray(np.eye(4, dtype=np.float32)), "TIFF"), "mode F, .*floating-point numbers of 32 bits"),
        (encoded(Image.fromarray(np.eye(4, dtype=np.int32)), "TIFF"), "mode I, .*whole numbers of 32 bits, or .*"),
        (tiff16(np.full((4, 4, 1), -1000), signed=True), "mode I, .*or of 16 bits with sign"),
    ],
    ids=["float", "int", "signed"],
)
def test_numbers_of_no_known_range_are_named_with_what_to_do(content: bytes, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said + r"\); choose the range .* scale it to 0 to 255") as refused:
        decode(("it", content), SEEN)
    assert "download" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"no image at all", b"\x89PNG\r\n\x1a\n"])
def test_no_object_in_memory_is_named(content: bytes) -> None:
    with pytest.raises(ConfigurationError, match="cannot decode the image it ") as refused:
        decode(("it", content), SEEN)
    assert "0x" not in str(refused.value)


def test_one_photo_in_several_formats_is_one_image(tmp_path: Path) -> None:
    image = Image.fromarray(PICTURE)
    contents = [encoded(image, "PNG"), encoded(image, "PNG", compress_level=0), encoded(image, "WEBP", lossless=True)]
    files = saved(tmp_path, *contents, encoded(Image.fromarray(PICTURE[::-1].copy()), "PNG"))
    assert read_images(tmp_path, files, 4, "squash", as_seen=True).group.tolist() == [0, 0, 0, 3]
    assert read_images(tmp_path, files, 4, "squash").group.tolist() == [0, 1, 2, 3]  # byte-identical ones alone


@pytest.mark.parametrize("form", ["TIFF", "GIF", "PNG", "WEBP"])
def test_a_file_of_several_images_is_no_image_of_ones_own(form: str) -> None:
    pages = [Image.fromarray(PICTURE), Image.fromarray(PICTURE[::-1])]
    several = encoded(pages[0], form, save_all=True, append_images=pages[1:], lossless=True)
    with pytest.raises(ConfigurationError, match=rf"the image a\.img is a {form} file of 2 images, as pages of a scan"):
        decode(("a.img", several), SEEN)
    single = encoded(pages[0], form, lossless=True)
    expected = decode(("a.img", single), SEEN).pixels
    assert np.array_equal(decode(("a.img", several), PUBLISHED).pixels, expected)


def test_a_photo_with_further_images_of_it_is_read() -> None:
    image = Image.fromarray(PICTURE)
    photo = encoded(image, "MPO", save_all=True, append_images=[image])
    assert np.array_equal(decode(("a.jpg", photo), SEEN).pixels, decode(("a.jpg", encoded(image, "JPEG")), SEEN).pixels)
