"""Run directories that can't be had, are in use, or would be written over; and those that vanish during a run."""

import errno
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from federation import CONF
from refusal import refused

from benchmark.errors import ConfigurationError
from benchmark.files import replacing
from benchmark.run.cli import main
from benchmark.run.recorder import Recorder
from benchmark.run.run_directory import FILES, FOLDERS, LOCK, FileLock, claimed

BASE = ["fit", "--config", str(CONF / "base.yaml"), "--config", str(CONF / "HeadTune.yaml"), "--trainer.max_epochs=2"]

#: The checkpoint with which the run in the folder ``run`` goes on.
LAST = "run/checkpoints/last.ckpt"


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("afile").write_text("precious")


@pytest.mark.parametrize(
    ("run_dir", "message"),
    [
        ("", "--run_dir is empty"),
        ("afile", "--run_dir='afile' can't be used: File exists; give a folder that can be written to"),
        ("afile/x", "--run_dir='afile/x' can't be used: Not a directory"),
        ("/proc/nowhere", "--run_dir='/proc/nowhere' can't be used: No such file or directory"),
        ("runs/" + 300 * "x", "can't be used: File name too long"),
        ("a\0b", "no file can have this name (embedded null byte)"),
    ],
)
def test_no_place_for_a_run(run_dir: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, main, [*BASE, f"--run_dir={run_dir}"])
    assert Path("afile").read_text() == "precious"
    assert not Path("runs").exists()


@pytest.mark.parametrize("files", [[], ["csv/metrics.csv"]])
def test_a_run_that_wrote_no_file_leaves_no_directory(files: list[str]) -> None:
    with claimed(Path("deep/run"), None):
        Path("deep/run/csv").mkdir()  # as loggers do when they are made
        for name in files:
            Path("deep/run", name).touch()
    assert Path("deep").exists() == bool(files)
    assert all(Path("deep/run", name).exists() for name in files)


def test_a_directory_belongs_to_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    lock = FileLock(Path("run") / LOCK)
    assert lock.acquire()
    lock.write("held")
    try:
        line = refused(capsys, main, [*BASE, "--run_dir=run"])
    finally:
        lock.release()
    assert line.startswith("error: run belongs to a run that goes on (process ")
    assert [entry.name for entry in Path("run").iterdir()] == [LOCK]


def test_a_file_system_without_locks_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("benchmark.locks.fcntl.flock", without_locks)
    line = refused(capsys, main, [*BASE, "--run_dir=run"])
    assert line.endswith("cannot be locked (No locks available): give a folder on a file system with locks")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    run = tmp_path_factory.mktemp("directories") / "run"
    main([*BASE, f"--run_dir={run}"])
    return run


def test_a_finished_run_is_never_replaced(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(finished_run, "run")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file() and path.name != LOCK}
    for more in ([], ["--ckpt_path=last"], ["--trainer.max_epochs=4", "--ckpt_path=last"], ["--seed_everything=9"]):
        assert "run holds a finished run; give another --run_dir" in refused(
            capsys, main, [*BASE, "--run_dir=run", *more]
        )
    assert before == {path: path.read_bytes() for path in before}


