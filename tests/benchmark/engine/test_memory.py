"""Freed memory stays with the process, unless the user has chosen otherwise; what is there is not searched."""

import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from federation import build, fit
from lightning.pytorch.callbacks import Callback

from benchmark.engine.device import memory
from benchmark.engine.device.allocator import NoSearchForGarbage, keep_freed_memory

#: How many pages are cleared for ten times 48 MiB, taken and given back in turn: 12,288 pages each. First by default,
#: then with freed memory kept; glibc's own threshold, which follows what is freed, never comes to blocks of this size.
PROGRAM = """
import resource, sys
import torch
from benchmark.engine.device.allocator import keep_freed_memory
for keep in (False, True):
    if keep and not keep_freed_memory():
        sys.exit(3)
    for turn in range(20):
        if turn == 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(12 * 2**20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(resource.getpagesize() != 4096, reason="counts pages of 4 KiB")
def test_freed_blocks_are_used_again() -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=plain)
    if done.returncode == 3:
        pytest.skip("not glibc")
    assert done.returncode == 0, done.stderr
    by_default, kept = map(int, done.stdout.split())
    assert by_default >= 10 * 12_288
    assert kept < 12_288


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1"),
        ("MALLOC_TRIM_THRESHOLD_", "1"),
        ("MALLOC_MMAP_THRESHOLD_", "1"),
    ],
)
def test_what_the_user_set_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert keep_freed_memory() is False


@pytest.mark.parametrize(
    ("limit", "free"),
    [(None, 8192), ("max", 8192), ("5000", 3000), ("99999", 8192)],
    ids=["none", "max", "low", "high"],
)
def test_free_memory_counts_cached_files_and_keeps_to_a_containers_limit(
    limit: str | None, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 64 kB\nMemFree: 1 kB\nMemAvailable:  8 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("2500\n")
        (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 500\n")
    assert memory.free_memory(torch.device("cpu")) == free
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "nothing")
    assert memory.free_memory(torch.device("cpu")) > 0


@pytest.mark.parametrize("fails", [False, True])
def test_python_leaves_what_is_there_to_itself_while_training(fails: bool) -> None:
    seen: list[int] = []

    class Look(Callback):
        def on_train_epoch_end(self, *_: object) -> None:
            seen.append(gc.get_freeze_count())
            if fails:
                raise OSError("the disk is full")

    method, data = build("HeadTune")
    try:
        fit(method, data, 1, [NoSearchForGarbage(), Look()])
    except OSError:
        assert fails
    assert len(seen) == 1
    assert seen[0] > 100_000
    assert gc.get_freeze_count() == 0
