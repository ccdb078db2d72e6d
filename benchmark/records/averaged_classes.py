"""The classes that a client's mean AUROC and average precision are of, and whether clients' means are of the same."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from benchmark.formulas import with_enough_images
from benchmark.metrics import POOLED_CLIENT
from benchmark.records.predictions import CLASSES
from benchmark.records.stored_run import StoredRun
from benchmark.records.words import POINT_WORDS

if TYPE_CHECKING:  # slow to import
    import pandas as pd

#: Of each client (-1: all together) the classes in its means.
Averaged = Mapping[int, tuple[int, ...]]


def averaged_classes(classes: "pd.DataFrame", min_support: int) -> Mapping[tuple[str, str], Averaged]:
    """Return by point and split which classes each client's mean AUROC is of; none where it is not defined.

    Args:
        classes: values by class, of :func:`benchmark.records.predictions.by_class`.
        min_support: images of a class, and of others beside it, from which it is part of the mean.
    """
    made: dict[tuple[str, str], dict[int, tuple[int, ...]]] = {}
    for place, rows in classes.groupby(["point", "split", "client"], sort=True):
        point, split, client = cast("tuple[str, str, int]", place)
        rows = rows.sort_values("class")
        counted = with_enough_images(rows["support"].to_numpy(copy=True), min_support) & rows["auroc"].notna()
        made.setdefault((point, split), {})[int(client)] = tuple(map(int, rows.loc[counted, "class"]))
    return made


def not_alike(averaged: Averaged, names: Sequence[str], ranked: str = "clients") -> str:
    """Return a sentence where clients' means are of different classes, so that they rank no client; else nothing.

    Args:
        averaged: of a point and split.
        names: of the clients.
        ranked: another word for these.
    """
    own = {client: classes for client, classes in averaged.items() if client != POOLED_CLIENT and classes}
    first = next(iter(own), POOLED_CLIENT)
    other = next((client for client, classes in own.items() if classes != own[first]), None)
    if other is None:
        return ""
    said = " and ".join(f"{names[each]} over {_listed(own[each])}" for each in (first, other))
    return f"AUROC and AP do not rank the {ranked}: they average over different classes ({said})."


def _listed(classes: Sequence[int], most: int = 12) -> str:
    shown = ", ".join(map(str, classes[:most])) + (", ..." if len(classes) > most else "")
    return f"{len(classes)} class{'es' * (len(classes) != 1)}: {shown}"


def counts_in_words(averaged: Averaged) -> str:
    """Return over how many classes clients' means are, such as ``3 for 2 clients, 0 for 1 client; pooled 3``."""
    counts = Counter(len(classes) for client, classes in averaged.items() if client != POOLED_CLIENT)
    clients = ", ".join(f"{n} for {of} client{'s' * (of != 1)}" for n, of in sorted(counts.items(), reverse=True))
    return f"{clients}; all images together {len(averaged.get(POOLED_CLIENT, ()))}"


def classes_of_means(run: StoredRun) -> list[str]:
    """Say over how many classes a run's AUROCs are means, and where they rank no client.

    Of a run without values by class there is nothing to say, nor of two classes, as AUROC is then that of the second.

    Raises:
        ConfigurationError: these are not the ones that the run wrote.
    """
    lines: list[str] = []
    if not run.has(CLASSES) or run.classes["class"].nunique() <= 2:
        return lines
    for (point, split), averaged in averaged_classes(run.classes, run.min_support).items():
        if "auroc" in run.record.summary.get(point, {}).get(split, {}):
            counts = f"auroc_classes, {split} {POINT_WORDS[point]}: {counts_in_words(averaged)}."
            lines.append(" ".join(filter(None, (counts, not_alike(averaged, run.record.client_names)))))
    return lines
