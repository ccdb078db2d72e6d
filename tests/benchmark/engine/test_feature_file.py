"""Features that are kept in a file for other runs."""

import errno
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import build, fit, learned
from over_ranks import over_ranks
from safetensors import SafetensorError

from benchmark.engine.batches import feature_file
from benchmark.errors import ConfigurationError
from benchmark.locks import FileLock


def trained(folder: Path | str, *options: str, settings: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """Train a run; return the number of batches that its backbone has seen, and the learned values."""
    method, data = build("HeadTune", f"--data.cache_features={folder}", "--data.eval_batch_size=20", *options)
    batches = 0

    def counted(x: torch.Tensor, encode: Any = method.frozen_features) -> dict[str, torch.Tensor]:
        nonlocal batches
        batches += 1
        return encode(x)

    method.frozen_features = counted
    fit(method, data, 1, settings=settings or {})
    return batches, learned(method)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name].nan_to_num(7), other[name].nan_to_num(7)) for name in one)


def test_a_second_run_encodes_one_batch_and_learns_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, expected = trained("true")
    first, made = trained(tmp_path / "features")
    (file,) = (tmp_path / "features").iterdir()
    second, read = trained(tmp_path / "features")
    assert (first, second) == (plain, 1)
    assert plain > 2
    assert_same(made, expected)
    assert_same(read, expected)

    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        again, mended = trained(tmp_path / "features")
    assert "is damaged: its features are made again" in caplog.text
    assert again == plain
    assert_same(mended, expected)
    file.write_bytes(b"no safetensors")
    assert trained(tmp_path / "features")[0] == plain
    assert trained(tmp_path / "features")[0] == 1


def test_a_run_waits_for_one_that_makes_the_same_features(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, expected = trained(tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    file.unlink()
    other = FileLock(file.with_suffix(".lock"))
    assert other.acquire()

    def the_other_ends(seconds: float) -> None:
        file.write_bytes(content)
        other.path.unlink()
        other.release()

    monkeypatch.setattr(feature_file.time, "sleep", the_other_ends)
    with caplog.at_level(logging.INFO):
        batches, found = trained(tmp_path)
    assert f"waiting for another run, which reads or makes the same ({other.path})" in caplog.text
    assert (batches, [*tmp_path.iterdir()]) == (1, [file])
    assert_same(found, expected)

    file.unlink()
    other.path.write_text("held: process 7 on a host that was switched off\n")
    assert trained(tmp_path)[0] == made
    assert [*tmp_path.iterdir()] == [file]


def test_where_no_lock_can_be_had_nobody_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("benchmark.locks.fcntl.flock", without_locks)
    with caplog.at_level(logging.INFO):
        made, _ = trained(tmp_path)
    assert made > 2
    assert re.search(r"runs that start together may each make these features: .*\(No locks available\)", caplog.text)
    assert trained(tmp_path)[0] == 1


def test_other_images_weights_and_transforms_have_files_of_their_own(tmp_path: Path) -> None:
    for count, options in enumerate(
        [
            (),
            ("--data.transform=datamodules.ImageTransform", "--data.transform.normalize=clip"),
            ("--seed_everything=5",),
        ]
    ):
        assert trained(tmp_path, *options)[0] > 2
        assert len([*tmp_path.iterdir()]) == count + 1
    method, data = build("HeadTune", f"--data.cache_features={tmp_path}", "--data.eval_batch_size=20")
    data.setup()
    data.pool.images[-1, 0, 0, 0] ^= 1
    fit(method, data, 1)
    assert len([*tmp_path.iterdir()]) == 4


def test_two_ranks_read_what_one_has_written(tmp_path: Path) -> None:
    expected = trained(tmp_path)[1]
    for _, found in over_ranks(2, lambda strategy: trained(tmp_path, settings={"devices": 2, "strategy": strategy})):
        assert_same(found, expected)
    assert len([*tmp_path.iterdir()]) == 1


def test_a_word_is_no_folder() -> None:
    with pytest.raises(ConfigurationError, match=r"auto or a folder, written with a slash; got 'ture'"):
        build("HeadTune", "--data.cache_features=ture")


def test_features_that_cannot_be_kept_are_used_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise SafetensorError("No space left on device")

    _, expected = trained("true")
    monkeypatch.setattr("benchmark.engine.batches.feature_file.save_file", full)
    with caplog.at_level(logging.WARNING):
        _, found = trained(tmp_path)
    assert "is not written, and other runs make these features anew: No space left on device" in caplog.text
    assert_same(found, expected)
    assert not [*tmp_path.iterdir()]
