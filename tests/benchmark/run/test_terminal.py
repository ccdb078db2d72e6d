"""Output whose reader stops, or that a full disk does not take: the run goes on."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from federation import CONF

from benchmark.commands import main as benchmark_main
from benchmark.run.cli import main
from benchmark.run.terminal import outliving_readers

GONE = "standard output takes no more (Broken pipe); the run goes on without it\n"


@pytest.fixture
def unread() -> Iterator[TextIO]:
    """A pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    yield stream
    stream.close()  # what it still holds goes nowhere


def test_what_nobody_reads_is_lost_and_told_once(
    unread: TextIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", unread)
    with outliving_readers():
        for _ in range(3):
            print("a line", flush=True)
        sys.stdout.writelines(["more\n"])
        assert sys.stdout.fileno() == unread.fileno()
    assert sys.stdout is unread
    print("afterwards", flush=True)
    assert capsys.readouterr().err == GONE


def test_a_full_disk_takes_no_run_along(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with outliving_readers():
            print("x" * 100_000)
    assert capsys.readouterr().err == GONE.replace("Broken pipe", "No space left on device")


def test_an_error_stream_that_is_gone_ends_nothing(unread: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", unread)
    monkeypatch.setattr(sys, "stderr", unread)
    with outliving_readers():
        print("a line", flush=True)
        print("an error", file=sys.stderr, flush=True)


def test_a_run_goes_on_to_its_record_without_a_reader(
    unread: TextIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", unread)
    files = [f"--config={CONF / 'base.yaml'}", f"--config={CONF / 'HeadTune.yaml'}"]
    main(["fit", *files, "--run_dir=run", "--trainer.max_epochs=1", "--trainer.logger=false"])
    assert Path("run/record.json").is_file()
    assert GONE in capsys.readouterr().err


def test_a_table_goes_on_without_a_reader(unread: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def run_table(*_: object, **__: object) -> None:
        print("[1/2] finished", flush=True)
        done.append("all")
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmark.tables.run_table.run_table", run_table)
    monkeypatch.setattr(sys, "stdout", unread)
    assert benchmark_main(["table", "table1"]) == 130
    assert done == ["all"]
