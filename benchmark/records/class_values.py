"""Values of one class in a finished run, such as the sensitivity of melanoma: of each client, and over clients."""

import math
from collections.abc import Sequence

from benchmark.errors import ConfigurationError
from benchmark.metrics import POOLED_CLIENT, STATISTICS, lower_is_better
from benchmark.records.predictions import BY_CLASS, CLASSES
from benchmark.records.stored_run import StoredRun

#: What to do about values of another round.
LAST = "a table shows those of the last one: give data.keep_predictions=last"


def label_of(named: str, names: Sequence[str], where: str) -> int:
    """Return the label of a class, by its name or its label.

    Args:
        named: name or label.
        names: of all classes.
        where: begins the message, such as a run's directory.

    Raises:
        ConfigurationError: there is none.
    """
    if named in names:
        return names.index(named)
    if named.isascii() and named.isdecimal() and int(named) < len(names):
        return int(named)
    known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    raise ConfigurationError(
        f"{where} has no class {named!r:.80}; give one of {known}, or a label from 0 to {len(names) - 1}"
    )


def class_values(run: StoredRun, point: str, split: str, metric: str, named: str) -> dict[int, float]:
    """Return a class's value of each client for whom it is defined, and of all clients' images together (-1).

    Args:
        run: that kept the last round's images, or a kept copy of one.
        point: of a round, ``"server"`` or ``"local"``.
        split: of the images.
        metric: one of :data:`benchmark.records.predictions.BY_CLASS`.
        named: the class, by its name or its label.

    Raises:
        ConfigurationError: the run has no values by class, or of another round than the last, none at this point or on
            this split, or no such class.
    """
    if not run.has(CLASSES):
        raise ConfigurationError(f"{run.folder} has no values by class; give its runs --data.metrics=clinical")
    if run.keep == "best_on_val":
        raise ConfigurationError(f"{run.folder} has values by class of the round that is best on val alone; {LAST}")
    rows = run.classes.query("point == @point and split == @split")
    if rows.empty:
        raise ConfigurationError(f"{run.folder} has no values by class on {split} at the point '{point}'")
    label = label_of(named, run.class_names(int(rows["class"].max()) + 1, split), f"{run.folder}")
    found = rows[rows["class"] == label].set_index("client")[metric].dropna()
    return {int(client): float(value) for client, value in zip(found.index.to_numpy(), found, strict=True)}


def class_statistic(run: StoredRun, point: str, split: str, metric: str, named: str, statistic: str) -> float | None:
    """Return a statistic of a class's values over the clients for whom it is defined; None if it is of none.

    ``pooled`` is the value of all clients' images together. Other arguments and errors as :func:`class_values`.
    """
    import numpy as np

    values = class_values(run, point, split, metric, named)
    if statistic == "pooled":
        return values.get(POOLED_CLIENT)
    of, own = STATISTICS[statistic].of, [value for client, value in values.items() if client != POOLED_CLIENT]
    made = of(np.array(own), lower_is_better(metric)) if of and own else math.nan
    return float(made) if math.isfinite(made) else None


def check_class_column(metric: str, statistic: str, where: str) -> None:
    """Refuse what is not known of single classes.

    Raises:
        ConfigurationError: another metric, or a statistic that is not of one value for each client.
    """
    if metric not in BY_CLASS:
        raise ConfigurationError(f"{where}of single classes there are {', '.join(BY_CLASS)}; got {metric}")
    if statistic != "pooled" and (statistic not in STATISTICS or STATISTICS[statistic].of is None):
        allowed = [name for name, each in STATISTICS.items() if each.of is not None or name == "pooled"]
        raise ConfigurationError(f"{where}of a class's values there are {', '.join(allowed)}; got {statistic}")
