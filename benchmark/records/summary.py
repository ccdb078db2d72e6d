"""Summaries of a metrics table: over clients, and which rounds of a run count."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmark.errors import ConfigurationError
from benchmark.records.metrics_table import NAMED, check_clients, checked
from benchmark.records.record import RunRecord

if TYPE_CHECKING:  # pandas and NumPy load slowly; `benchmark --help` must not wait for them
    import numpy as np
    import pandas as pd


LOWER_IS_BETTER = ("loss",)


def summarize(metrics: "pd.DataFrame", test_sizes: Sequence[int]) -> dict[str, Any]:
    """Summaries of a metrics table: ``summary[point][split][metric][which][statistic]``.

    Which:

    * ``last``: the last evaluated round (its number is ``round``);
    * ``last10``: the mean over the last ten evaluated rounds after training began (``rounds`` says how many there
      were); every statistic is taken per round and then averaged;
    * ``best_on_test``: the round with the best average over clients, after training began, chosen on the very test
      data it is reported on, hence optimistic; only for the split "test";
    * ``round0``: before any training, where it was evaluated.

    Statistics over clients: ``average`` (unweighted), ``worst`` client, ``worst_decile`` (mean of the worst tenth of
    the clients, rounded down, at least one), ``std`` (n - 1 in the denominator; None for one client) and, for test
    accuracy, ``pooled`` (total correct by total test images). In ``best_on_test``, ``pooled`` is its own best, of the
    round ``pooled_round``. A value that is not finite is None.

    Beside them stands ``clients``, how many clients the last round speaks of: at the point "local" a client's value
    stands until it trains again, and a client that never trained is left out. There ``round0`` is of all clients, as
    they begin.

    Source: protocols of pFedPT (pooled, best), pFedPG (average, last) and pFedBayesPT (average, worst, last ten).

    Raises:
        ValueError: a malformed table (:func:`benchmark.records.metrics_table.checked`), or clients are missing at the
            point "server".
    """
    import numpy as np

    table = checked(metrics)
    check_clients(table, test_sizes)
    summary: dict[str, Any] = {}
    for (point, split, metric), part in table.groupby(list(NAMED), sort=True, observed=True):
        pool = split == "test" and metric == "accuracy"
        rounds, values = _by_round(part, test_sizes)
        series = _statistics(values, str(metric), np.asarray(test_sizes) if pool else None)
        known = (~np.ma.getmaskarray(values)).sum(axis=1)
        trained = np.flatnonzero(rounds > 0)
        trained = trained if len(trained) else np.arange(len(rounds))
        tail = trained[-10:]
        entry: dict[str, Any] = {
            "clients": int(known[-1]),
            "last": {"round": int(rounds[-1]), **_at(series, -1)},
            "last10": {
                "rounds": len(tail),
                **{name: _json_number(column[tail].mean()) for name, column in series.items()},
            },
        }
        if split == "test":
            # An early round that speaks of fewer clients is not compared with later ones.
            eligible = trained[known[trained] == known[-1]]
            index = _best(series["average"], eligible, str(metric))
            entry["best_on_test"] = {"round": int(rounds[index]), **_at(series, index)}
            if pool:
                index = _best(series["pooled"], eligible, str(metric))
                entry["best_on_test"] |= {
                    "pooled": _json_number(series["pooled"][index]),
                    "pooled_round": int(rounds[index]),
                }
        if rounds[0] == 0:
            entry["round0"] = _at(series, 0)
        summary.setdefault(str(point), {}).setdefault(str(split), {})[str(metric)] = entry
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

    part = metrics[(metrics["point"] == point) & (metrics["split"] == split) & (metrics["metric"] == metric)]
    if not len(part):
        raise ConfigurationError(f"the run has no {metric} on {split} at the point '{point}'")
    rounds, values = _by_round(part, record.test_sizes)
    filled = np.ma.filled(values, np.nan)
    if which == "last":
        return [float(value) for value in filled[-1]]
    if which == "best_on_test":
        chosen = record.summary[point][split][metric][which]["round"]
        return [float(value) for value in filled[list(rounds).index(chosen)]]
    count = record.summary[point][split][metric]["last10"]["rounds"]
    return [float(value) for value in filled[-count:].mean(axis=0)]


def average_by_round(
    metrics: "pd.DataFrame", test_sizes: Sequence[int], point: str, split: str, metric: str
) -> "tuple[np.ndarray, dict[str, np.ndarray]]":
    """Evaluated rounds [R] and for each the statistics over clients of :func:`summarize`; empty if never evaluated.

    ``metrics`` as in :func:`client_values`.
    """
    import numpy as np

    part = metrics[(metrics["point"] == point) & (metrics["split"] == split) & (metrics["metric"] == metric)]
    if not len(part):
        return np.zeros(0, dtype=int), {}
    rounds, values = _by_round(part, test_sizes)
    return rounds, _statistics(values, metric, None)


def _by_round(part: "pd.DataFrame", sizes: Sequence[int]) -> "tuple[np.ndarray, np.ma.MaskedArray]":
    """Rounds [R] and masked values [R, clients] of one point, split and metric.

    At the point "local" a client's value stands until it trains again; before its first time it is masked (and not
    NaN, which a measured loss can be), but for round 0, where all clients are as they begin. A client without images
    of the split is masked throughout.
    """
    import numpy as np

    rows = part.reset_index(drop=True)
    point = rows["point"].iloc[0]
    place = rows.assign(row=rows.index).pivot(index="round", columns="client", values="row").sort_index()
    if point == "local":
        trained = place.index > 0
        place[trained] = place[trained].ffill()
    where = place.reindex(columns=range(len(sizes))).to_numpy(dtype="float64")
    known = ~np.isnan(where)
    values = np.ma.masked_all(where.shape, dtype="float64")
    values[known] = rows["value"].to_numpy()[where[known].astype("int64")]
    return place.index.to_numpy(), values


def _statistics(values: "np.ma.MaskedArray", metric: str, sizes: "np.ndarray | None") -> "dict[str, np.ndarray]":
    """Per round [R] the statistics over clients of values [R, clients]; the largest is worst where less is better."""
    import numpy as np

    series: dict[str, list[float]] = {name: [] for name in ("average", "worst", "worst_decile", "std")}
    if sizes is not None:
        series["pooled"] = []
    for row in values:
        known = ~np.ma.getmaskarray(row)
        present = row.data[known]
        ordered = np.sort(present)[::-1] if metric in LOWER_IS_BETTER else np.sort(present)
        if np.isnan(present).any():  # a NaN says something: it is passed on, never sorted away
            ordered = np.full_like(ordered, math.nan)
        with np.errstate(invalid="ignore"):  # a loss can be infinite
            series["average"].append(float(present.mean()))
            series["worst"].append(float(ordered[0]))
            series["worst_decile"].append(float(ordered[: max(1, len(ordered) // 10)].mean()))
            series["std"].append(float(present.std(ddof=1)) if len(present) > 1 else math.nan)
        if sizes is not None:
            series["pooled"].append(float(np.average(present, weights=sizes[known])))
    return {name: np.asarray(column) for name, column in series.items()}


def _json_number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _at(series: "dict[str, np.ndarray]", index: int) -> dict[str, float | None]:
    return {name: _json_number(column[index]) for name, column in series.items()}


def _best(column: "np.ndarray", eligible: "np.ndarray", metric: str) -> int:
    """Index of the best round among the eligible ones, the first of equals; NaN is worst."""
    import numpy as np

    values = -column[eligible] if metric in LOWER_IS_BETTER else column[eligible]
    return int(eligible[np.argmax(np.where(np.isnan(values), -np.inf, values))])
