"""The data set that each client of a run learns, where one federation has several."""

import re
from collections.abc import Sequence

from benchmark.records.record import RunRecord


def data_sets_of(record: RunRecord) -> Sequence[str] | None:
    """Return the data set of each client, [clients]; None where a client is of none, as in a run on one data set.

    A record names its data sets, ``digits+letters``, and :class:`datamodules.ClassesOfDataSets` names clients after
    theirs: ``digits`` where it has one client, ``letters 0`` and ``letters 1`` where it has two. ``letters (whole)`` is
    its tester.
    """
    known = record.dataset.split("+")
    found = [_of(client, known) for client in record.client_names] if len(known) > 1 else [None]
    return None if None in found else [str(each) for each in found]


def _of(client: str, known: Sequence[str]) -> str | None:
    fits = [name for name in known if re.fullmatch(rf"{re.escape(name)}( \d+| \(whole\))?", client)]
    return max(fits, key=len, default=None)
