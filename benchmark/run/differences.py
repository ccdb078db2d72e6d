"""Differences between two configurations that can change a result."""

from typing import Any

from benchmark.records.hashes import OF_ONE_SITTING, RESULT_FREE_KEYS

#: What a run that goes on may have otherwise: more rounds, time for them, and other devices that share its clients.
MAY_CHANGE = tuple(f"trainer.{name}" for name in ("max_epochs", *OF_ONE_SITTING))


def differences(before: Any, now: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Return the differences that can change a result: dotted key, value before, value now.

    Keys in ``MAY_CHANGE`` are left out, since they do not make another run, and so are the parser's own (``__path__``).
    """
    if before == now or key in MAY_CHANGE:
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(n for n in (set(before) | set(now)) - RESULT_FREE_KEYS if not n.startswith("__"))
        found = [differences(before.get(n), now.get(n), f"{key}.{n}".lstrip(".")) for n in names]
        return [difference for part in found for difference in part]
    return [(key, before, now)]
