"""One run at a time in a process: what a run draws first comes from generators that all threads share."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from benchmark.errors import ConfigurationError

_RUNNING = threading.RLock()


@contextmanager
def alone() -> Iterator[None]:
    """Keep other threads of this process from making a run meanwhile; the same thread may enter again.

    Raises:
        ConfigurationError: another thread is inside.
    """
    if not _RUNNING.acquire(blocking=False):
        raise ConfigurationError(
            "another thread of this process makes a run, and both would draw from the same generators, other numbers "
            "than each alone; make one after the other, or each in a process of its own"
        )
    try:
        yield
    finally:
        _RUNNING.release()
