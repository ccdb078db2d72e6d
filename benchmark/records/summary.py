"""Summaries of a metrics table: over clients, and which rounds of a run count."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmark.errors import ConfigurationError
from benchmark.metrics import EVALUATED, HUGE, METRICS, POOLED_CLIENT, STATISTICS, lower_is_better, pooled_by
from benchmark.records.client_groups import groups_of
from benchmark.records.metrics_table import NAMED, check_clients, checked
from benchmark.records.record import RunRecord

if TYPE_CHECKING:  # pandas and NumPy load slowly; `benchmark --help` must not wait for them
    import numpy as np
    import pandas as pd


#: How many of the last evaluated rounds ``last10`` is the mean of.
TAIL = 10


class _Rounds(NamedTuple):
    """Values of one point, split and metric.

    Attributes:
        numbers: evaluated rounds [R].
        values: masked [R, clients].
        scored: clients [R] that were evaluated; of some of them a metric may not be defined.
        pooled: value of all clients' images together [R], NaN where there is none.
    """

    numbers: "np.ndarray"
    values: "np.ma.MaskedArray"
    scored: "np.ndarray"
    pooled: "np.ndarray"

    @property
    def trained(self) -> "np.ndarray":
        """Return the positions of the rounds after training began; of all where there is none."""
        import numpy as np

        trained = np.flatnonzero(self.numbers > 0)
        return trained if len(trained) else np.arange(len(self.numbers))


def summarize(
    metrics: "pd.DataFrame",
    test_sizes: Sequence[int],
    statistics: Collection[str] | None = None,
    complete: bool = True,
) -> dict[str, Any]:
    """Summarize a metrics table: ``summary[point][split][metric][which][statistic]``.

    Which:

    * ``last``: the last evaluated round (its number is ``round``);
    * ``last10``: the mean over the last ten evaluated rounds after training began (``rounds`` says how many there
      were); every statistic is taken per round and then averaged;
    * ``best_on_test``: the round with the best average over clients, after training began, chosen on the very test
      data it is reported on, hence optimistic; only for the split "test";
    * ``round0``: before any training, where it was evaluated.

    Statistics over clients are those of :data:`benchmark.metrics.STATISTICS`: ``average`` (unweighted), ``worst``
    client, ``worst_decile`` (mean of the worst tenth of the clients, rounded down, at least one), ``std`` (n - 1 in the
    denominator; None for one client) and, for test accuracy, ``pooled`` (total correct by total test images). In
    ``best_on_test``, ``pooled`` is its own best, of the round ``pooled_round``. A value that is not finite is None.

    Beside them stands ``clients``, how many clients have a value in the last round: at the point "local" a client's
    value stands until it trains again, and a client that never trained is left out. There ``round0`` is of all clients,
    as they begin.

    Args:
        metrics: the table.
        test_sizes: test images per client.
        statistics: names; by default those that are always in a record.
        complete: at the point "server" no client may be missing in a round that was evaluated; in a deployment one may.

    Source: protocols of pFedPT (pooled, best), pFedPG (average, last) and pFedBayesPT (average, worst, last ten).

    Raises:
        ValueError: a malformed table (:func:`benchmark.records.metrics_table.checked`), or clients are missing at the
            point "server" of a complete one.
    """
    import numpy as np

    table = checked(metrics)
    check_clients(table, test_sizes, complete)
    chosen = [name for name, each in STATISTICS.items() if (each.always if statistics is None else name in statistics)]
    summary: dict[str, Any] = {}
    parts = {tuple(map(str, key)): part for key, part in table.groupby(list(NAMED), sort=True, observed=True)}
    for (point, split, metric), part in parts.items():
        found = _by_round(part, parts.get((point, split, EVALUATED)), test_sizes, point, split, metric)
        series = _statistics(found.values, metric, chosen)
        if "pooled" in chosen and (how := pooled_by(metric, split)):
            series["pooled"] = found.pooled if how == "counts" else _weighted(found.values, np.asarray(test_sizes))
        rounds, tail = found.numbers, found.trained[-TAIL:]
        entry: dict[str, Any] = {
            "clients": int((~np.ma.getmaskarray(found.values[-1])).sum()),
            "last": {"round": int(rounds[-1]), **_at(series, -1)},
            "last10": {
                "rounds": len(tail),
                **{name: _json_number(column[tail].mean()) for name, column in series.items()},
            },
        }
        if split == "test":
            index = _best(series["average"], found, metric)
            entry["best_on_test"] = {"round": int(rounds[index]), **_at(series, index)}
            if "pooled" in series:
                index = _best(series["pooled"], found, metric)
                entry["best_on_test"] |= {
                    "pooled": _json_number(series["pooled"][index]),
                    "pooled_round": int(rounds[index]),
                }
        if rounds[0] == 0:
            entry["round0"] = _at(series, 0)
        summary.setdefault(point, {}).setdefault(split, {})[metric] = entry
    return summary


def client_values(
    metrics: "pd.DataFrame", record: RunRecord, point: str, split: str, metric: str, which: str
) -> list[float]:
    """One value per client, [clients], that belongs to ``record.summary[point][split][metric][which]``.

    ``metrics`` was checked, as all tables are that were read (:func:`benchmark.records.stored_run.read_metrics`).
    ``which`` is ``"last"``, ``"last10"`` or ``"best_on_test"`` (the round that is best for the average). NaN where a
    client has no value.

    Raises:
        ConfigurationError: the run was not evaluated at this point, on this split, or with this metric.
    """
    import numpy as np

    found = _read(metrics, record.test_sizes, point, split, metric)
    if found is None:
        raise ConfigurationError(f"the run has no {metric} on {split} at the point '{point}'")
    filled = np.ma.filled(found.values, np.nan)
    chosen = filled[_positions(found, _entry(record, point, split, metric), which)]
    return [float(value) for value in chosen.mean(axis=0)]


def statistic_of(
    metrics: "pd.DataFrame",
    record: RunRecord,
    point: str,
    split: str,
    metric: str,
    which: str,
    statistic: str,
    train_sizes: Sequence[int] | None = None,
) -> float | None:
    """Compute a statistic over clients as it would stand at ``record.summary[point][split][metric][which]``.

    Arguments as in :func:`client_values`; ``train_sizes`` is images per client, None where it is not known. None is
    returned where the statistic is not defined, as ``by_data_set`` of a run on one data set and ``untrained`` of one
    that has taken all clients are not; where the run has no such values; and for ``pooled``, which is no function of
    the clients' values.
    """
    found = _read(metrics, record.test_sizes, point, split, metric)
    if found is None or statistic == "pooled":
        return None
    if STATISTICS[statistic].of is not None:
        column = _statistics(found.values, metric, (statistic,))[statistic]
    else:
        groups = groups_of(record, train_sizes, statistic)
        if not groups:
            return None
        column = _mean_over(found.values, groups)
    return _json_number(column[_positions(found, _entry(record, point, split, metric), which)].mean())


def clock_of(record: RunRecord) -> dict[int, float]:
    """Return the seconds of the virtual clock when each round closed, 0 for round 0; empty for a run without one."""
    found = (record.facts or {}).get("clock", {})
    return {0: 0.0} | {int(number): float(seconds) for number, seconds in found.items()} if found else {}


def average_by_round(
    metrics: "pd.DataFrame", test_sizes: Sequence[int], point: str, split: str, metric: str
) -> "tuple[np.ndarray, dict[str, np.ndarray]]":
    """Return the evaluated rounds [R] and for each the statistics of every summary; empty if never evaluated.

    ``metrics`` as in :func:`client_values`. Pooled is not among them.
    """
    import numpy as np

    found = _read(metrics, test_sizes, point, split, metric)
    if found is None:
        return np.zeros(0, dtype=int), {}
    return found.numbers, _statistics(found.values, metric, [name for name, each in STATISTICS.items() if each.always])


def best_round(metrics: "pd.DataFrame", test_sizes: Sequence[int], point: str, split: str, metric: str) -> int:
    """Return the round with the best average over clients after training began, the first of equals.

    ``metrics`` as in :func:`client_values`. It is what ``best_on_test`` is on test images.

    Raises:
        ConfigurationError: the run was not evaluated at this point, on this split, or with this metric.
    """
    found = _read(metrics, test_sizes, point, split, metric)
    if found is None:
        raise ConfigurationError(f"the run has no {metric} on {split} at the point '{point}'")
    return int(found.numbers[_best(_statistics(found.values, metric, ("average",))["average"], found, metric)])


def values_of_round(
    metrics: "pd.DataFrame", record: RunRecord, point: str, split: str, metric: str, round: int
) -> list[float]:
    """Return one value per client, [clients], of an evaluated round; as :func:`client_values` otherwise."""
    import numpy as np

    found = _read(metrics, record.test_sizes, point, split, metric)
    if found is None or round not in found.numbers:
        raise ConfigurationError(f"the run has no {metric} on {split} at the point '{point}' in round {round}")
    filled = np.ma.filled(found.values, np.nan)
    return [float(value) for value in filled[list(found.numbers).index(round)]]


def _read(metrics: "pd.DataFrame", sizes: Sequence[int], point: str, split: str, metric: str) -> _Rounds | None:
    """Read the values of one point, split and metric; None where there are none."""
    there = (metrics["point"] == point) & (metrics["split"] == split)
    part = metrics[there & (metrics["metric"] == metric)]
    evaluated = None if _always_defined(split, metric) else metrics[there & (metrics["metric"] == EVALUATED)]
    return _by_round(part, evaluated, sizes, point, split, metric) if len(part) else None


def _entry(record: RunRecord, point: str, split: str, metric: str) -> Mapping[str, Any]:
    """Return what the record says of a metric; empty if it does not know it."""
    entry: Mapping[str, Any] = record.summary.get(point, {}).get(split, {}).get(metric, {})
    return entry


def _positions(found: _Rounds, entry: Mapping[str, Any], which: str) -> list[int]:
    """Return the positions of the rounds that a part of a summary is made of."""
    last = len(found.numbers)
    if which == "best_on_test":
        return [list(found.numbers).index(entry[which]["round"])]
    return list(range(last - (entry[which]["rounds"] if which == "last10" else 1), last))


def _always_defined(split: str, metric: str) -> bool:
    return split == "train" or metric not in METRICS or METRICS[metric].always_defined


def _by_round(
    part: "pd.DataFrame", evaluated: "pd.DataFrame | None", sizes: Sequence[int], point: str, split: str, metric: str
) -> _Rounds:
    """Arrange the rows of one point, split and metric by round and client.

    At the point "local" a client's value stands until it trains again; before its first time it is masked (and not
    NaN, which a measured loss can be), but for round 0, where all clients are as they begin. A client without images
    of the split is masked throughout, and where the metric is not defined.

    A summary has up to a hundred metrics, so that this is done with arrays: tables take ten times as long.

    Args:
        part: all rows of the metric there, with pooled values.
        evaluated: the rows that say which clients were evaluated there; None or empty where nothing does.
        sizes: test images per client.
        point: of the rows.
        split: of the rows.
        metric: its name.
    """
    import numpy as np

    defined = _always_defined(split, metric)
    rounds, clients, measured = (part[name].to_numpy() for name in ("round", "client", "value"))
    of_client = clients != POOLED_CLIENT
    if defined or evaluated is None or not len(evaluated):
        at, of = rounds[of_client], clients[of_client]
    else:
        at, of = evaluated["round"].to_numpy(), evaluated["client"].to_numpy()
    numbers = np.unique(at)

    def places(rounds: "np.ndarray", clients: "np.ndarray") -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
        """Return which of these rows have a place, and the places' rows and columns."""
        has = np.isin(rounds, numbers) & (clients >= 0) & (clients < len(sizes))
        return has, np.searchsorted(numbers, rounds[has]), clients[has]

    known = np.zeros((len(numbers), len(sizes)), dtype=bool)
    values = np.full(known.shape, np.nan)
    known[places(at, of)[1:]] = True
    has, *place = places(rounds, clients)
    values[*place] = measured[has]
    if point == "local":
        trained = np.flatnonzero(numbers > 0)
        # Of each client the latest of these rounds in which it was evaluated; -1 before the first one.
        latest = np.maximum.accumulate(np.where(known[trained], np.arange(len(trained))[:, None], -1), axis=0)
        values[trained] = np.take_along_axis(values[trained], latest.clip(min=0), axis=0)
        known[trained] = latest >= 0
    pooled = np.full(len(numbers), np.nan)
    of_all = ~of_client & np.isin(rounds, numbers)
    pooled[np.searchsorted(numbers, rounds[of_all])] = measured[of_all]
    masked = ~known if defined else ~known | np.isnan(values)
    return _Rounds(numbers, np.ma.masked_array(values, masked), known.sum(axis=1), pooled)


