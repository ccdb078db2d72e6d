"""The last lines of a cell's log."""

import re
from pathlib import Path


def tail(log: Path) -> list[str]:
    """The last lines of a log that say something, without colours."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - 16_384))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def last_line(log: Path) -> str:
    """The last line of a log that says something, at most 300 characters."""
    lines = tail(log)
    return lines[-1][:300] if lines else ""
