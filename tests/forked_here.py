"""Processes that are forks of the tests' own process: nothing is imported again."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

FORK = multiprocessing.get_context("fork")


class ForkedHere:
    """A call in a fork of this process, with what :class:`subprocess.Popen` has for a process of its own session.

    Args:
        call: its exit status is what this returns; Ctrl-C interrupts it.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        ours, theirs = os.pipe()
        self.stdout = os.fdopen(ours)
        self._process = FORK.Process(target=_run, args=(call, theirs))
        self._process.start()
        os.close(theirs)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return self._process.exitcode


@contextlib.contextmanager
def forked_here(call: Callable[[], Any]) -> Iterator[ForkedHere]:
    """A call in a fork of this process, which is killed at the end if it has not ended."""
    process = ForkedHere(call)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _run(call: Callable[[], Any], said: int) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (1, 2):
        os.dup2(said, number)
    os.close(said)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    code = call()
    sys.exit(code if isinstance(code, int) else 0)  # an object would be taken for a failure
