"""Runs as forks of one process: as those of processes of their own, and ended, waited for and reported like them."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
import torch
from forked_cells import CONF, cells
from waiting import until

from benchmark.cells.forks import can_fork
from benchmark.config.overview import PROGRAM
from benchmark.run.cli import main

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux")

#: A user's script, without `if __name__ == "__main__"`.
SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from benchmark.cells.queue import run_cells
from benchmark.cells.work import Work
from forked_cells import cells
print("the script", flush=True)
for rounds in sys.argv[1:]:
    outcomes = run_cells(cells(int(rounds), Path.cwd()), Work(Path("runs")), jobs=2)
    print("outcomes", sorted((name[:6], outcome.error) for name, outcome in outcomes.items()), flush=True)
"""

#: Instead of a library whose import takes long, the first one that a server of forks imports: others are left out.
SLOW = "import time\n\ntime.sleep(2)\nraise ImportError\n"

#: Seconds between two looks at all processes of the machine.
PAUSE = 0.2


@contextmanager
def runner(folder: Path, *rounds: int, script: str = SCRIPT) -> Iterator["subprocess.Popen[str]"]:
    """A process that does the cells of so many rounds, one after the other, in a folder."""
    (folder / "scripts").mkdir(exist_ok=True, parents=True)  # so that only the run looks for methods in the folder
    (folder / "scripts" / "script.py").write_text(script)
    (folder / "own_method.py").write_text("from methods.fedvpt import FedVPT\n\n\nclass Own(FedVPT):\n    pass\n")
    (folder / "own.yaml").write_text((CONF / "FedVPT.yaml").read_text().replace("methods.FedVPT", "own_method.Own"))
    given = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "MADE_IN": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "scripts/script.py", *map(str, rounds)],
        cwd=folder,
        env={**os.environ, **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in processes(folder):
            os.kill(pid, signal.SIGKILL)


def leave_imports_out(folder: Path) -> None:
    """Have servers of forks, from now on, go on without the libraries, whose imports take ten seconds of a core."""
    (folder / "sklearn.py").write_text(SLOW)


def processes(folder: Path) -> dict[int, str]:
    """The command lines of everything that a runner in this folder has started, by process."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            if f"MADE_IN={folder}".encode() in environment:
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue
    return found


def command_lines(process: "subprocess.Popen[str]", folder: Path) -> set[str]:
    """Return the command lines of everything that a runner in this folder starts until it ends."""
    seen: set[str] = set()
    while process.poll() is None:
        seen |= set(processes(folder).values())
        time.sleep(PAUSE)
    return seen


def sessions(folder: Path) -> set[int]:
    """Processes that have a session of their own, in this folder."""
    return {pid for pid in processes(folder) if os.getsid(pid) == pid}


def begun(folder: Path, runs: int = 2) -> bool:
    """Return whether each of so many runs has finished a round."""
    return len([*folder.glob("runs/*/checkpoints/last.ckpt")]) == runs


def result(run_dir: Path) -> tuple[pd.DataFrame, dict[str, torch.Tensor], str]:
    checkpoint = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    return pd.read_parquet(run_dir / "metrics.parquet"), checkpoint["state_dict"], (run_dir / "config.yaml").read_text()


def test_only_this_projects_own_runs_are_forked() -> None:
    assert can_fork(PROGRAM)
    assert not can_fork((sys.executable, "another.py"))


def test_a_forked_run_is_bit_for_bit_one_where_nothing_can_be_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is started anew there, the other is the command's in this process."""
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "dies.py").write_text("import os\n\nos._exit(7)\n")
    apart = SCRIPT.replace("print(", "from benchmark.cells import forks; forks.IMPORTED = 'dies'\nprint(", 1)
    apart = apart.replace("Path.cwd())", "Path.cwd())[:1]")
    said = {}
    for kind, script in {"forked": SCRIPT, "apart": apart}.items():
        with runner(tmp_path / kind, 2, script=script) as process:
            seen = command_lines(process, tmp_path / kind)
            said[kind] = process.communicate()[0]
        assert any("benchmark.run.cli fit" in line for line in seen) == (kind == "apart")
        assert any("forkserver" in line for line in seen) or kind == "apart"
        assert said[kind].count("the script") == 1  # a fork does not start it again
        assert "Traceback" not in said[kind]
    assert "outcomes [('FedVPT', ''), ('PFedPG', '')]" in said["forked"]
    assert "outcomes [('FedVPT', '')]" in said["apart"]
    own, other = cells(2, tmp_path / "apart")
    monkeypatch.chdir(tmp_path / "apart")
    with warnings.catch_warnings(action="ignore"):
        main(
            [
                "fit",
                *(f"--config={path}" for path in other.configs),
                *other.overrides,
                "--seed_everything=0",
                f"--run_dir=runs/{other.name}",
            ]
        )
    for cell in (own, other):
        frames, states, configs = zip(*(result(tmp_path / kind / "runs" / cell.name) for kind in said), strict=True)
        pd.testing.assert_frame_equal(*frames)
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
        assert configs[0] == configs[1]
        log = (tmp_path / "forked" / "runs" / cell.name / "log.txt").read_text()
        assert log.startswith(f"$ {' '.join(PROGRAM)} fit --config")
        assert "after round 2: " in log


