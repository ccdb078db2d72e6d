"""Where two configurations differ in what can change a result."""

from typing import Any

from benchmark.records.hashes import OF_ONE_SITTING, RESULT_FREE_KEYS

#: What a run that goes on may have otherwise: more rounds, time for them, and other devices that share its clients.
MAY_CHANGE = tuple(f"trainer.{name}" for name in ("max_epochs", *OF_ONE_SITTING))


def differences(before: Any, now: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Where two configurations differ in what can change a result: dotted key, value before, value now.

    What is among ``MAY_CHANGE`` is no other run, and what the parser keeps for itself (``__path__``) is passed over.
    """
    if before == now or key in MAY_CHANGE:
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(n for n in (set(before) | set(now)) - RESULT_FREE_KEYS if not n.startswith("__"))
        found = [differences(before.get(n), now.get(n), f"{key}.{n}".lstrip(".")) for n in names]
        return [difference for part in found for difference in part]
    return [(key, before, now)]
