"""Where two configurations differ in what can change a result."""

from typing import Any

from benchmark.records.hashes import RESULT_FREE_KEYS


def differences(before: Any, now: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Where two configurations differ in what can change a result: dotted key, value before, value now.

    The number of rounds may grow, and the time for them: training on from a checkpoint is no other run. What the
    parser keeps for itself (``__path__``) is passed over.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(n for n in (set(before) | set(now)) - RESULT_FREE_KEYS if not n.startswith("__"))
        found = [differences(before.get(n), now.get(n), f"{key}.{n}".lstrip(".")) for n in names]
        return [difference for part in found for difference in part]
    return [] if before == now or key in ("trainer.max_epochs", "trainer.max_time") else [(key, before, now)]