#: Wherever the signal meets the script, what is said of multiprocessing comes from another process.
WITHOUT_PLACES = SCRIPT.replace("import signal, sys\n", "import signal, sys\nsys.tracebacklimit = 0\n")


def interrupted(process: "subprocess.Popen[str]", number: signal.Signals, rounds: int, folder: Path) -> str:
    """End a runner by a signal and return its output; check that its forks end and their logs say so."""
    process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    until(lambda: not processes(folder), 20, PAUSE)
    assert "multiprocessing" not in said
    for cell in cells(rounds, folder):
        last = (folder / "runs" / cell.name / "log.txt").read_text().splitlines()[-1]
        assert last.startswith("stopped by SIGTERM: ")
    return said


def test_an_interrupted_runner_ends_its_forks_and_they_say_what_is_kept(tmp_path: Path) -> None:
    with runner(tmp_path, 5000, script=WITHOUT_PLACES) as process:
        until(lambda: begun(tmp_path), 120)
        interrupted(process, signal.SIGINT, 5000, tmp_path)


def test_ctrl_c_while_the_libraries_are_imported_starts_nothing(tmp_path: Path) -> None:
    leave_imports_out(tmp_path)  # for an import of two seconds, in which the signal comes
    with runner(tmp_path, 5000) as process:
        until(lambda: any("forkserver" in line for line in processes(tmp_path).values()), 120, PAUSE)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the server of forks, too
        said = process.communicate(timeout=60)[0]
        assert process.returncode != 0
        until(lambda: not processes(tmp_path), 60, PAUSE)
    assert "forkserver.main" not in said.replace("in main\n", "")
    assert "imported.py" not in said  # the server of forks goes on to its end in silence
    assert not begun(tmp_path)


def test_the_forks_of_a_killed_runner_go_on_and_the_next_one_waits_for_them(tmp_path: Path) -> None:
    with runner(tmp_path, 12) as first:
        until(lambda: begun(tmp_path), 120)
        forks = sessions(tmp_path) - {first.pid}
        for pid in forks:
            os.kill(pid, signal.SIGSTOP)  # they are not done before the next runner is there
        first.kill()
        first.wait()
        leave_imports_out(tmp_path)  # it has nothing to start
        with runner(tmp_path, 12) as second:
            assert second.stdout
            lines = [second.stdout.readline() for _ in range(3)]
            for pid in forks:
                os.kill(pid, signal.SIGCONT)
            said = second.communicate(timeout=300)[0]
    assert lines.count("the script\n") == 1
    assert sum("is run by another process; waiting for it" in line for line in lines) == 2
    assert "outcomes [('FedVPT', ''), ('PFedPG', '')]" in said
    for cell in cells(12, tmp_path):
        assert (tmp_path / "runs" / cell.name / "log.txt").read_text().count("$ ") == 1  # nobody started it again


def test_a_failing_fork_is_reported_and_a_terminated_runner_ends_its_forks(tmp_path: Path) -> None:
    with runner(tmp_path, -3, 5000, 5001, script=WITHOUT_PLACES) as process:
        until(lambda: begun(tmp_path), 120)
        forks = sessions(tmp_path) - {process.pid}
        assert len(forks) == 2  # each a session of its own
        for pid in forks:
            os.kill(pid, signal.SIGKILL)
        until(lambda: begun(tmp_path, 4), 120)
        said, outcomes, killed = interrupted(process, signal.SIGTERM, 5001, tmp_path).partition(
            "outcomes [('FedVPT', 'error: "
        )
    assert outcomes
    assert "FedVPT-s0" in said
    assert said.count("FAILED: error: ") == 2
    assert "max_epochs" in said
    assert "Traceback" not in said
    assert killed.count("killed by signal 9 (SIGKILL)") >= 2


