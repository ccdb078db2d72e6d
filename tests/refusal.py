"""Bad input as its users give it: a command in this process must end with one line and exit code 2, soon."""

import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

#: Seconds within which bad input is answered, once the program is imported.
LIMIT = 10


def refused(capsys: pytest.CaptureFixture[str], command: Callable[..., Any], arguments: list[str]) -> str:
    """The one line with which a command refuses its arguments.

    Args:
        capsys: pytest's fixture.
        command: ``benchmark.run.cli.main`` or ``benchmark.commands.main``.
        arguments: of its command line.

    Raises:
        AssertionError: another exit code than 2, more than one line of error, or a warning beside it. A traceback and a
            hang of more than ``LIMIT`` seconds fail as themselves.
    """
    capsys.readouterr()
    with within(LIMIT), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        try:
            code = command(arguments)
        except SystemExit as exit:
            code = exit.code
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith(("error: ", "benchmark: "))]
    assert code == 2, f"exit code {code}: {output.out[-500:]}{output.err[-500:]}"
    assert len(lines) == 1, output.err
    assert "Traceback" not in output.err
    assert not [w for w in said if w.category is UserWarning and "lightning" not in str(w.filename)], said
    return lines[0]


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail what takes longer inside."""

    def late(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
