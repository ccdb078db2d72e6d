"""Processes of one run meet: no other process joins them, received data is never run, and waiting is reported."""

import itertools
import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from federation import CONF, build, fit
from lightning.pytorch.callbacks import Callback
from over_ranks import at_a_port, free_port, over_ranks
from refusal import refused
from torch import distributed as dist
from waiting import until

from benchmark.errors import ConfigurationError
from benchmark.ranks import meeting
from benchmark.ranks.meeting import Arrival, Member, OneFolder, OnePort, Way
from benchmark.ranks.plain_values import decode, encode
from benchmark.ranks.processes import ProcessRanks
from benchmark.ranks.pulse import OtherRankError, Pulse
from benchmark.ranks.strategy import RanksStrategy
from benchmark.records.stored_run import verify_record
from benchmark.run import start
from benchmark.run.cli import main

ROOT = Path(__file__).parents[3]
BASE = ["fit", "--config", str(CONF / "base.yaml"), "--config", str(CONF / "HeadTune.yaml"), "--trainer.max_epochs=2"]
CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------------- strangers


def listening() -> dict[str, str]:
    """Per inode the address of each socket of this machine that listens, or receives datagrams."""
    found = {}
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state in ("0A", "07"):
                found[inode] = f"{name} {address}"
    return found


def ports_of(first: int) -> set[str]:
    """Return the addresses at which a process and its children listen."""
    found = set()
    with suppress(OSError):  # it has ended meanwhile
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        open_to = listening()
        for entry in (entry for process in (first, *children) for entry in Path(f"/proc/{process}/fd").iterdir()):
            with suppress(OSError):  # it was closed meanwhile
                found.add(open_to.get(os.readlink(entry)[8:-1]))
    return {each for each in found if each}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_of_one_machine_open_no_port_and_only_their_user_can_reach_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmark.run.start", *BASE, "--trainer.devices=2", f"--run_dir={tmp_path}/two"]
    (tmp_path / "tmp").mkdir()
    own = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}
    with (tmp_path / "said").open("w") as said:
        run = subprocess.Popen(command, env=os.environ | own, stdout=said, stderr=said)
        ports, entries, folders = set(), set(), set()
        while run.poll() is None:
            ports |= ports_of(run.pid)
            for folder in (tmp_path / "tmp").glob("ranks-*"):
                folders.add(stat.S_IMODE(folder.stat().st_mode) if folder.exists() else 0o700)
                entries |= {entry.name for entry in folder.glob("*")}
            time.sleep(0.2)
    assert run.returncode == 0, (tmp_path / "said").read_text()
    assert not ports
    assert folders == {0o700}
    assert entries == {"0", "1", "store"}
    assert not list((tmp_path / "tmp").glob("ranks-*"))
    assert verify_record(tmp_path / "two") == []
    main([*BASE, f"--run_dir={tmp_path}/one"])
    one, two = (pd.read_parquet(tmp_path / name / "metrics.parquet") for name in ("one", "two"))
    pd.testing.assert_frame_equal(one, two)


