"""Output of a run whose reader may be gone: ``lightning-cli fit ... | head -1``, a full disk."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Keep running inside when standard output or standard error fails; tell the other one so, once."""
    before = sys.stdout, sys.stderr
    out, err = _Outliving(sys.stdout, "output"), _Outliving(sys.stderr, "error")
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield
    finally:
        for stream in (out, err):
            stream.flush()
        sys.stdout, sys.stderr = before


class _Outliving:
    """A text stream that loses what it cannot write.

    Args:
        stream: that is written to.
        name: of it, after ``standard``.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, or lose it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write texts, or lose them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Hand on what was written, or lose it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if self._lost:
            return
        self._lost = True
        with suppress(OSError, io.UnsupportedOperation):  # also what Python itself writes at its end
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if self._name == "output":
            said = f"standard output takes no more ({error.strerror or error}); the run goes on without it"
            print(said, file=sys.stderr, flush=True)
