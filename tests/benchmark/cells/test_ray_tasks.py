"""Tables on Ray: with a stand-in for it, and by name (``-m slow``) on clusters of two workers on this machine."""

import contextlib
import csv
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from waiting import until

from benchmark.cells.identity import Cell, content_hash
from benchmark.cells.job import Job, for_another_machine, run_as_job
from benchmark.cells.lock import CellLock
from benchmark.cells.queue import run_cells
from benchmark.cells.ray_tasks import Ray, run_as_task
from benchmark.cells.slurm_jobs import SlurmJob, SlurmJobs
from benchmark.cells.work import Work
from benchmark.errors import ConfigurationError
from benchmark.records.record_file import is_finished, read_record

ROOT = Path(__file__).resolve().parents[3]
#: What differs between two computers and two days.
MEASURED = {"seconds", "peak_memory_bytes"}
CELL = Cell("alpha-00000000", (), (), 0)
# Says who it is, then ends with an error or waits to be ended.
RUN = """
import os, pathlib, sys, time
options = [entry for entry in sys.argv if entry in ("--fail", "--wait")]
pathlib.Path("pid.txt").write_text(str(os.getpid()))
while options == ["--wait"]:
    time.sleep(0.02)
sys.exit("no memory")
"""


class Reference:
    """The reference that a stand-in for Ray returns for a task."""

    def __init__(self, result: Callable[[], str] | None) -> None:
        self.ended: Future[str] = Future()
        if result is not None:
            try:
                self.ended.set_result(result())
            except OSError as error:
                self.ended.set_exception(error)

    def future(self) -> "Future[str]":
        return self.ended


class StandIn(ModuleType):
    """A stand-in for Ray: a task is done at once in this process, or never.

    Args:
        machines: resources of each.
        never: tasks do not end before they are cancelled by force.
    """

    def __init__(self, machines: list[dict[str, float]], never: bool = False) -> None:
        super().__init__("ray")
        self.machines, self.never = machines, never
        self.options: dict[str, Any] = {}
        self.of_a_task: dict[str, float] = {}
        self.gone = False
        self.events: list[str] = []

    def init(self, **options: Any) -> None:
        self.options = options
        self.events.append("init")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": resources} for resources in self.machines]

    def shutdown(self) -> None:
        self.events.append("shutdown")

    def cancel(self, reference: Reference, force: bool) -> None:
        self.events.append("force" if force else "cancel")
        if force:
            reference.ended.set_exception(OSError("cancelled"))

    def remote(self, **of_a_task: float) -> Callable[[Callable[..., str]], Any]:
        self.of_a_task = of_a_task

        class Remote:
            def __init__(self, function: Callable[..., str], ray: "StandIn") -> None:
                self.function, self.ray = function, ray

            def options(self, name: str) -> "Remote":
                return self

            def remote(self, *arguments: Any) -> Reference:
                if self.ray.gone:
                    raise ConnectionError("the cluster is gone\nand more")
                return Reference(None if self.ray.never else lambda: self.function(*arguments))

        return lambda function: Remote(function, self)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program for cells, entered."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)  # pytest's own stays
    (tmp_path / "run.py").write_text(RUN)
    return tmp_path


def stand_in(monkeypatch: pytest.MonkeyPatch, *machines: dict[str, float], never: bool = False) -> StandIn:
    ray = StandIn(list(machines) or [{"CPU": 2.0}], never)
    monkeypatch.setitem(sys.modules, "ray", ray)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "")  # what is set besides goes when the test ends
        monkeypatch.delenv(name)
    return ray


def work(*options: str) -> Work:
    return Work(Path("runs"), program=(sys.executable, "run.py", *options))