class Payload:
    """Writes a file where a pickle of it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ("pickle", "the beginning: rank 1 has sent what can't be read (no plain value: "),
        ("size", "the beginning: rank 1 has 4,611,686,018,427,387,904 bytes to tell; expected 1 to 1,073,741,824"),
    ],
)
def test_what_another_rank_sends_is_never_run(sent: str, said: str, tmp_path: Path) -> None:
    at = at_a_port()

    def work(strategy: RanksStrategy) -> Any:
        if os.environ["LOCAL_RANK"] == "0":
            method, data = build("HeadTune")
            return fit(method, data, 1, settings={"devices": 2, "strategy": strategy})
        way, member = OnePort("127.0.0.1", int(at["MASTER_PORT"])), Member(1, 2, CPU)
        store = Arrival(way, member, False, lambda: None).wait()
        Pulse(store.clone(), 1, 2, 60.0).start()
        links = way.links(member, store)
        data = torch.frombuffer(bytearray(pickle.dumps(Payload(tmp_path / "pwned"))), dtype=torch.uint8)
        size = torch.tensor([len(data) if sent == "pickle" else 2**62])
        sizes = [torch.empty_like(size) for _ in range(2)]
        links.all_gather(sizes, size).wait()
        if sent == "pickle":
            longest = int(max(sizes))
            data = torch.cat([data, data.new_zeros(longest - len(data))])
            links.all_gather([torch.empty_like(data) for _ in range(2)], data).wait()
        return None

    first, _ = over_ranks(2, work, at)
    assert isinstance(first, ConfigurationError), first
    assert str(first).startswith(said)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "told", [{"code": 0}, {"code": 256}, {"code": -9}, {"code": "well"}, {"message": None}, [], "no"]
)
def test_what_others_say_is_one_line_and_never_the_status_of_success(told: Any) -> None:
    store = dist.HashStore()
    said = {"rank": 1, "message": "the stranger\nsays \x1b[31mred" + 9000 * "!", "code": 3}
    store.set("ended", encode("", said | told if isinstance(told, dict) else told))
    pulse = Pulse(store, 0, 1, 60.0)
    pulse.start()
    trouble = until(lambda: pulse.trouble, 10)
    assert trouble.code == 1
    assert str(trouble).isprintable()
    assert len(str(trouble)) <= 2000


def test_a_port_of_loopback_is_no_port_of_the_machine() -> None:
    port = free_port()
    served = OnePort("localhost", port).store(Member(0, 2, CPU), threading.Event())
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        stranger.sendall(b"\x80\x04nothing that torch knows")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((_address_of_this_machine(), port), 5)
    assert served.add("works", 1) == 1


class Listening(Callback):
    """Sees where this process listens while it trains."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.ports = ports_of(os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_that_a_launcher_starts_on_loopback_listen_nowhere_else() -> None:
    """Their store's port and those of gloo."""
    at = at_a_port()

    def work(strategy: RanksStrategy) -> Any:
        seen = Listening()
        method, data = build("HeadTune")
        fit(method, data, 1, [seen], settings={"devices": 2, "strategy": strategy})
        return seen.ports

    first, second = over_ranks(2, work, at)
    assert f"tcp 0100007F:{int(at['MASTER_PORT']):04X}" in first
    assert len(first) > 1
    assert second
    assert all(each.startswith("tcp 0100007F:") for each in first | second)


def _address_of_this_machine() -> str:
    """One that other machines may reach; of a machine without a network another one of its own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.2"
        return str(asked.getsockname()[0])


# ---------------------------------------------------------------------------------------------------- plain values


def test_plain_values_come_back_as_they_were() -> None:
    given = {
        ("server", 3): [1, 2.5, float("inf"), None, True, "\udcff \x00", 2**70],
        "layout": {"w": ((2, 3), torch.bfloat16, "cpu"), "scalar": (torch.Size([]), torch.int64, "cuda")},
        7: [(), {}, [], Path("runs/one"), -0.0, 1e-320],
    }
    found = decode(encode("values", given))
    assert found == given
    assert type(found["layout"]["w"][0]) is tuple
    assert str(found[7][4]) == "-0.0"
    assert decode(encode("values", [np.int64(3), np.float64(0.1), np.bool_(True)])) == [3, 0.1, True]
    assert np.isnan(decode(encode("values", float("nan"))))


@pytest.mark.parametrize("given", [{1, 2}, b"bytes", torch.zeros(2), Payload(Path()), [object()], {"a": 1j}])
def test_what_is_no_plain_value_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"broadcast: ranks tell each other plain values .* got "):
        encode("broadcast", given)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80\x04.", b"{}", b'{"call":[]}', b'{"dtype":"Tensor"}', b'{"mapping":[[[1],2]]}', b'{"tuple":3}',
     b'{"mapping":3}', b"[" * 100_000, b"1" * 5000, b'{"path":3}'],
)  # fmt: skip
def test_bytes_that_are_no_plain_value_are_told_so(data: bytes) -> None:
    with pytest.raises(ValueError, match="no plain value"):
        decode(data)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (
            {"w": ((2**40, 2**40), torch.float32, "cpu")},
            "uploads: the ranks would send 4,835,703,278,458,516,698,824,712",
        ),
        ({"w": ((-3,), torch.float32, "cpu")}, "uploads: a rank tells of no tensors (sizes below 0)"),
        ({"w": "shape"}, "uploads: a rank tells of no tensors ("),
        ([1], "uploads: a rank tells of no tensors ("),
    ],
)
def test_a_layout_that_cannot_be_is_one_line(layout: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ProcessRanks(CPU, Pulse(dist.HashStore(), 0, 2, 60.0), meeting.Links())
    monkeypatch.setattr(ranks, "everybody", lambda label, mine: [mine, layout])
    with pytest.raises(ConfigurationError) as refusal:
        ranks.gather("uploads", {"w": torch.zeros(2)})
    assert str(refusal.value).startswith(said)
    monkeypatch.setattr(ranks, "everybody", lambda label, mine: [mine, [layout, {}]])
    with pytest.raises(ConfigurationError):
        ranks.exchange("uploads", [{}, {"w": torch.zeros(2)}])


# ---------------------------------------------------------------------------------------------------------- waiting


#: Folders that a test has made.
made: list[OneFolder] = []


@pytest.fixture
def _one_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both processes of these tests are this one, which is part of one run."""
    monkeypatch.setattr(meeting, "_numbers", itertools.repeat(0))
    monkeypatch.setattr(meeting, "ARRIVAL", 30.0)
    yield
    while made:
        made.pop().remove()