READY = """
import os, signal, time
from pathlib import Path
from benchmark.cells.forks import Fork
from benchmark.cells.lock import CellLock
from benchmark.cells.this_machine import THIS_MACHINE
from benchmark.cells.work import Work
from benchmark.config.overview import PROGRAM

def children():
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONUNBUFFERED"] = "1"
THIS_MACHINE.get_ready(Work(Path("runs")), 2)
started = children()
for pid in started:
    os.kill(pid, signal.SIGINT)  # in its first instructions
for threads in ("1", "2"):
    lock = CellLock(Path(threads))
    assert lock.acquire()
    with open(threads + ".txt", "ab") as log:
        fork = Fork([*PROGRAM, "fit", "--no_such_option"], log, lock, os.environ | {"OMP_NUM_THREADS": threads})
    lock.release()
    assert not CellLock(Path(threads)).acquire()  # the fork holds it
    status = Path(f"/proc/{fork.pid}/status").read_text().splitlines()
    print(int(next(line for line in status if line.startswith("PPid")).split()[1]) in started, children() == started)
    line = Path(f"/proc/{fork.pid}/cmdline")
    deadline = time.monotonic() + 10
    while threads == "2" and "forkserver" in line.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    print("forkserver" in line.read_text(), flush=True)
    assert fork.wait() == fork.poll() == fork.returncode == 2
    assert CellLock(Path(threads)).acquire()
print(len([*Path(os.environ["TMPDIR"]).glob("*wandb-media")]))
"""


def test_runs_are_forked_from_what_was_imported_unless_environments_differ(tmp_path: Path) -> None:
    """A fork that ends takes nothing away that an import has made for all of them, such as W&B's folder for media.

    A run with another environment than the first is started anew.
    """
    pytest.importorskip("wandb")
    with tempfile.TemporaryDirectory() as place:  # the server's socket has a path of at most a hundred characters
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": place}
        command = [sys.executable, "-c", READY]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["True True", "True", "True True", "False", "1"]
    first, second = ((tmp_path / f"{threads}.txt").read_text() for threads in "12")
    assert first == second
    assert first.startswith("error: neither a method nor data are given")


#: A table's command, which itself imports next to nothing before it starts.
TABLE = """
from benchmark.commands import main
print("exit status", main(["table", "table.yaml", "--jobs", "2"]))
"""
#: Beginnings of what libraries set in the environment while they are imported, as they were in these tests.
SET_BY_IMPORTS = ("KMP_", "PYTORCH_", "TORCHINDUCTOR_", "CUBLAS_")
TWO_ROWS = """
title: one round
metric: accuracy
presets:
  demo:
    seeds: [0]
    overrides: ["--trainer.max_epochs=1", "--data.clients_per_round=1", "--trainer.num_sanity_val_steps=0"]
    data: [{name: digits, label: Digits, suite: digits, columns: [COLUMN]}]
rows:
  - {label: HeadTune, method: headtune, point: server}
  - {label: FedVPT, method: fedvpt, point: POINT}
"""


@pytest.mark.parametrize(("column", "point"), [("{statistic: average}", "server"), ("{client: ink}", "local")])
def test_a_tables_runs_stay_forks(tmp_path: Path, column: str, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command has imported what sets variables of the environment (to check a client and a point), or has not."""
    (tmp_path / "table.yaml").write_text(TWO_ROWS.replace("POINT", point).replace("COLUMN", column))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in [name for name in os.environ if name.startswith(SET_BY_IMPORTS)]:
        monkeypatch.delenv(name)
    with runner(tmp_path, script=TABLE) as process:
        seen = command_lines(process, tmp_path)
        said = process.communicate()[0]
    assert said.splitlines()[-1] == "exit status 0"
    assert len([*tmp_path.glob("runs/*/record.json")]) == 2
    assert any("forkserver" in line for line in seen)
    assert not any("benchmark.run.cli fit" in line for line in seen)  # as a run of another environment is