def failure_of(place: Ray, cell: Cell = CELL, options: tuple[str, ...] = ()) -> str:
    """Run a single cell at a place and return its error."""
    (outcome,) = run_cells([cell], work(*options), place=place).values()
    return outcome.error


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(OSError):
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def test_a_cell_is_a_task_with_its_cpus_and_gpus(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmark.cells.queue.content_hash", lambda *arguments: "00000000")
    ray = stand_in(monkeypatch, {"CPU": 8.0, "GPU": 2.0})
    assert failure_of(Ray(cpus=4)) == "no memory"
    assert ray.of_a_task == {"num_cpus": 4, "num_gpus": 1}
    assert (ray.options["address"], ray.options["include_dashboard"]) == ("local", False)
    assert ray.events == ["init", "shutdown"]
    assert CellLock(Path("runs") / CELL.name).failure() == "no memory"
    ray = stand_in(monkeypatch, {"CPU": 1.0})
    assert failure_of(Ray()) == "no memory"
    assert ray.of_a_task == {"num_cpus": 1, "num_gpus": 0}
    ray.gone = True
    assert failure_of(Ray()) == "Ray: the cluster is gone"


def test_a_machine_without_the_folder_is_told_of(place: Path) -> None:
    assert "does not share the folder of this command" in run_as_task(CELL, work(), place / "nowhere")


def test_a_task_waits_for_the_run_of_a_killed_worker(place: Path) -> None:
    lock = CellLock(Path("runs") / CELL.name)
    assert lock.acquire()
    timer = threading.Timer(0.2, lock.release)
    timer.start()
    assert run_as_task(CELL, work(), place) == "no memory"
    timer.join()


def test_a_run_that_left_no_record_here_asks_for_a_shared_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmark.cells.queue.content_hash", lambda *arguments: "00000000")
    monkeypatch.setattr("benchmark.cells.ray_tasks.run_as_job", lambda *arguments: "")
    monkeypatch.setattr("benchmark.cells.job.SEEN_SECONDS", 0.1)
    stand_in(monkeypatch)
    assert failure_of(Ray()) == f"ended without a record in runs/{CELL.name}; all machines have to share this folder"


def test_a_task_that_does_not_end_is_ended_by_force(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmark.cells.ray_tasks.GRACE_SECONDS", -5.0)
    ray = stand_in(monkeypatch, never=True)
    tasks = Ray().open(work(), None)
    lock = CellLock(Path("runs") / CELL.name)
    assert lock.acquire()
    task = tasks.start(CELL, lock)
    assert not task.done()
    tasks.end([task])
    tasks.close()
    assert ray.events == ["init", "cancel", "force", "shutdown"]
    assert task.failure() == "Ray: cancelled"


def test_a_run_has_the_environment_of_its_job_and_the_runners_goes_nowhere(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray and Slurm say there which GPUs and how many threads a run may have."""
    (place / "run.py").write_text(
        "import os, sys\nsys.exit(' '.join(os.environ.get(n, '-') for n in ('GPU', 'TOKEN')))"
    )
    monkeypatch.setenv("TOKEN", "secret")
    monkeypatch.setenv("GPU", "all")
    sent = for_another_machine(work())
    assert b"secret" not in pickle.dumps(sent)
    monkeypatch.delenv("TOKEN")
    monkeypatch.setenv("GPU", "3")
    assert run_as_job(CELL, sent) == "3 -"


def test_a_run_that_does_not_start_leaves_its_lock(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Work(Path("runs"), program=("no-such-program",))
    for _ in range(2):  # a worker of Ray lives on
        with pytest.raises(FileNotFoundError):
            run_as_job(CELL, nowhere)
    monkeypatch.setattr("benchmark.cells.queue.content_hash", lambda *arguments: "00000000")
    other = replace(CELL, name="beta-00000000")
    outcomes = run_cells([CELL, other], nowhere)
    assert [outcome.error.split(":")[0] for outcome in outcomes.values()] == ["it does not start"] * 2


def test_a_record_that_is_seen_late_counts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared folder may hide for a while what another machine has written."""

    class Over(Job):
        def over(self) -> bool:
            return True

        def said(self) -> str:
            return ""

    folder = Path("runs") / CELL.name
    folder.mkdir(parents=True)
    job = Over(CELL, folder / "log.txt")
    assert not job.done()
    (folder / "record.json").write_text("{}")
    assert job.done()
    (folder / "record.json").unlink()
    assert not job.done()
    monkeypatch.setattr("benchmark.cells.job.SEEN_SECONDS", 0.0)
    assert job.done()


def test_a_job_that_slurm_does_not_cancel_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[str] = []

    class Submitted:
        def __init__(self, name: str) -> None:
            self.job_id = name

        def done(self) -> bool:
            return self.job_id in cancelled

        def cancel(self, check: bool = True) -> None:
            if self.job_id == "1":
                cancelled.append("1")
                raise subprocess.CalledProcessError(1, "scancel")
            cancelled.append(self.job_id)

    monkeypatch.setattr("benchmark.cells.slurm_jobs.GRACE_SECONDS", 5.0)
    SlurmJobs(work(), 3, None).end([SlurmJob(CELL, Path("log.txt"), Submitted(name)) for name in "123"])
    assert cancelled == ["1", "2", "3"]


def test_a_job_that_slurm_refuses_stops_no_other(place: Path) -> None:
    cancelled: list[str] = []

    class Accepted:
        job_id = "1"

        def done(self) -> bool:
            return True

        def result(self) -> str:
            return "no memory"

        def cancel(self, check: bool) -> None:
            cancelled.append(self.job_id)

    class Limited:
        jobs = 0

        def submit(self, *arguments: Any) -> Accepted:
            self.jobs += 1
            if self.jobs > 1:
                raise RuntimeError("sbatch ended\nsbatch: error: QOSMaxSubmitJobPerUserLimit\n")
            return Accepted()

    class Cluster:
        def open(self, work: Work, jobs: int | None) -> SlurmJobs:
            return SlurmJobs(work, 9, Limited())

    cells = [Cell(f"{name}-{content_hash((), ())}", (), (), 0) for name in ("first", "second")]
    outcomes = run_cells(cells, work(), place=Cluster())  # type: ignore[arg-type]
    first, second = (outcomes[cell.name] for cell in cells)
    assert first.error == "no memory"
    assert second.error == (
        "it does not start: Slurm does not take the job: sbatch: error: QOSMaxSubmitJobPerUserLimit; if it limits "
        "jobs, give fewer at a time (--jobs)"
    )
    assert cancelled == []


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_jobs_at_a_time_are_refused(jobs: int, place: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"jobs is {jobs}, expected at least 1"):
        run_cells([CELL], work(), jobs)


def test_a_run_ends_with_the_job_that_started_it(place: Path) -> None:
    """Else a killed worker's GPU would have two runs at a time, its own and the one that Ray starts there next."""
    code = (
        "from pathlib import Path; import sys; from benchmark.cells.identity import Cell\n"
        "from benchmark.cells.job import run_as_job; from benchmark.cells.work import Work\n"
        f"run_as_job({CELL!r}, Work(Path('runs'), program=(sys.executable, 'run.py', '--wait')))"
    )
    job = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    until(Path("pid.txt").is_file, 60)
    until(Path("pid.txt").read_text, 60)
    assert run_as_job(CELL, work()) == "busy"
    job.kill()
    job.wait()
    until(lambda: not alive(int(Path("pid.txt").read_text())), 60)
    assert run_as_job(CELL, work()) == "no memory"  # the lock is free again


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"needs ray: pip install 'federated-prompt-benchmark\[ray\]'"):
        Ray().open(work(), None)


@pytest.mark.parametrize("address", ["head:10001", "ray://head", "ray://", "ray://head:port", "local", ""])
def test_what_is_no_address_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = stand_in(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"expected ray://HOST:PORT, or auto for the cluster of this machine"):
        Ray(address).open(work(), None)
    assert ray.events == []


def test_an_address_where_nobody_listens_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = stand_in(monkeypatch)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigurationError, match=r"nobody answers at ray://127.0.0.1:\d+ \(.*refused\)"):
            Ray(f"ray://127.0.0.1:{free.getsockname()[1]}").open(work(), None)
    assert ray.events == []


def test_what_ray_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = stand_in(monkeypatch)

    def refuse(**options: Any) -> None:
        raise RuntimeError("Version mismatch: 1 and 2\nand what to do")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConfigurationError, match=r"^Ray at auto does not let us in: Version mismatch: 1 and 2$"):
        Ray("auto").open(work(), None)


