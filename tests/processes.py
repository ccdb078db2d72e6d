"""Processes for tests as forks of one that has imported the program, which takes ten seconds of a core, once."""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from benchmark.cells.forks import ForkedProcess, Handed, leave_endings_to_the_server

FORKS = multiprocessing.get_context("forkserver")
#: Imported once for all of them; it also keeps the server of forks silent.
IMPORTED = "benchmark.run.imported"


class Forked(ForkedProcess):
    """A command ``python -m MODULE ...`` or ``python -c PROGRAM ...``, with what :class:`subprocess.Popen` has for it.

    The module's ``main`` is called, or the program carried out, in an environment and a folder of its own; as in a
    process that a shell starts in the foreground, Ctrl-C interrupts it. What a process does while it imports is not
    seen.

    Args:
        command: with the interpreter at its head.
        cwd: its folder.
        environment: all of it.
        apart: what it says on stderr is kept apart from what it says on stdout.
    """

    def __init__(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str], apart: bool = False) -> None:
        ends = [os.pipe() for _ in range(1 + apart)]
        self._said = [os.fdopen(ours, "rb") for ours, _ in ends]
        given = ([*command[1:]], str(cwd), dict(environment), [Handed(theirs) for _, theirs in ends])
        FORKS.set_forkserver_preload([IMPORTED])
        self.process = FORKS.Process(target=_run, args=given)
        main = ModuleType("__main__")  # pytest is not started in a fork again
        with patch.dict(sys.modules, __main__=main), patch.dict(os.environ, environment):
            self.process.start()
        for _, theirs in ends:
            os.close(theirs)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read what it says until it ends; what it says on stderr is in the first part unless it is kept apart.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        parts = [b"" for _ in self._said]
        with selectors.DefaultSelector() as ready:
            for number, stream in enumerate(self._said):
                ready.register(stream, selectors.EVENT_READ, number)
            while ready.get_map():
                left = None if deadline is None else deadline - time.monotonic()
                events = ready.select(left) if left is None or left > 0 else []
                if not events:
                    raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
                for key, _ in events:
                    more = os.read(key.fd, 2**16)
                    parts[key.data] += more
                    if not more:
                        ready.unregister(key.fileobj)
        for stream in self._said:
            stream.close()
        self.process.join()
        out, err = (*(part.decode() for part in parts), "")[:2]
        return out, err


def _run(command: list[str], cwd: str, environment: dict[str, str], descriptors: list[int]) -> None:
    """Be the process of a command."""
    flag, named, *arguments = command
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for number, descriptor in zip((1, 2), (descriptors * 2)[:2], strict=True):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [cwd, *paths, *(path for path in sys.path if path not in paths)]
    multiprocessing.set_start_method(None, force=True)  # the loader's workers are this run's children
    leave_endings_to_the_server()
    sys.argv = [named, *arguments]
    try:
        if flag == "-c":
            exec(compile(named, "<string>", "exec"), {"__name__": "__main__"})
        else:
            importlib.import_module(named).main()
    finally:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        atexit._run_exitfuncs()  # which a child of multiprocessing leaves out