def test_another_unfinished_run_is_not_written_over(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        shutil.copytree(finished_run, name)
        Path(name, "record.json").unlink()
    shutil.copy("b/checkpoints/last.ckpt", "b/checkpoints/best.ckpt")
    before = Path("b/checkpoints/last.ckpt").read_bytes()
    for given in ("a/checkpoints/last.ckpt", "b/checkpoints/best.ckpt"):
        line = refused(capsys, main, [*BASE, "--run_dir=b", f"--ckpt_path={given}"])
        assert "b holds an unfinished run; continue it with benchmark resume b, or with --ckpt_path=b/che" in line
    assert Path("b/checkpoints/last.ckpt").read_bytes() == before


@pytest.fixture
def unfinished(finished_run: Path) -> list[str]:
    """The command that goes on with a run that logged, in the folder ``run``."""
    shutil.copytree(finished_run, "run")
    Path("run/record.json").unlink()
    for place in (*FOLDERS, "csv/metrics.csv"):
        path = Path("run", place)
        path.write_text("step") if path.suffix else path.mkdir(exist_ok=True)
    return [*BASE, "--run_dir=run", f"--ckpt_path={LAST}", "--trainer.logger=true"]


def everything(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*") if path.name != LOCK}


def in_place_of(path: Path) -> str:
    """Replace a file by a folder, or a folder by a file; return the kind that should have been there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.write_text("mine") if not path.suffix else Path(path, "mine").mkdir(parents=True)
    return "a file" if path.suffix else "a folder"


@pytest.mark.parametrize("place", [*FOLDERS, *(pattern.replace("*", "last") for pattern in FILES)])
@pytest.mark.usefixtures("unfinished")
def test_something_in_the_place_of_what_a_run_writes_is_left_alone(place: str) -> None:
    made = in_place_of(Path("run", place))
    before = everything(Path("run"))
    words = f"run is not used: run/{place} is no {made[2:]}, and a run makes {made} there; move it elsewhere, or give"
    with pytest.raises(ConfigurationError, match=re.escape(words)), claimed(Path("run"), LAST):
        pytest.fail("the directory was taken")
    assert everything(Path("run")) == before


@pytest.mark.usefixtures("unfinished")
@pytest.mark.parametrize("place", ["", *FOLDERS])
def test_a_run_goes_on_in_no_folder_that_it_may_not_write_to(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, access = Path("run", place), os.access  # root may write everywhere, so that modes would show nothing
    monkeypatch.setattr(os, "access", lambda path, *given: path != folder and access(path, *given))
    before = everything(Path("run"))
    words = f"run is not used: no file can be written to {folder}; give yourself the right to (chmod u+wx {folder})"
    with pytest.raises(ConfigurationError, match=re.escape(words)), claimed(Path("run"), LAST):
        pytest.fail("the directory was taken")
    assert everything(Path("run")) == before


def test_a_run_whose_log_has_no_place_is_one_line(unfinished: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    in_place_of(Path("run/csv"))
    assert "run is not used: run/csv is no folder" in refused(capsys, main, unfinished)


def test_a_log_that_may_not_be_replaced_is_one_line_before_training(
    unfinished: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, remove = Path("run/csv/metrics.csv").resolve(), os.remove

    def refusing(path: str) -> None:
        if Path(path).resolve() == log:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)  # as where its owner is another
        remove(path)

    monkeypatch.setattr(os, "remove", refusing)
    line = refused(capsys, main, unfinished)
    assert f"the log {log} can't be written: Operation not permitted; move it elsewhere, or give" in line
    assert log.read_text() == "step"


@pytest.mark.parametrize("kind", ["CSVLogger", "TensorBoardLogger"])
def test_a_file_in_the_place_of_a_loggers_own_folder_is_one_line(
    kind: str, unfinished: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run/mine").mkdir()
    Path("run/mine/first").write_text("mine")
    line = refused(
        capsys,
        main,
        [*unfinished[:-1], *(f"--trainer.logger{given}" for given in (f"={kind}", ".name=mine", ".version=first"))],
    )
    assert "the log " in line
    assert "run/mine/first can't be written: File exists; move it elsewhere, or give another --run_dir" in line
    assert Path("run/mine/first").read_text() == "mine"


def test_what_a_killed_process_left_is_removed_when_the_run_goes_on(finished_run: Path) -> None:
    shutil.copytree(finished_run, "run")
    Path("run/record.json").unlink()
    left = [Path("run/.config.yaml.17.tmp"), Path("run/checkpoints/.last.ckpt.17.tmp")]
    left += [Path(f"run/{folder}/.round-000003.parquet.17.tmp") for folder in ("metrics", "predictions")]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text("half")
    main([*BASE, "--run_dir=run", "--ckpt_path=last"])
    assert not [path for path in left if path.exists()]


def test_a_run_says_its_directory_first_and_then_its_method(capsys: pytest.CaptureFixture[str]) -> None:
    main([*BASE, "--trainer.max_epochs=0"])
    (run,) = Path("runs").iterdir()
    assert capsys.readouterr().out.splitlines()[:2] == [f"run directory: {run}", "method: HeadTune"]


def test_a_directory_that_vanishes_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = Recorder._collect

    def collect_and_remove(self: Recorder, trainer: Any, method: Any) -> None:
        if method.server.finished_rounds == 1:
            shutil.rmtree("run")
        collect(self, trainer, method)

    monkeypatch.setattr(Recorder, "_collect", collect_and_remove)
    line = refused(capsys, main, [*BASE, "--run_dir=run"])
    assert "cannot be written: No such file or directory" in line
    assert not Path("run/record.json").exists()


class FullDisk:
    """A file on a disk with room for so many more bytes."""

    def __init__(self, stream: Any, room: int) -> None:
        self.stream, self.room = stream, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return int(self.stream.write(data))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints find a disk with 3,000 bytes left."""
    opened = Path.open

    def full(path: Path, *arguments: Any, **named: Any) -> Any:
        stream = opened(path, *arguments, **named)
        return FullDisk(stream, 3000) if path.name.startswith(".last.ckpt") else stream

    monkeypatch.setattr(Path, "open", full)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, main, [*BASE, "--run_dir=run"])
    assert "run/checkpoints/last.ckpt cannot be written: No space left on device" in line
    assert not list(Path("run/checkpoints").iterdir())


def test_a_home_folder_is_the_same_for_everything_that_a_run_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    main([*BASE, "--run_dir=~/one", "--trainer.max_epochs=1"])
    assert {"record.json", "config.yaml", "checkpoints"} < {entry.name for entry in (tmp_path / "home/one").iterdir()}
    assert not Path("~").exists()
    main(["test", "--run_dir=~/one"])


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_a_run_of_one_device_is_no_second_process(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    line = refused(capsys, main, [*BASE, "--run_dir=run"])
    assert f"{name}=1 in the environment says that this is one of several processes" in line
    assert not Path("run").exists()
    assert logging.root.manager.disable == logging.NOTSET  # what this process does next is heard


def test_processes_of_one_id_that_write_one_file_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two containers do that share a cache; what a killed one has left is gone at the next writing."""
    monkeypatch.setattr(os, "getpid", lambda: 17)
    Path(".shared.17.tmp").write_text("left by a killed process")
    with replacing(Path("shared")) as first:
        first.write(b"first, ")
        with replacing(Path("shared")) as second:
            second.write(b"second, whole")
        assert Path("shared").read_text() == "second, whole"
        first.write(b"whole")
    assert Path("shared").read_text() == "first, whole"
    assert [*Path.cwd().glob(".shared.*")] == []
