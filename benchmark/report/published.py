"""Published numbers beside a run: those of its data set, kind of partition and method, whatever its scale."""

import re
from fnmatch import fnmatchcase
from itertools import compress
from typing import TYPE_CHECKING

from benchmark.records.classes import own
from benchmark.records.grouped_runs import Run

if TYPE_CHECKING:  # slow to import
    import pandas as pd


#: Per metric of the published numbers, over what and when the papers take it, as ``results/paper/README.md`` says.
READINGS = {
    "accuracy": ("average", "last"),
    "best accuracy": ("pooled", "best_on_test"),
    "Average": ("average", "last10"),
}


def beside(run: Run, numbers: "pd.DataFrame") -> "pd.DataFrame":
    """The published averages with the run's data set, setting and method; the backbones may differ in size.

    Args:
        run: a finished one.
        numbers: from :func:`benchmark.tables.paper.read_paper`.
    """
    rows = numbers[numbers["metric"].isin(list(READINGS))]
    own = [_plain(run.dataset), _plain(run.record.dataset), _plain(run.dataset).removesuffix("10")]
    fits = [
        _plain(str(row.dataset)) in own
        and _plain(str(row.method)) in _names(run)
        and _setting_fits(run, str(row.setting))
        and _backbone_fits(run, str(row.backbone))
        for row in rows.itertuples()
    ]
    return rows.loc[list(compress(rows.index, fits))]


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _setting_fits(run: Run, setting: str) -> bool:
    pattern = own(run.get("data.partition"), "paper_setting")
    if pattern is None:
        return False
    try:
        expected = pattern.format(**run.partition[1])
    except KeyError:
        return False
    return fnmatchcase(setting.partition(";")[0].strip(), expected)


def _names(run: Run) -> list[str]:
    of_the_paper = own(run.get("model"), "paper_arguments") or {}
    if any(run.get(f"model.init_args.{name}", value) != value for name, value in of_the_paper.items()):
        return []
    return [_plain(name) for name in own(run.get("model"), "paper_names") or [run.record.method]]


def _backbone_fits(run: Run, backbone: str) -> bool:
    if own(run.get("model.init_args.clip"), "in_papers") is False:
        return False
    return ("cnn" in run.backbone.lower()) == (backbone == "CNN")
