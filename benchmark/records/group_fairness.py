"""Group fairness of a finished run: metrics of its test images by subgroup, such as a patient's sex, and their gaps."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmark.errors import ConfigurationError, no_such, printable
from benchmark.metrics import STATISTICS, lower_is_better
from benchmark.records.averaged_classes import not_alike
from benchmark.records.decision_curves import images_scored_on_test
from benchmark.records.drawn_images import values_in
from benchmark.records.predictions import confusion, images_of
from benchmark.records.stored_run import StoredRun, stored_run
from benchmark.records.subgroups import SUBGROUPS
from benchmark.records.words import POINT_WORDS, metric_number, unit_of

if TYPE_CHECKING:  # slow to import
    import pandas as pd

#: Metrics of each subgroup, with their names in tables; below them stand these statistics, as they do over clients.
MEASURED = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "ap": "AP",
    "ece": "ECE",
}
STATED = ("average", "worst", "worst_decile", "std", "gini")
#: From so many subgroups on the worst tenth is more than the worst one.
TWO_IN_A_TENTH = 20
#: Sensitivities of more classes are not shown.
MOST_CLASSES = 10
WHOLE = "all images"


class Subgroup(NamedTuple):
    """Numbers of some test images, of all clients together; None where one is not defined.

    Attributes:
        images: that there are.
        values: :data:`MEASURED` by name, ``auroc`` and ``ap`` over classes with the run's ``data.min_support``.
        support: images of each class.
        sensitivity: of each class, TP / (TP + FN).
        averaged: classes that ``auroc`` is a mean over.
    """

    images: int
    values: Mapping[str, float | None]
    support: tuple[int, ...]
    sensitivity: tuple[float | None, ...]
    averaged: tuple[int, ...]


@dataclass(frozen=True)
class GroupFairness:
    """A run's test images by the values of one column, at one point of a round.

    Attributes:
        column: of the index.
        point: of a round.
        classes: names by label.
        min_support: images of a class that a subgroup needs for its part in a gap.
        whole: all images together.
        subgroups: by value of the column, in the order of the values.
    """

    column: str
    point: str
    classes: Sequence[str]
    min_support: int
    whole: Subgroup
    subgroups: Mapping[str, Subgroup]

    def statistics(self, metric: str) -> dict[str, float | None]:
        """Return the :data:`STATED` statistics of a metric over the subgroups in which it is defined."""
        import numpy as np

        found = [value for each in self.subgroups.values() if (value := each.values[metric]) is not None]
        made = {}
        for name in STATED:
            of = STATISTICS[name].of
            made[name] = _defined(of(np.array(found), lower_is_better(metric))) if of and found else None
        return made

    @cached_property
    def gaps(self) -> tuple[float | None, ...]:
        """Equal-opportunity gap of each class: its largest minus its smallest sensitivity over the subgroups.

        None where a subgroup has no image of the class, or fewer than ``min_support``.
        """
        of_each = [zip(each.support, each.sensitivity, strict=True) for each in self.subgroups.values()]
        return tuple(map(self._gap, zip(*of_each, strict=True)))

    def _gap(self, of_class: Sequence[tuple[int, float | None]]) -> float | None:
        values = [value for support, value in of_class if value is not None and support >= self.min_support]
        return max(values) - min(values) if len(values) == len(of_class) else None

    @property
    def remarks(self) -> Iterator[str]:
        """Sentences on values that are not to be compared, or not there."""
        every = [*self.subgroups.values()]
        if said := not_alike(dict(enumerate(each.averaged for each in every)), [*self.subgroups], "groups"):
            yield said
        if undefined := [words for name, words in MEASURED.items() if any(each.values[name] is None for each in every)]:
            yield f"Statistics of {' and '.join(undefined)} are over the groups in which it is defined."
        if len(self.classes) > MOST_CLASSES:
            yield f"Sensitivities of more than {MOST_CLASSES} classes are not shown."
        elif None in self.gaps:
            least = f"fewer than {self.min_support} images" if self.min_support > 1 else "no image"
            yield f"A class of which a group has {least} has no gap."


def columns_of(run: StoredRun) -> list[str]:
    """Return the columns by which a run's images are in subgroups.

    Raises:
        ConfigurationError: the run kept none, or they are not the ones that it wrote.
    """
    return [str(name) for name in run.subgroups["column"].unique()]


def group_fairness(run: StoredRun, column: str, point: str) -> GroupFairness:
    """Compare the subgroups of a run's test images, of all clients together.

    Args:
        run: that kept its images and their subgroups.
        column: by whose values.
        point: of a round, ``"server"`` or ``"local"``.

    Raises:
        ConfigurationError: the run kept no such column, no test images at this point, or they are not the ones that it
            wrote.
    """
    if column not in (known := columns_of(run)):
        raise ConfigurationError(
            f"{run.folder}: {printable(no_such('column', column, known))}, which data.subgroups named"
        )
    rows = images_scored_on_test(run, point)
    table = run.subgroups[run.subgroups["column"] == column]
    value_of = table.set_index("image")["value"]
    values = rows["image"].map(value_of.astype("object"))
    if values.isna().any():
        raise ConfigurationError(
            f"{run.folder / SUBGROUPS} has no {column} of image {rows.loc[values.isna(), 'image'].iloc[0]}, which was "
            "scored; run it again"
        )
    there = {*values}
    groups = {str(value): rows[values == value] for value in table["value"].unique() if value in there}
    names = run.class_names(len(rows["logits"].iloc[0]))
    made = {value: _subgroup(run, images) for value, images in groups.items()}
    return GroupFairness(column, point, names, run.min_support, _subgroup(run, rows), made)


def _subgroup(run: StoredRun, rows: "pd.DataFrame") -> Subgroup:
    import numpy as np

    from benchmark.formulas import classes_in_mean

    images, matrix = images_of(rows), confusion(rows)
    once = np.ones((1, len(rows)), dtype="int32")
    values = {name: _defined(float(values_in(run.metric(name), images, once)[0])) for name in MEASURED}
    support, hits = matrix.sum(1).tolist(), matrix.diagonal().tolist()
    counted = classes_in_mean(images, run.min_support).nonzero().flatten().tolist()
    return Subgroup(
        len(rows),
        values,
        tuple(support),
        tuple(hit / count if count else None for hit, count in zip(hits, support, strict=True)),
        tuple(counted) if values["auroc"] is not None else (),
    )


def _defined(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Entry(NamedTuple):
    """An entry of a table: its text, and of how many images it is, where other entries of its row are of others."""

    text: str
    images: int | None = None


class Lines(NamedTuple):
    """A table of texts.

    Attributes:
        heads: of the columns, the first of which names the rows.
        parts: rows that belong together.
    """

    heads: list[str]
    parts: list[list[list[Entry]]]


def metric_lines(of: GroupFairness) -> Lines:
    """Return a row for each subgroup, for all images and for each statistic over subgroups; empty if not defined."""
    heads = ["", "images", "share, %", *(f"{words}{unit_of(name)}" for name, words in MEASURED.items())]
    made = []
    for name, each in _all(of):
        counted = [name, str(each.images), f"{100 * each.images / of.whole.images:.1f}"]
        made.append([*map(Entry, counted), *(_entry(each.values[metric], metric) for metric in MEASURED)])
    found = {metric: of.statistics(metric) for metric in MEASURED}
    stated = []
    for name in STATED:
        if name != "worst_decile" or len(of.subgroups) >= TWO_IN_A_TENTH:
            words = (
                STATISTICS[name]
                .words.replace(" over clients", "")
                .replace("client", "group")
                .removesuffix(" coefficient")
            )
            # A Gini coefficient is a share of the mean, and has no unit.
            numbers = [_entry(found[metric][name], "" if name == "gini" else metric) for metric in MEASURED]
            stated.append([*map(Entry, (words, "", "")), *numbers])
    return Lines(heads, [made[:-1], made[-1:], stated])


def sensitivity_lines(of: GroupFairness) -> Lines | None:
    """Return a row for each subgroup with each class's sensitivity and images, and the gaps; None for many classes."""
    if len(of.classes) > MOST_CLASSES:
        return None
    made = [
        [Entry(name), *map(_entry, each.sensitivity, repeat("sensitivity"), each.support)] for name, each in _all(of)
    ]
    gaps = [Entry("gap"), *(_entry(gap, "sensitivity") for gap in of.gaps)]
    return Lines(["sensitivity, % (images)", *of.classes], [made[:-1], made[-1:], [gaps]])