def test_a_clusters_token_is_used_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    Ray("auto").open(work(), None)
    assert "RAY_AUTH_MODE" not in os.environ
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    Ray("auto").open(work(), None)
    assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_USAGE_STATS_ENABLED"]) == ("token", "0")


def test_a_run_that_fits_no_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ray = stand_in(monkeypatch, {"CPU": 2.0})
    with pytest.raises(ConfigurationError, match="to have 8 CPUs and 0 GPUs, and this machine has 2 CPUs and 0 GPUs"):
        Ray(cpus=8).open(work(), None)
    assert ray.events == ["init", "shutdown"]
    stand_in(monkeypatch, {"CPU": 0.0}, {"CPU": 2.0})  # a cluster may grow
    Ray("auto", gpus=0.5).open(work(), None)
    assert "no machine of the cluster has 1 CPUs and 0.5 GPUs; runs wait for one" in capsys.readouterr().out


# --- with Ray ---


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


@contextlib.contextmanager
def table(*options: str) -> Iterator["subprocess.Popen[str]"]:
    """The command that makes the demo of table 1, with two workers."""
    command = [sys.executable, "-m", "benchmark.commands", "table", "table1", "--engine", "ray", "--jobs", "2"]
    with open("said.txt", "a") as said:
        process = subprocess.Popen([*command, *options], stdout=said, stderr=said, start_new_session=True, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finished() -> set[str]:
    return {path.name for path in Path("runs").glob("*-s0-*") if is_finished(path)}


def runs() -> dict[int, str]:
    """Process id and run directory of each run that is at work below this folder."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = (path / "cmdline").read_text().split("\0")
            if "benchmark.run.cli" in words and (path / "cwd").resolve() == Path.cwd() and alive(int(path.name)):
                found[int(path.name)] = words[words.index("--run_dir") + 1]
    return found


def under_way(run: str) -> bool:
    """Return whether a run has kept a round, and has several to go."""
    rounds = re.findall(r"^round (\d+)/", (Path(run) / "log.txt").read_text(), re.MULTILINE)
    return (Path(run) / "checkpoints/last.ckpt").is_file() and 1 <= int(rounds[-1] if rounds else 0) <= 6


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def numbers(path: Path) -> list[dict[str, str]]:
    with path.open() as stream:
        return [{name: row[name] for name in row if name not in MEASURED} for row in csv.DictReader(stream)]


def check_table() -> None:
    """The table is the committed one, and so is every record."""
    assert numbers(Path("results/tables/table1_demo.csv")) == numbers(ROOT / "results/tables/table1_demo.csv")
    assert len(finished()) == 10
    for name in finished():
        assert read_record(Path("runs") / name).summary == read_record(ROOT / "results/runs" / name).summary


@pytest.mark.slow
def test_table_1_is_the_committed_one(folder: Path) -> None:
    with table() as process:
        assert process.wait(1800) == 0, Path("said.txt").read_text()
    check_table()
    said = Path("said.txt").read_text()
    assert "ray" not in said.lower()


@pytest.mark.slow
def test_kill_9_of_workers_and_of_the_driver_loses_no_finished_run(folder: Path) -> None:
    with table() as process:
        until(lambda: any(under_way(run) for run in runs().values()), 1200)
        victim, name = next((pid, run) for pid, run in runs().items() if under_way(run))
        os.kill(parent(victim), signal.SIGKILL)
        until(lambda: not alive(victim), 60)
        until(lambda: "--ckpt_path" in (Path(name) / "log.txt").read_text(), 120)  # goes on where it was
        until(lambda: is_finished(Path(name)) and len(runs()) == 2, 1200)
        process.kill()
        process.wait()
        until(lambda: not runs(), 60)
    before = {name: (Path("runs") / name / "record.json").stat().st_mtime_ns for name in finished()}
    assert Path(name).name in before
    with table() as process:
        assert process.wait(1800) == 0, Path("said.txt").read_text()
    assert {name: (Path("runs") / name / "record.json").stat().st_mtime_ns for name in before} == before
    check_table()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_driver_ends_its_runs_and_its_cluster(folder: Path, number: signal.Signals) -> None:
    # A shell's background job ignores Ctrl-C.
    with table() as process:
        until(lambda: len(runs()) == 2, 120)
        process.send_signal(number)
        assert process.wait(60) == 130
        assert not runs()
    said = Path("said.txt").read_text()
    assert said.strip().splitlines()[-1].endswith("interrupted; finished runs are not lost, the same command continues")
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_cluster_that_there_is(folder: Path) -> None:
    """By ``ray://``, whose nodes stay when the command has ended."""
    ray = str(Path(sys.executable).with_name("ray"))
    start = [ray, "start", "--head", "--block", "--num-cpus=2", "--port=0", "--ray-client-server-port=10001"]
    start += ["--include-dashboard=false", "--disable-usage-stats"]
    with open("head.txt", "w") as said:
        head = subprocess.Popen(start, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
    try:
        until(lambda: "Ray runtime started" in Path("head.txt").read_text(), 60)
        with table("--address", "ray://127.0.0.1:10001") as process:
            until(lambda: len(runs()) == 2 or process.poll() is not None, 180)
            assert process.poll() is None, Path("said.txt").read_text()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 130
            assert not runs()
        assert head.poll() is None
    finally:
        head.terminate()
        head.wait(60)
