"""Names of classes and domains, as people write them into tables and folders."""

import math
import re
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from benchmark.errors import ConfigurationError, listed


def in_order(names: Iterable[str]) -> list[str]:
    """Names of classes or domains, each once, in their order: by value where all of them are numbers, 2 before 10."""
    found = sorted(set(names))
    return sorted(found, key=Decimal) if all(re.fullmatch(r"[+-]?\d+(\.\d+)?", name) for name in found) else found


def text_of(value: Any) -> str:
    """The text of a table's cell; empty where nothing is given (null, NaN).

    Raises:
        TypeError: it is no text and no number.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, Integral):
        return str(bool(value) if isinstance(value, bool) else int(value))
    if isinstance(value, Real):
        return "" if math.isnan(value) else str(float(value))
    raise TypeError(f"{value!r:.80}: expected a name or a number")


def whole(texts: Sequence[str]) -> list[str]:
    """The texts; whole numbers without ``.0``, where all are whole: one null is enough to make a table's floats."""
    numbers = all(re.fullmatch(r"[+-]?\d+(\.0+)?", text) for text in texts if text)
    return [text.partition(".")[0] for text in texts] if numbers else list(texts)


def check_printable(name: str, at: Path | str) -> None:
    """Refuse escape sequences and the like.

    Raises:
        ConfigurationError: there is such a sign.
    """
    if not name.isprintable():
        raise ConfigurationError(f"{at}: the name {name!r} has signs that cannot be printed; rename it")


def check_names(names: Iterable[str], kind: str, at: Path | str) -> None:
    """Refuse names that cannot be printed or read alike; warn of those that differ in case alone.

    Args:
        names: of all classes, or of all domains.
        kind: ``class`` or ``domain``, for messages.
        at: where the names stand, for messages.

    Raises:
        ConfigurationError: there are such names.
    """
    read: dict[str, str] = {}
    cases: dict[str, list[str]] = {}
    for name in names:
        check_printable(name, at)
        form = unicodedata.normalize("NFC", name).strip()
        if read.setdefault(form, name) != name:
            raise ConfigurationError(
                f"{at}: the {kind} names {read[form]!a} and {name!a} read alike, and would be two of them; spaces or "
                "the form of a letter differ: name them in one way"
            )
        cases.setdefault(form.casefold(), []).append(name)
    alike = [" and ".join(same) for same in cases.values() if len(same) > 1]
    if alike:
        warnings.warn(
            f"{at}: {kind} names differ in upper and lower case alone: {listed(alike)}; if they mean one, name them in "
            "one way",
            stacklevel=2,
        )
