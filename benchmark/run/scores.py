"""Scores of all clients: as the long table of a run, as numbers for loggers, and as a table to read in a terminal."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from benchmark.errors import printable
from benchmark.metrics import EVALUATED, METRICS, POOLED_CLIENT, STATISTICS, lower_is_better, metrics_of
from benchmark.records.averaged_classes import Averaged, not_alike
from benchmark.records.words import POINT_WORDS, metric_number, unit_of

if TYPE_CHECKING:  # slow to import
    import pandas as pd

#: Metrics in one printed table: so many can be read in a terminal of 80 columns.
SIDE_BY_SIDE = 4

Key = tuple[int, str, str, str]
#: per round, point, split and metric: one value per client
Scores = dict[Key, torch.Tensor]


def long_table(found: Scores, pooled: Mapping[Key, float] = {}) -> "pd.DataFrame":
    """Make the long table of some evaluations: round, client, point, split, metric, value.

    Args:
        found: values of clients.
        pooled: values of all clients' images together.
    """
    import pandas as pd

    parts = [
        pd.DataFrame(
            {
                "round": round,
                "client": range(len(values)),
                "point": point,
                "split": split,
                "metric": metric,
                "value": values.numpy(),
            }
        )
        for (round, point, split, metric), values in sorted(found.items())
    ]
    named = ("round", "point", "split", "metric", "client", "value")
    rows = [(*key, POOLED_CLIENT, value) for key, value in sorted(pooled.items())]
    parts += [pd.DataFrame(rows, columns=named)] if rows else []
    table = pd.concat(parts, ignore_index=True)
    # A client that did not take part has nothing to report, and a metric that is not defined has no row.
    sometimes = [metric.name for metric in METRICS.values() if not metric.always_defined]
    may_lack = (table["split"] == "train") | table["metric"].isin(sometimes)
    return table[~may_lack | table["value"].notna()].reset_index(drop=True)


def logged_name(point: str, split: str, metric: str, statistic: str = "average") -> str:
    """Return the name under which loggers and callbacks know a number of a round."""
    if split == "train":
        return f"train/{metric}" if point == "local" else f"server/{metric}"
    return f"{split}/{point}/{metric}" if statistic == "average" else f"{split}/{point}/{statistic}_{metric}"


def _average(metric: str, values: torch.Tensor, evaluated: torch.Tensor | None) -> float:
    """Return the mean over the clients that have a value; NaN where one that was evaluated has diverged.

    Args:
        metric: its name.
        values: per client, NaN where it has none.
        evaluated: what says by a number that a client was evaluated there; None where nothing does.
    """
    if evaluated is not None and metric in METRICS and METRICS[metric].always_defined:
        return values[~evaluated.isnan()].mean().item()
    return values.nanmean().item()


def logged_numbers(
    point: str, split: str, metric: str, values: torch.Tensor, evaluated: torch.Tensor | None = None
) -> dict[str, float]:
    """Return what loggers and callbacks are told of a metric in a round: the average, of some the worst client's value.

    Args:
        point: where in the round.
        split: of images, or "train".
        metric: its name.
        values: per client, NaN where it has none.
        evaluated: the accuracy there per client, NaN of those that were not evaluated; None where nothing says it.
    """
    numbers = {logged_name(point, split, metric): _average(metric, values, None if split == "train" else evaluated)}
    worst, known = STATISTICS["worst"], values[~values.isnan()]
    if split != "train" and METRICS[metric].logs_worst and worst.of is not None:
        numbers[logged_name(point, split, metric, worst.name)] = worst.of(known.numpy(), lower_is_better(metric))
    return numbers


def print_scores(
    found: Scores, client_names: list[str], averaged: Mapping[tuple[str, str], Averaged] = MappingProxyType({})
) -> None:
    """Print for each split and point a table of clients x metrics, of the last evaluation; several of many metrics.

    Args:
        found: values of clients.
        client_names: of all.
        averaged: by point and split the classes in each client's mean AUROC, whose number is shown beside it.
    """
    basic = {metric.name for metric in metrics_of("basic")}
    of_streams = {name: place for place, name in enumerate(METRICS) if METRICS[name].first_in == "ood"}
    for point, split in sorted({(p, s) for _, p, s, _ in found}):
        columns = {m: v for (_, p, s, m), v in sorted(found.items()) if (p, s) == (point, split)}
        known = ~columns[EVALUATED].isnan() if EVALUATED in columns else torch.ones(len(client_names), dtype=torch.bool)
        names = sorted(columns, key=lambda metric: (metric not in basic, of_streams.get(metric, -1)))
        of_means = averaged.get((point, split), {})
        for start in range(0, len(names), SIDE_BY_SIDE):
            shown = {name: columns[name] for name in names[start : start + SIDE_BY_SIDE]}
            of_classes = of_means if "auroc" in shown else {}
            _print_table(f"{split} images, {POINT_WORDS[point]}", shown, client_names, known, of_classes)
        if said := not_alike(of_means, client_names):
            print(printable(said))


def _print_table(
    title: str,
    columns: Mapping[str, torch.Tensor],
    client_names: list[str],
    known: torch.Tensor,
    averaged: Averaged,
) -> None:
    """Print one table; ``known`` [N] says who was evaluated."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    table.add_column("client")
    for metric in columns:
        table.add_column(metric.replace("_", " ") + unit_of(metric), justify="right")
    if averaged:
        table.add_column("auroc classes", justify="right")
    for client, name in enumerate(client_names):
        shown = [metric_number(float(values[client]), m) if known[client] else "" for m, values in columns.items()]
        counts = [str(len(averaged[client]))] if client in averaged else []
        table.add_row(Text(printable(name)), *shown, *counts)
    evaluated = torch.where(known, 0.0, math.nan)
    table.add_row("average", *(metric_number(_average(m, values, evaluated), m) for m, values in columns.items()))
    Console().print(table)
