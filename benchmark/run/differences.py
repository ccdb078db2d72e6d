"""Differences between two configurations that can change a result."""

from typing import Any

from benchmark.records.hashes import LATER_DEFAULTS, OF_ONE_SITTING, is_result_free

#: What a run that goes on may have otherwise: more rounds, time for them, and other devices that share its clients.
MAY_CHANGE = tuple(f"trainer.{name}" for name in ("max_epochs", *OF_ONE_SITTING))
#: What changes no result, but what the run's files are of: it must stay for a run that goes on.
OF_THE_FILES = frozenset({"data.keep_predictions"})


def differences(before: Any, now: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Return the differences that can change a result or what its files are of: dotted key, value before, value now.

    Keys in ``MAY_CHANGE`` are left out, since they do not make another run, and so are the parser's own (``__path__``).
    """
    if before == now or key in MAY_CHANGE or (is_result_free(key) and key not in OF_THE_FILES):
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(n for n in set(before) | set(now) if not n.startswith("__"))
        one, other = ({n: side.get(n, LATER_DEFAULTS.get(n)) for n in names} for side in (before, now))
        found = [differences(one[n], other[n], f"{key}.{n}".lstrip(".")) for n in names]
        return [difference for part in found for difference in part]
    return [(key, before, now)]
