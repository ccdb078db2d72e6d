"""A watch for the steps of a run that are repeated from their record."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from benchmark.engine.repeat.recorded_step import RecordedSteps


@contextmanager
def repeated_steps() -> Iterator[list[str]]:
    """Collect a method's name for each of its steps that is repeated from a record instead of run as written."""
    found: list[str] = []
    visit = RecordedSteps.visit

    def watched(self: RecordedSteps, *arguments: Any) -> Any:
        visited = visit(self, *arguments)
        if visited is not None and visited.repeated is not None and not visited.wanted:
            found.append(type(self.method).__name__)
        return visited

    with patch.object(RecordedSteps, "visit", watched):
        yield found
