"""Rows of a table minus a baseline, seed by seed: over all clients, those that trained, and thirds of these."""

import math
from collections.abc import Sequence

from benchmark.records.client_groups import THIRDS, groups_of
from benchmark.records.words import digits_of
from benchmark.tables.blocks import Block
from benchmark.tables.layout import Table
from benchmark.tables.lines import Line
from benchmark.tables.numbers import signed


def by_seed(lines: Sequence[Line], table: Table) -> list[Block]:
    """Return the mean differences to a baseline, a line for each row and seed, a block for each data group.

    A seed counts where both runs have one partition, a client where both have its value, and beyond ``All`` where
    neither says that it never trained. Thirds are by training images. The last column says whether the thirds of a seed
    rise or fall throughout.

    Args:
        lines: of the whole table.
        table: it, with a baseline.
    """
    import pandas as pd

    rows: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        other = next((each for each in lines if each.group is line.group and each.name == table.baseline), None)
        if other is None or other is line:
            continue
        for seed in line.runs:
            found = _differences(line, other, seed)
            if found is None:
                continue
            shown = {name: signed(value, digits_of(table.metric)) for name, value in found.items()}
            thirds = [found[name] for name in THIRDS]
            order = "rise" if sorted(thirds) == thirds else "fall" if sorted(thirds, reverse=True) == thirds else ""
            rows.setdefault(line.dataset, []).append(
                {"Method": line.name, "Seed": str(seed)}
                | {name.capitalize(): value for name, value in shown.items()}
                | {"Thirds": "" if math.isnan(sum(thirds)) else order}
            )
    return [Block(f"{name}: minus {table.baseline}, by seed", pd.DataFrame(entries)) for name, entries in rows.items()]


def _differences(line: Line, baseline: Line, seed: int) -> dict[str, float] | None:
    """Mean difference of a seed over each group of clients, NaN where it is empty; None if the runs do not compare."""
    ours, theirs = line.runs[seed], baseline.runs.get(seed)
    if theirs is None or ours.record.manifest_hash != theirs.record.manifest_hash:
        return None
    values = [a - b for a, b in zip(line.clients[seed], baseline.clients[seed], strict=True)]
    resting = {k for run in (ours, theirs) for k, trained in enumerate(run.record.trained or ()) if trained is False}
    thirds = {name: [k for group in groups_of(ours.record, ours.train_sizes, name) for k in group] for name in THIRDS}
    trained = {"trained": list(range(len(values))), **thirds}
    return {"all": _mean(values, range(len(values)))} | {
        name: _mean(values, [k for k in clients if k not in resting]) for name, clients in trained.items()
    }


def _mean(values: Sequence[float], clients: Sequence[int]) -> float:
    """The mean of the clients' values that are numbers."""
    known = [values[k] for k in clients if not math.isnan(values[k])]
    return sum(known) / len(known) if known else math.nan