def ways(kind: str) -> tuple[Way, Way]:
    """The way of the first process, and that of the second."""
    if kind == "port":
        port = free_port()
        return OnePort("127.0.0.1", port), OnePort("127.0.0.1", port)
    first = OneFolder.new()
    made.append(first)
    return first, OneFolder(first.folder, os.getppid())


def arrival(way: Way, rank: int) -> Arrival:
    return Arrival(way, Member(rank, 2, CPU), speaks=True, look=lambda: None)


@pytest.mark.usefixtures("_one_run")
@pytest.mark.parametrize("kind", ["port", "folder"])
@pytest.mark.parametrize("late", [0, 1])
def test_waiting_speaks(
    kind: str, late: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "SILENCE", 0.3)
    both = ways(kind)
    with ThreadPoolExecutor(1) as threads:
        early: Future[dist.Store] = threads.submit(arrival(both[1 - late], 1 - late).wait)
        time.sleep(1.5)
        late_store = arrival(both[late], late).wait()
        assert late_store.check(["arrived/0", "arrived/1"])
        assert early.result(30)
    missing = "the first" if (kind, late) == ("port", 0) else "1"
    said = capfd.readouterr().err.splitlines()
    assert 1 <= len(said) <= 3
    assert set(said) == {f"waiting for {missing} of 2 processes {both[0].place}"}


@pytest.mark.parametrize("rank", [0, 1])
def test_waiting_ends_with_a_line(
    rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "ARRIVAL", 1.0)
    way = ways("port")[0]
    missing = "1" if rank == 0 else "the first"
    with pytest.raises(ConfigurationError, match=f"^{missing} of 2 processes did not come {way.place} within 1 s; "):
        arrival(way, rank).wait()
    assert not capfd.readouterr().err


@pytest.mark.usefixtures("_one_run")
@pytest.mark.parametrize("kind", ["port", "folder"])
def test_a_number_comes_once(kind: str) -> None:
    first, second = ways(kind)
    third = OnePort(first.address, first.port) if isinstance(first, OnePort) else OneFolder(first.folder, 1)
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(arrival(first, 0).wait)
        arrival(second, 1).wait()
        early.result(30)
        said = "rank 1 of .* can't be had" if kind == "folder" else "two processes have come at .* as rank 1 of 2: "
        with pytest.raises(ConfigurationError, match=said):
            arrival(third, 1).wait()


