"""Cells as tasks of Ray, on a cluster of its own or on one that there is."""

import contextlib
import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmark.cells.identity import Cell
from benchmark.cells.job import BUSY, PAUSE, Job, for_another_machine, run_as_job
from benchmark.cells.lock import CellLock
from benchmark.cells.this_machine import GRACE_SECONDS
from benchmark.cells.work import Attempt, Work
from benchmark.errors import ConfigurationError

#: Bytes of memory that tasks and runner share; Ray takes no less. What they say is a line.
SHARED_MEMORY = 80 * 2**20
CONNECT_SECONDS = 5.0
#: How long a task waits for a cell in other hands: those of a run whose worker was killed, and which is asked to end.
LET_GO_SECONDS = 30.0


@dataclass(frozen=True)
class Ray:
    """Cells run as tasks of Ray, one a task.

    Attributes:
        address: ``ray://HOST:PORT`` of a cluster, ``auto`` for the one that this machine is part of; None starts one on
            this machine, which ends with the cells.
        gpus: of a task, below 1 where several share a GPU; None is 1 on a cluster with GPUs, else 0.
        cpus: of a task, and so the threads of a run.
    """

    address: str | None = None
    gpus: float | None = None
    cpus: int = 1

    def get_ready(self, work: Work, jobs: int | None) -> None:
        """Begin nothing."""

    def open(self, work: Work, jobs: int | None) -> "RayTasks":
        """Connect to the cluster or start one; by default all cells are tasks at a time, and wait for their turn.

        Raises:
            ConfigurationError: Ray is missing, nobody answers, or no machine is large enough for a task.
        """
        _say_before_import(self.address)
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError(
                "running on Ray needs ray: pip install 'federated-prompt-benchmark[ray]'"
            ) from error
        if self.address is not None and self.address != "auto":
            _check_address(self.address)
        try:
            _connect(self.address)
        except Exception as error:  # Ray's own, gRPC's, an operating system's
            line = next(iter(str(error).splitlines()), type(error).__name__)
            where = "does not start here" if self.address is None else f"at {self.address} does not let us in"
            raise ConfigurationError(f"Ray {where}: {line}") from error
        try:
            gpus = self._gpus_of_a_task([node["Resources"] for node in ray.nodes() if node["Alive"]])
        except BaseException:
            ray.shutdown()
            raise
        # A task whose worker is killed is tried three times more, Ray's default; it goes on from the last checkpoint.
        return RayTasks(work, jobs or sys.maxsize, ray.remote(num_cpus=self.cpus, num_gpus=gpus)(run_as_task))

    def _gpus_of_a_task(self, machines: list[dict[str, float]]) -> float:
        gpus = self.gpus
        if gpus is None:
            gpus = 1 if any(machine.get("GPU", 0) >= 1 for machine in machines) else 0
        if any(machine.get("CPU", 0) >= self.cpus and machine.get("GPU", 0) >= gpus for machine in machines):
            return gpus
        asked = f"{self.cpus} CPUs and {gpus:g} GPUs"
        if self.address is None:
            (here,) = machines
            there = f"{here.get('CPU', 0):g} CPUs and {here.get('GPU', 0):g} GPUs"
            raise ConfigurationError(f"a run is to have {asked}, and this machine has {there}; see --cpus and --gpus")
        print(f"no machine of the cluster has {asked}; runs wait for one", flush=True)
        return gpus


def _check_address(address: str) -> None:
    """Refuse an address where nobody listens; Ray itself would try for half a minute.

    Raises:
        ConfigurationError: nobody listens, or it is none.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or parts.scheme != "ray":
        raise ConfigurationError(
            f"the address of Ray is {address}, expected ray://HOST:PORT, or auto for the cluster of this machine"
        )
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigurationError(
            f"nobody answers at {address} ({error}); the port is that of Ray's clients, 10001 if `ray start --head` "
            "was not told another"
        ) from error


def _say_before_import(address: str | None) -> None:
    """Set what Ray reads when it is imported: no usage statistics, and a cluster's token where there is one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is not None and (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # which Ray itself does for all addresses but ray://


def _connect(address: str | None) -> None:
    """Connect without a word: no dashboard, no copies of what runs print."""
    import ray

    options: dict[str, Any] = {"address": address or "local", "log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"include_dashboard": False, "object_store_memory": SHARED_MEMORY}
    if path := os.environ.get("PYTHONPATH"):  # of a checkout, or what an installed package has put there
        options["runtime_env"] = {"env_vars": {"PYTHONPATH": path}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(**options)


def run_as_task(cell: Cell, work: Work, folder: Path) -> str:
    """Do one cell in a worker of Ray, seen from a folder; how it ended, as :func:`run_as_job`."""
    # Ray cancels a task by this signal, which a cluster that was started in the background of a script ignores.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.chdir(folder)
    except OSError as error:
        return f"{socket.gethostname()} does not share the folder of this command: {error}"
    deadline = time.monotonic() + LET_GO_SECONDS
    while (said := run_as_job(cell, work)) == BUSY and time.monotonic() < deadline:
        time.sleep(PAUSE)
    return said


@dataclass
class RayTask(Job):
    """A cell as a task of Ray; without a reference where Ray did not take it."""

    reference: Any
    future: "futures.Future[str]"

    def over(self) -> bool:
        return self.future.done()

    def said(self) -> str:
        try:
            return str(self.future.result())
        except Exception as error:  # Ray's own, or what the task raised
            cause = getattr(error, "cause", error)
            return f"Ray: {next(iter(str(cause).splitlines()), '')[:300] or type(cause).__name__}"


@dataclass
class RayTasks:
    """Starts cells as tasks of Ray, by its remote form of :func:`run_as_task`."""

    work: Work
    at_a_time: int
    function: Any

    def start(self, cell: Cell, lock: CellLock) -> RayTask:
        lock.release()
        log = self.work.runs_dir / cell.name / "log.txt"
        try:
            reference = self.function.options(name=cell.name).remote(cell, for_another_machine(self.work), Path.cwd())
        except Exception as error:  # the cluster is gone
            failed: futures.Future[str] = futures.Future()
            failed.set_exception(error)
            return RayTask(cell, log, None, failed)
        return RayTask(cell, log, reference, reference.future())

    def end(self, running: Sequence[Attempt]) -> None:
        """Cancel tasks and wait until their runs have ended; a worker that does not end its run is killed.

        Raises:
            KeyboardInterrupt: it came meanwhile, and let them be killed at once.
        """
        import ray

        interrupt: KeyboardInterrupt | None = None
        tasks = [entry for entry in running if isinstance(entry, RayTask) and not entry.over()]
        for by_force in (False, True):
            for entry in tasks:
                if not entry.over():
                    with contextlib.suppress(Exception):  # the cluster may be gone
                        ray.cancel(entry.reference, force=by_force)
            try:
                futures.wait([entry.future for entry in tasks], GRACE_SECONDS + CONNECT_SECONDS)
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """End the cluster that was started, or let go of the one that there was."""
        import ray

        with contextlib.suppress(Exception):
            ray.shutdown()
