"""Fig. 6: template and size of the prompt."""

from typing import TYPE_CHECKING

from benchmark.drawing import new_figure
from benchmark.errors import ConfigurationError
from benchmark.figures.pfedpt.sources import Drawing, Sources
from benchmark.figures.pfedpt.style import COLOURS, MARKERS, label_axes

if TYPE_CHECKING:  # slow to import
    import pandas as pd


def sizes_by_template(table: "pd.DataFrame", column: str = "Pooled") -> "pd.DataFrame":
    """From a table's long CSV one row per template and size: ``template``, ``size``, ``accuracy``, ``std``.

    Raises:
        ConfigurationError: the table has no such column, or a row's label is not ``Template, p=size``.
    """
    rows = table[(table["kind"] == "column") & (table["column"] == column)]
    parts = rows["method"].str.extract(r"^(?P<template>.+), p=(?P<size>\d+)$")
    if rows.empty or parts.isna().any(axis=None):
        raise ConfigurationError(f"the table of Fig. 6 needs a column {column!r} and rows named 'Template, p=size'")
    found = parts.assign(size=parts["size"].astype(int), accuracy=rows["ours"], std=rows["std"], rounds=rows["rounds"])
    return found.reset_index(drop=True)


def sizes_figure(sources: Sources) -> Drawing:
    """Fig. 6: accuracy over the prompt's template and size, from the table of the same name."""
    import pandas as pd

    assert sources.table is not None
    numbers = sizes_by_template(pd.read_csv(sources.table, dtype={"rounds": "str"}))
    figure = new_figure(6.4, 4.2)
    axes = figure.add_subplot()
    for order, (template, part) in enumerate(numbers.groupby("template", sort=False)):
        part = part.sort_values("size")
        axes.errorbar(
            part["size"], part["accuracy"], yerr=part["std"].fillna(0), label=template, capsize=3, markersize=7,
            color=COLOURS[order], marker=MARKERS[order], linestyle=("-", "--", ":")[order % 3], linewidth=1.8,
        )  # fmt: skip
    axes.set_xticks(sorted(set(numbers["size"])))
    label_axes(
        axes, "size p of the prompt (pixels)", "accuracy (%), all clients pooled", "Template and size of the prompt"
    )
    figure.legend(loc="outside lower center", ncols=3, fontsize=10)
    rounds = ", ".join(dict.fromkeys(numbers["rounds"]))
    return Drawing(
        figure,
        numbers,
        "Fig. 6 of pFedPT: accuracy pooled over all clients' test images against template and size of the prompt, best "
        f"of {rounds} rounds, chosen on test data (as the paper does). Numbers and runs: table {sources.table.stem}.",
    )
