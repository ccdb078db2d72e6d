"""Waiting for what other processes do."""

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], seconds: float, pause: float = 0.02) -> Any:
    """Wait until a condition is true, and return its value.

    Args:
        condition: function that is called again and again.
        seconds: largest time to wait.
        pause: seconds between two calls.

    Raises:
        AssertionError: the condition is not true in time.
    """
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited more than {seconds} seconds"
        time.sleep(pause)
    return answer
