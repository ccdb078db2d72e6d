"""Runs that are asked to end: they say what is kept and how to go on, and leave nothing half-written."""

import os
import pty
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from federation import CONF
from processes import Forked

from benchmark.records.stored_run import verify_record
from benchmark.run.checkpoint import finished_rounds, read_checkpoint
from benchmark.run.resume import fit_again
from benchmark.signals import Interrupted, interrupting_signal, termination_as_interrupt

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "benchmark.run.cli"]
BASE = ["--config", str(CONF / "base.yaml"), "--config", str(CONF / "HeadTune.yaml"), "--data.clients_at_once=1"]


def test_the_signal_is_found_among_errors_that_are_made_of_each_other() -> None:
    first, second = ValueError(), TypeError()
    first.__cause__, second.__cause__ = second, first
    assert interrupting_signal(first) is None
    second.__cause__ = Interrupted(signal.SIGHUP)
    assert interrupting_signal(first) is signal.SIGHUP


ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


def forked(*arguments: str, cwd: Path) -> Forked:
    return Forked([*PROGRAM, *arguments], cwd, os.environ | ENVIRONMENT, apart=True)


def start(*arguments: str, cwd: Path, terminal: int | None = None) -> subprocess.Popen[str]:
    said = subprocess.PIPE if terminal is None else terminal
    command = [*PROGRAM, *arguments]
    return subprocess.Popen(
        command, env=os.environ | ENVIRONMENT, cwd=cwd, stdout=said, stderr=said, text=True, preexec_fn=_heed_ctrl_c
    )


def _heed_ctrl_c() -> None:
    """Shells start what runs in the background with SIGINT ignored, and so would be all that starts from there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until_there(path: Path, process: "subprocess.Popen[str] | Forked") -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def stopped(process: "subprocess.Popen[str] | Forked", number: signal.Signals) -> str:
    """The one line that a signal is answered with."""
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number, out + err
    seed, *lines = err.splitlines()
    assert "Seed set to 3" in seed
    assert len(lines) == 1, err
    (line,) = lines
    assert line.startswith(f"stopped by {number.name}: ")
    return line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_what_is_kept_and_goes_on_from_there(number: signal.Signals, tmp_path: Path) -> None:
    last = tmp_path / "run/checkpoints/last.ckpt"
    process = forked("fit", *BASE, "--trainer.max_epochs=4000", "--run_dir=run", cwd=tmp_path)
    wait_until_there(last, process)
    line = stopped(process, number)
    rounds = finished_rounds(last)
    said = f"kept up to round {rounds}; go on with: "
    assert said in line
    assert not list(tmp_path.rglob("*.tmp"))
    read_checkpoint(last)
    program, *arguments = shlex.split(line.partition("go on with: ")[2])
    assert program == "benchmark"
    again = fit_again(*(tmp_path / name for name in arguments[1:]), [f"--trainer.max_epochs={rounds + 1}"])
    assert arguments == ["resume", "run"]
    process = forked(*again, cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert verify_record(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_before_the_first_round_nothing_is_kept_and_the_line_says_so(number: signal.Signals, tmp_path: Path) -> None:
    long = ["--data.batch_size=1", "--model.init_args.training.epochs=500"]
    process = start("fit", *BASE, *long, "--run_dir=run", cwd=tmp_path)
    wait_until_there(tmp_path / "run/config.yaml", process)
    time.sleep(1)
    assert "no round is finished and kept yet; the same command starts again" in stopped(process, number)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_signal_at_any_moment_is_one_line(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    number = rng.choice([signal.SIGINT, signal.SIGTERM])
    process = start("fit", *BASE, "--trainer.max_epochs=4000", "--run_dir=run", cwd=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "run directory: run\n"
    time.sleep(rng.uniform(0, 4))
    stopped(process, number)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_ctrl_c_twice_in_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    bar = "--trainer.enable_progress_bar=true"
    process = start("fit", *BASE, bar, "--trainer.max_epochs=4000", "--run_dir=run", cwd=tmp_path, terminal=theirs)
    os.close(theirs)
    last, shown, pressed = tmp_path / "run/checkpoints/last.ckpt", b"", 0
    while process.poll() is None:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if last.exists() and pressed < 2:  # an impatient user
            process.send_signal(signal.SIGINT)
            pressed += 1
            time.sleep(0.02)
    assert process.wait() == 130, shown[-2000:]
    assert shown.count(b"stopped by SIGINT: what is kept is run/checkpoints/last.ckpt, after round ") == 1
    assert b"Traceback" not in shown


def test_an_interrupt_is_found_behind_the_exit_that_lightning_makes_of_it() -> None:
    def shut_down() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except KeyboardInterrupt:
            sys.exit(1)

    with termination_as_interrupt(), pytest.raises(SystemExit) as ended:
        shut_down()
    assert interrupting_signal(ended.value) == signal.SIGTERM
    assert interrupting_signal(SystemExit(1)) is None
    assert interrupting_signal(Interrupted(signal.SIGHUP)) == signal.SIGHUP
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_is_ignored_from_outside_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with termination_as_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_libraries_are_imported_ends_in_one_line(number: signal.Signals, tmp_path: Path) -> None:
    kept = tmp_path / "run/checkpoints/last.ckpt"
    arguments, said = [f"--config={CONF / name}.yaml" for name in ("base", "HeadTune")], ""
    if number is signal.SIGTERM:
        kept.parent.mkdir(parents=True)
        kept.touch()
        arguments += ["--run_dir=run", "--ckpt_path=last"]
        said = f": kept up to the last finished round; go on with: lightning-cli fit {' '.join(arguments)}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmark.run.start", "fit", *arguments]
    process = subprocess.Popen(
        command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_ctrl_c
    )
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.communicate(timeout=60)[1] == f"interrupted before anything began{said}\n"
    assert process.returncode == 128 + number
