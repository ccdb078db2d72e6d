"""Waiting for what other processes do."""

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], seconds: float, pause: float = 0.02) -> Any:
    """What a condition answers as soon as that is true of it.

    Args:
        condition: asked again and again.
        seconds: within which it has to be true.
        pause: seconds between two questions.

    Raises:
        AssertionError: it is not true within so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited more than {seconds} seconds"
        time.sleep(pause)
    return answer
