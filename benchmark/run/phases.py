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
    """Print the phases of a run as they begin."""
    handler = _Printed(logging.INFO)
    before = {name: logging.getLogger(name).level for name in TALKING}
    for name in TALKING:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).setLevel(level)


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