def _all(of: GroupFairness) -> list[tuple[str, Subgroup]]:
    return [*of.subgroups.items(), (WHOLE, of.whole)]


def _entry(value: float | None, metric: str, images: int | None = None) -> Entry:
    return Entry("") if value is None else Entry(metric_number(value, metric), images)


def print_subgroups(run_dir: str | Path, column: str) -> None:
    """Print metrics and sensitivities of a run's test images by subgroup, two tables for each point.

    Raises:
        ConfigurationError: as :func:`group_fairness`.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    run, console = stored_run(run_dir), Console(highlight=False, markup=False)
    for point in run.points_scored("test") or ["server"]:  # without any, it says so
        of = group_fairness(run, column, point)
        metrics = metric_lines(of)
        metrics = metrics._replace(heads=[head.replace(",", "").replace(" ", "\n") for head in metrics.heads])
        for what, lines in {"test images": metrics, "sensitivity": sensitivity_lines(of)}.items():
            if lines is None:
                continue
            title = f"{what} {POINT_WORDS[point]} by {column}"
            shown = Table(title=Text(printable(title), style="italic"))
            for number, head in enumerate(lines.heads):
                shown.add_column(Text(printable(head, kept="\n")), justify="right" if number else "left")
            for part in lines.parts:
                for row in part:
                    shown.add_row(*(Text(_printed(entry)) for entry in row))
                shown.add_section()
            console.print(shown)
        for said in of.remarks:
            console.print(Text(printable(said)))
    console.print(
        f"Images of round {int(run.predictions['round'].max())}, of all clients together: where models are personal, "
        "AUROC and AP compare probabilities of different models. The gap is the largest minus the smallest sensitivity "
        "of a class over the groups."
    )


def _printed(entry: Entry) -> str:
    return printable(entry.text) + ("" if entry.images is None else f" ({entry.images})")
