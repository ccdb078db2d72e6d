"""What takes long and what it came to, a line each, as the modules that do it say it to Python's ``logging``."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

#: Packages whose modules say what they do.
TALKING = ("benchmark", "methods", "datamodules")


class _Printed(logging.Handler):
    """Prints what it gets, wherever standard output goes at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), flush=True)


@contextmanager
def phases_printed() -> Iterator[None]:
    """Print the phases of a run as they begin.

    Whoever has set logging up gets them too. Where nobody has, a library may do so later on with a remark of its own
    (open_clip with its first one), and would print all a second time.
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
    """No warnings inside, and no remarks on seeds and devices."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