def _statistics(values: "np.ma.MaskedArray", metric: str, names: Collection[str]) -> "dict[str, np.ndarray]":
    """Compute for each round [R] the named statistics over clients of values [R, clients]; NaN where no client has one.

    Pooled is none of them: it is no function of these values.
    """
    import numpy as np

    lower = lower_is_better(metric)
    functions = {name: function for name in names if (function := STATISTICS[name].of) is not None}
    series: dict[str, list[float]] = {name: [] for name in functions}
    for row in values:
        present = row.data[~np.ma.getmaskarray(row)]
        with np.errstate(invalid="ignore"):  # a loss can be infinite
            for name, function in functions.items():
                series[name].append(function(present, lower) if len(present) else math.nan)
    return {name: np.asarray(column) for name, column in series.items()}


def _mean_over(values: "np.ma.MaskedArray", groups: Sequence[Sequence[int]]) -> "np.ndarray":
    """Return for each round [R] the mean over groups, of each the mean of its clients' values [R, clients].

    So FedTPG reports it of data sets (Qiu et al., ICLR 2024). Groups of which no client has a value do not count; NaN
    where none has.
    """
    import numpy as np

    means = np.ma.stack([values[:, clients].mean(axis=1) for clients in groups], axis=1)
    return np.asarray(np.ma.filled(means.mean(axis=1), np.nan))


def _weighted(values: "np.ma.MaskedArray", sizes: "np.ndarray") -> "np.ndarray":
    """Return for each round [R] the mean over clients of values [R, clients], weighted by their images."""
    import numpy as np

    known = ~np.ma.getmaskarray(values)
    return np.asarray(
        [float(np.average(row.data[has], weights=sizes[has])) for row, has in zip(values, known, strict=True)]
    )


def _json_number(value: float) -> float | None:
    return float(value) if abs(value) <= HUGE else None  # no record has a larger one


def _at(series: "dict[str, np.ndarray]", index: int) -> dict[str, float | None]:
    return {name: _json_number(column[index]) for name, column in series.items()}


def _best(column: "np.ndarray", found: _Rounds, metric: str) -> int:
    """Return the position of the best round after training began, the first of equals; NaN is worst.

    Only rounds in which most clients were evaluated are compared: not early ones at the point "local", and not those of
    a deployment in which a site was away.
    """
    import numpy as np

    scored = found.scored[found.trained]
    eligible = found.trained[scored == scored.max()]
    values = -column[eligible] if lower_is_better(metric) else column[eligible]
    return int(eligible[np.argmax(np.where(np.isnan(values), -np.inf, values))])
