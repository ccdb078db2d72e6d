"""Runs as forks of one process that has imported the program, which takes ten seconds of a core, once for all of them.

A fork has its imports and else nothing in common with another run: the server of forks computes nothing. Threads that
libraries start while they are imported (Arrow's allocator, OpenBLAS) are made anew in a fork by these libraries. It
serves the runs of this machine's CPU; a process that a GPU was used in can't be forked.
"""

import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from types import ModuleType
from typing import IO, Any
from unittest.mock import patch

from benchmark.cells.lock import CellLock
from benchmark.config.overview import PROGRAM

#: What the server of forks imports.
IMPORTED = "benchmark.run.imported"


def can_fork(program: Sequence[str]) -> bool:
    """Return whether runs of a program can be forked: on Linux, if it is this project's own program."""
    return sys.platform == "linux" and tuple(program) == PROGRAM


def start_imports(environment: Mapping[str, str]) -> None:
    """Start the server of forks, if there is none yet, and do not wait for what it imports.

    Args:
        environment: of the runs.

    Raises:
        OSError: it can't be had.
    """
    with _as_the_server_has_it(environment):
        resource_tracker.ensure_running()  # which the next call would do, and let Ctrl-C through again
        # Ctrl-C is for the runner, which ends the forks, and never reaches the server; a fork lets it through.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _as_the_server_has_it(environment: Mapping[str, str]) -> Iterator[None]:
    """Have an environment, and no ``__main__``: what the user has started is not started in a fork again."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([IMPORTED])
    with patch.dict(os.environ, environment), patch.dict(sys.modules, __main__=ModuleType("__main__")):
        yield


class ForkedProcess:
    """A fork, with what :class:`subprocess.Popen` has: ``pid``, ``returncode``, ``poll`` and ``wait``.

    Attributes:
        process: as multiprocessing has it, started.
    """

    process: BaseProcess

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it has not come.
        """
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return self.process.exitcode


class Fork(ForkedProcess):
    """A run as a fork.

    Args:
        command: of the run, as a process of its own would have it.
        log: takes what it says.
        lock: of the run's directory; the run holds it, too.
        environment: of the run. The server of forks has that of the first run; a run with another one is executed anew,
            since libraries read theirs while they are imported.

    Raises:
        OSError: the server of forks can't be had, or died.
    """

    def __init__(self, command: Sequence[str], log: IO[bytes], lock: CellLock, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        start_imports(environment)
        ours, theirs = context.Pipe()
        given = ([*command], theirs, Handed(log.fileno()), Handed(lock.descriptor), dict(environment))
        self.process = context.Process(target=_run, args=given)
        with ours:
            with theirs, _as_the_server_has_it(environment):
                try:
                    self.process.start()
                except EOFError:
                    raise ConnectionError("the process that imports for all runs has died") from None
            with contextlib.suppress(EOFError, ConnectionError):  # its exit status says so, too
                ours.recv()  # the fork can be ended from now on
                ours.send("go on")


class Handed:
    """A file's descriptor on its way into a fork, where it is a number again.

    Args:
        number: of this process; it stays open here.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _descriptor_of, (DupFd(self.number),)  # known only while a process is being started


def _descriptor_of(handed: Any) -> int:
    number: int = handed.detach()
    return number


def leave_endings_to_the_server() -> None:
    """Forget, in a fork, what imports have asked to be done at the end: to remove W&B's folder for media, for example.

    It is one for all forks, so that the first fork that ended would take it from the others.
    """
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    for ending in (logging.shutdown, gc.unfreeze, weakref.finalize._exitfunc):  # type: ignore[attr-defined]
        atexit.register(ending)


def _run(command: list[str], runner: Connection, log: int, lock: int, environment: dict[str, str]) -> None:
    """Be the run: what :func:`benchmark.cells.this_machine.start` asks of a new process, and then its program.

    Args:
        command: :data:`PROGRAM` and its arguments.
        runner: is told that this is a session of its own; a runner that was interrupted meanwhile says nothing.
        log: descriptor.
        lock: descriptor; it stays open until the process ends.
        environment: as the run would have it in a process of its own.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, log, log)):
        os.dup2(descriptor, number)
    os.close(nothing)
    os.close(log)
    try:
        with runner:
            runner.send("ready")
            runner.recv()
    except (EOFError, ConnectionError):
        return  # nobody waits for this run any more
    from benchmark.run import imported

    if environment != imported.GIVEN:
        os.set_inheritable(lock, True)
        os.execve(command[0], command, environment)
    multiprocessing.set_start_method(None, force=True)  # the loader's workers are this run's children
    leave_endings_to_the_server()
    sys.argv = [PROGRAM[-1], *command[len(PROGRAM) :]]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as for `python -m`: methods and data of the user's own
    from benchmark.run import cli

    try:
        cli.main()
    finally:
        atexit._run_exitfuncs()  # which a child of multiprocessing leaves out
