"""Scores of all clients: as the long table of a run, and as a table to read in a terminal."""

from typing import TYPE_CHECKING

import torch

from benchmark.records.words import POINT_WORDS, metric_number, unit_of

if TYPE_CHECKING:  # slow to import
    import pandas as pd

#: per round, point, split and metric: one value per client
Values = dict[tuple[int, str, str, str], torch.Tensor]


def long_table(found: Values) -> "pd.DataFrame":
    """The long table of some evaluations: round, client, point, split, metric, value."""
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
    table = pd.concat(parts, ignore_index=True)
    # A client that did not take part has nothing to report.
    return table[(table["split"] != "train") | table["value"].notna()].reset_index(drop=True)


def print_scores(found: Values, client_names: list[str]) -> None:
    """Print for each split and point a table of clients x metrics, of the last evaluation."""
    from rich.console import Console
    from rich.table import Table

    for point, split in sorted({(p, s) for _, p, s, _ in found}):
        table = Table(title=f"{split} images, {POINT_WORDS[point]}")
        table.add_column("client")
        columns = {m: v for (_, p, s, m), v in sorted(found.items()) if (p, s) == (point, split)}
        for metric in columns:
            table.add_column(metric.replace("_", " ") + unit_of(metric), justify="right")
        for client, name in enumerate(client_names):
            known = not columns["accuracy"][client].isnan() if "accuracy" in columns else True
            shown = (metric_number(float(values[client]), m) if known else "" for m, values in columns.items())
            table.add_row(name, *shown)
        table.add_row("average", *(metric_number(float(values.nanmean()), m) for m, values in columns.items()))
        Console().print(table)
