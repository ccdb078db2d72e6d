import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from benchmark.errors import ConfigurationError
from datamodules.archives import fetch, unpack_folder


def everything(path):
    return True


def write_zip(path, names):
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, f"content of {name}")


def test_fetched_if_the_sum_is_right(tmp_path):
    (tmp_path / "there").write_bytes(b"some bytes")
    url = (tmp_path / "there").as_uri()
    fetch(url, tmp_path / "made/here", hashlib.md5(b"some bytes").hexdigest())
    assert (tmp_path / "made/here").read_bytes() == b"some bytes"
    with pytest.raises(ConfigurationError, match=r"has the MD5 sum .* expected is 00: .* put it at .*other"):
        fetch(url, tmp_path / "made/other", "00")
    with pytest.raises(ConfigurationError, match=r"cannot download file:.*gone .*put it at .*other"):
        fetch((tmp_path / "gone").as_uri(), tmp_path / "made/other", "00")
    assert os.listdir(tmp_path / "made") == ["here"]


def test_one_folder_is_unpacked_and_of_it_what_is_wanted(tmp_path):
    write_zip(tmp_path / "a.zip", ["top/a/1.txt", "top/b/2.txt", "else/3.txt", "4.txt"])
    unpack_folder(tmp_path / "a.zip", "top", tmp_path / "new", lambda path: path.parts[1] == "b")
    assert [path.name for path in (tmp_path / "new").rglob("*")] == ["b", "2.txt"]
    assert (tmp_path / "new/b/2.txt").read_text() == "content of top/b/2.txt"
    assert sorted(os.listdir(tmp_path)) == ["a.zip", "new"]


@pytest.mark.parametrize("name", ["../out.txt", "top/../../out.txt", "/out.txt", "..\\out.txt"])
def test_no_path_leads_out(tmp_path, name):
    write_zip(tmp_path / "a.zip", ["top/a.txt", name])
    with pytest.raises(ConfigurationError, match="which leads out of its folder"):
        unpack_folder(tmp_path / "a.zip", "top", tmp_path / "new", everything)
    assert os.listdir(tmp_path) == ["a.zip"]


def test_other_archives_are_refused(tmp_path):
    write_zip(tmp_path / "a.zip", ["else/a.txt"])
    with pytest.raises(
        ConfigurationError, match=r"a\.zip holds no folder top, or no image in it: this is not the official"
    ):
        unpack_folder(tmp_path / "a.zip", "top", tmp_path / "new", everything)
    (tmp_path / "b.zip").write_bytes(b"not a zip file")
    with pytest.raises(
        ConfigurationError, match=r"cannot unpack .*b\.zip into .* \(File is not a zip file\); if it is damaged"
    ):
        unpack_folder(tmp_path / "b.zip", "top", tmp_path / "new", everything)
    assert sorted(os.listdir(tmp_path)) == ["a.zip", "b.zip"]


def broken(path):
    """A zip whose compressed bytes are others than its directory says."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("top/a/1.txt", "words " * 1000)
    content = bytearray(path.read_bytes())
    content[45:60] = b"\xff" * 15
    path.write_bytes(content)


def encrypted(path):
    write_zip(path, ["top/a/1.txt"])
    content = bytearray(path.read_bytes())
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)


def bomb(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("top/a/1.txt", bytes(20 * 10**6))


def liar(path):
    """As ``bomb``, but its directory says one byte."""
    bomb(path)
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02") + 24
    content[at : at + 4] = (1).to_bytes(4, "little")
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (broken, r"cannot unpack .*a\.zip into .*Error -3 while decompressing.*; if it is damaged, remove it"),
        (encrypted, r"a\.zip is encrypted, as no official archive is; remove it"),
        (bomb, r"a\.zip unpacks to 20000000 bytes, more than \d+, as images would not"),
        (liar, r"cannot unpack .*a\.zip into .*Bad CRC-32"),
        (lambda path: write_zip(path, ["top"]), r"a\.zip holds no folder top, or no image in it"),
        (lambda path: write_zip(path, ["top/", "top/a/"]), r"a\.zip holds no folder top, or no image in it"),
        (lambda path: write_zip(path, ["top/b/1.txt"]), r"a\.zip holds no folder top, or no image in it"),
    ],
)
def test_what_no_official_archive_is_leaves_nothing_behind(tmp_path, make, message):
    make(tmp_path / "a.zip")
    with pytest.raises(ConfigurationError, match=message):
        unpack_folder(tmp_path / "a.zip", "top", tmp_path / "new", lambda path: path.parts[1] == "a")
    assert os.listdir(tmp_path) == ["a.zip"]


def test_a_folder_that_cannot_be_written_to(tmp_path):
    write_zip(tmp_path / "a.zip", ["top/a/1.txt"])
    with pytest.raises(ConfigurationError, match=r"cannot unpack .*a\.zip into /proc \(.*No such file"):
        unpack_folder(tmp_path / "a.zip", "top", Path("/proc/new"), everything)
    with pytest.raises(
        ConfigurationError, match=r"cannot download .*; download it by other means and put it at /proc/"
    ):
        fetch((tmp_path / "a.zip").as_uri(), Path("/proc/new"), "00")
