"""Being asked to end: SIGTERM and SIGHUP are treated like Ctrl-C, so that both end in the same orderly way."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


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
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return signal.Signals(getattr(error, "number", signal.SIGINT)) if error is not None else None


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Raise :class:`Interrupted` at SIGTERM and SIGHUP, once; what is ignored from outside (``nohup``) stays so."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # the clean-up is not cut short
        raise Interrupted(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