class Freeze(Callback):
    """Stops the first process in its second round, and has it killed once that was noticed, or after a while."""

    def __init__(self, clock: Path, noticed: Path) -> None:
        self.clock = clock
        self.noticed = noticed

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == 0:
            self.clock.write_text(str(time.monotonic()))
            wait = f"for _ in $(seq 250); do [ -e '{self.noticed}' ] && break; sleep 0.1; done"
            subprocess.Popen(["sh", "-c", f"{wait}; kill -9 {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("kind", ["port", "folder"])
def test_a_first_rank_that_is_frozen_is_noticed_within_the_timeout(kind: str, tmp_path: Path) -> None:
    def work(strategy: RanksStrategy) -> Any:
        method, data = build("HeadTune")
        frozen = Freeze(tmp_path / "clock", tmp_path / "noticed")
        try:
            fit(method, data, 3, [frozen], settings={"devices": 2, "strategy": strategy})
        except OtherRankError as error:
            seconds = time.monotonic() - float(frozen.clock.read_text())
            frozen.noticed.touch()
            return error, seconds

    first, (error, seconds) = over_ranks(2, work, at_a_port() if kind == "port" else None, timeout=4.0)
    assert first is None
    assert "frozen" in str(error)
    assert (error.code, error.told_here) == (1, True)
    assert 3.0 < seconds < 15.0


# ------------------------------------------------------------------------------------------ environment and numbers


@pytest.mark.parametrize(
    ("name", "value", "devices", "said"),
    [
        ("RANK", "abc", 2, "RANK='abc' in the environment: the number of this process is a whole number from 0; "),
        ("LOCAL_RANK", "", 2, "LOCAL_RANK='' in the environment: the number of this process is a whole number from 0"),
        ("LOCAL_RANK", "-1", 1, "LOCAL_RANK='-1' in the environment: the number of this process is a whole number"),
        ("NODE_RANK", "1.0", 2, "NODE_RANK='1.0' in the environment: "),
        ("SLURM_PROCID", "x", 1, "SLURM_PROCID='x' in the environment: "),
        (
            "WORLD_SIZE",
            "two",
            2,
            "WORLD_SIZE='two' in the environment: the number of processes is a whole number from 1",
        ),
        (
            "MASTER_PORT",
            "abc",
            2,
            "MASTER_PORT='abc' in the environment: the port of the first process is a whole number",
        ),
        (
            "MASTER_PORT",
            "99999",
            2,
            "MASTER_PORT='99999' in the environment: the port of the first process is a whole ",
        ),
        ("LOCAL_RANK", "5", 2, "LOCAL_RANK (of Slurm SLURM_LOCALID) is 5 in the environment, and trainer.devices is 2"),
        ("NODE_RANK", "3", 2, "is 3 in the environment, and trainer.num_nodes is 1: expected 0 to 0"),
    ],
)
def test_a_number_of_the_environment_that_is_none_is_one_line(
    name: str,
    value: str,
    devices: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(name, value)
    arguments = [*BASE, f"--trainer.devices={devices}", f"--run_dir={tmp_path}/run"]
    assert said in refused(capsys, start.main, arguments)
    assert not (tmp_path / "run" / "record.json").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["--trainer.devices=1000000"],
            "trainer.devices=1000000: each device has a process of its own, and this machine's",
        ),
        (["--trainer.devices=99999999999"], "trainer.devices=99999999999: each device has a process of its own"),
        (["--trainer.devices=8"], "is 8, and the clients of a round are 7: "),
        (["--trainer.devices=2", "--trainer.num_nodes=4"], "is 8, and the clients of a round are 7: whole clients are"),
    ],
)
def test_more_ranks_than_clients_or_than_a_machine_serves_are_refused(
    settings: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is started
    assert said in refused(capsys, main, [*BASE, *settings, f"--run_dir={tmp_path}/run"])


def test_configurations_of_older_runs_name_the_strategy_where_it_was(tmp_path: Path) -> None:
    older = "--trainer.strategy={class_path: benchmark.run.strategy.RanksStrategy, init_args: {timeout: 100}}"
    main([*BASE, older, f"--run_dir={tmp_path}/run", "--trainer.max_epochs=1"])
    assert verify_record(tmp_path / "run") == []
