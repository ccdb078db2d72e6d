"""Being asked to end: SIGTERM and SIGHUP are treated like Ctrl-C, so that both end in the same orderly way."""

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from benchmark.errors import causes

#: prctl(2): the signal that a process gets when the one that started it ends. Linux only.
PR_SET_PDEATHSIG = 1
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


def end_with_parent() -> None:
    """Ask the kernel, in a process that was just started, for SIGTERM when the one that started it ends."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def interrupting_signal(error: BaseException | None) -> signal.Signals | None:
    """The signal behind an exception, itself or one that it was raised from; None if there was none."""
    found = next((cause for cause in causes(error) if isinstance(cause, KeyboardInterrupt)), None)
    return None if found is None else signal.Signals(getattr(found, "number", signal.SIGINT))


@contextlib.contextmanager
def termination_as_interrupt(*also: signal.Signals) -> Iterator[None]:
    """Raise :class:`Interrupted` at the first SIGTERM or SIGHUP, and pass over those that follow.

    What is ignored from outside (``nohup``) stays so.

    Args:
        also: further signals that are treated so, such as SIGINT where a second Ctrl-C is not to cut the end short.
    """
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise Interrupted(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP, *also):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
