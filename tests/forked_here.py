"""Processes that are forks of the tests' own process: nothing is imported again."""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmark.cells.forks import ForkedProcess

FORK = multiprocessing.get_context("fork")


class ForkedHere(ForkedProcess):
    """A call in a fork of this process, in a session of its own.

    Args:
        call: its exit status is what this returns; Ctrl-C interrupts it.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        ours, theirs = os.pipe()
        self.stdout = os.fdopen(ours)
        self.process = FORK.Process(target=_run, args=(call, theirs))
        self.process.start()
        os.close(theirs)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


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
