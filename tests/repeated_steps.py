"""Which steps of a run were repeated from their record."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from benchmark.engine.recorded_step import RecordedSteps


@contextmanager
def repeated_steps() -> Iterator[list[str]]:
    """Names of the methods whose steps were repeated and not taken as they are written, one a step."""
    found: list[str] = []
    visit = RecordedSteps.visit

    def watched(self: RecordedSteps, *arguments: Any) -> Any:
        visited = visit(self, *arguments)
        if visited is not None:
            setattr(visited, "made", _noting(visited.made, found, type(self.method).__name__))  # noqa: B010
        return visited

    with patch.object(RecordedSteps, "visit", watched):
        yield found


def _noting(made: Callable[..., Any], found: list[str], name: str) -> Callable[..., Any]:
    def noting(written: Callable[[], Any]) -> Any:
        taken: list[int] = []

        def as_written() -> Any:
            taken.append(1)
            return written()

        gradients = made(as_written)
        if not taken:
            found.append(name)
        return gradients

    return noting
