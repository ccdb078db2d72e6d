"""Report a check's outcome: passed, or what is wrong and what to do."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from benchmark.engine.refusals.author_errors import authors_line
from benchmark.errors import ConfigurationError, causes

S = TypeVar("S")


class FailedCheck(Exception):  # noqa: N818 (the result of a check is no error of the program)
    """A check that fails; the message is one line: what was found, what to do."""


class NotCheckedError(Exception):
    """A check that there is nothing for; the message says why."""


@contextmanager
def own_errors() -> Iterator[None]:
    """Name the author's line of whatever ends otherwise than in a result of a check or in a ConfigurationError.

    Raises:
        FailedCheck: something does, ``sys.exit`` included.
    """
    try:
        yield
    except (ConfigurationError, FailedCheck, NotCheckedError):
        raise
    except (Exception, SystemExit) as error:
        for each in causes(error):  # the command line's parser wraps what a constructor raises
            frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(each.__traceback__)]
            if (found := authors_line(frames)) is not None:
                break
        else:
            each, found = error, frames[-1]
        said = " ".join(str(each).split())
        raise FailedCheck(f"line {found[1]} of {found[0]} ends in {type(each).__name__}: {said}") from error


def require(holds: bool, otherwise: str) -> None:
    """Fail a check.

    Raises:
        FailedCheck: ``holds`` is not so.
    """
    if not holds:
        raise FailedCheck(otherwise)


def require_equal(left: dict[str, Tensor], right: dict[str, Tensor], otherwise: str, tolerance: float = 0.0) -> None:
    """Require the same names, and values equal: bit for bit without a tolerance; NaN equals NaN.

    Raises:
        FailedCheck: they are not; the message begins with the name that differs most.
    """
    require(left.keys() == right.keys(), f"{sorted(left.keys() ^ right.keys())[:3]} are there only once; {otherwise}")
    for name, value in left.items():
        try:
            torch.testing.assert_close(right[name], value, rtol=tolerance, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            gap = (right[name].double() - value.double()).abs().nan_to_num().max() if value.numel() else 0.0
            raise FailedCheck(f"{name} differs by up to {gap:.1e}; {otherwise}") from error


def printed(checks: Sequence[Callable[[S], None]], subject: S) -> bool:
    """Run checks, print a line for each, and return whether all hold.

    Args:
        checks: each named by the first line of its docstring.
        subject: what is checked.
    """
    well = True
    for check in checks:
        title = (check.__doc__ or check.__name__).splitlines()[0].rstrip(".")
        try:
            with own_errors():
                check(subject)
        except NotCheckedError as reason:
            print(f"-       {title}: not checked, {reason}", flush=True)
        except (FailedCheck, ConfigurationError) as failed:
            well = False
            print(f"FAILED  {title}: {failed}", flush=True)
        else:
            print(f"ok      {title}", flush=True)
    return well
