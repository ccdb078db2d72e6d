import hashlib
import os
import zipfile

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
    with pytest.raises(ConfigurationError, match=r"a\.zip holds no folder top: this is not the official archive"):
        unpack_folder(tmp_path / "a.zip", "top", tmp_path / "new", everything)
    (tmp_path / "b.zip").write_bytes(b"not a zip file")
    with pytest.raises(
        ConfigurationError, match=r"cannot unpack .*b\.zip \(File is not a zip file\); if it is damaged"
    ):
        unpack_folder(tmp_path / "b.zip", "top", tmp_path / "new", everything)
    assert sorted(os.listdir(tmp_path)) == ["a.zip", "b.zip"]
