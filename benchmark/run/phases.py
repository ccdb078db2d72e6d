"""Printing of the project's log messages: a line for each long step, and one for its result."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

#: Packages whose modules say what they do.
TALKING = ("benchmark", "methods", "datamodules")


class _Printed(logging.Handler):
    """Prints log messages to the standard output of that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), flush=True)


@contextmanager
def phases_printed() -> Iterator[None]:
    """Print the phases of a run as they begin.

    They also reach the root logger's handlers, if it has any. If it has none, a library may add one later (open_clip
    does so with its first message), and would print every line a second time; so they are not passed on then.
    """
    handler = _Printed(logging.INFO)
    loggers = [logging.getLogger(name) for name in TALKING]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = logger.propagate and logging.root.hasHandlers()
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and the messages on seeds and devices inside."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
