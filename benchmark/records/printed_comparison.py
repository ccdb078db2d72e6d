"""``benchmark compare``: two finished runs on the same images, as they are printed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.errors import listed, printable
from benchmark.metrics import MEANS_OVER_CLASSES, Metric, lower_is_better
from benchmark.records.class_values import label_of
from benchmark.records.compared_runs import Comparison, Difference, auroc_of, chosen_metrics, compared
from benchmark.records.same_images import paired_images, same_partition, same_pixels
from benchmark.records.stored_run import StoredRun, stored_run
from benchmark.records.words import POINT_WORDS, metric_number, unit_of

if TYPE_CHECKING:  # slow to import
    import pandas as pd
    from rich.table import Table

#: Below so many columns of the terminal, columns of a table stand closer together.
NARROW = 100
#: Sentences below the tables.
DRAWN = (
    "95 % intervals of B - A by the paired bootstrap: each client's images are resampled, alike for both runs, "
    "those of a group (of a patient, say) together."
)
NO_INTERVAL = (
    "There is no interval if a value is undefined in more than a tenth of the resamples, or all have the same "
    "difference: few images, all ranked alike for example, bound nothing."
)
MCNEMAR = "McNemar's exact test compares how many images A alone and B alone is right on (A / B alone)."
DELONG = "DeLong's test of two AUROCs on the same images has the standard error (se) of their difference."
SEVERAL = "No p value is corrected for several comparisons"
PERSONAL = "Of all images together AUROC and AP compare probabilities of different models where models are personal."
ONE_CLASS = "DeLong's test is of one class's AUROC: --class NAME prints it."
PARTITIONS = "The runs' partitions are not the same (other training images, say); these images are."
PIXELS = "The images of both runs are those of one partition, but not the same pixels (another size, say)."
SPANS = (
    "Groups have images at several clients: groups of all clients are resampled for the mean and all images together."
)


def print_comparison(
    run_dirs: tuple[str | Path, str | Path],
    metrics: Sequence[str] = (),
    points: tuple[str, str] = ("server", "server"),
    split: str = "test",
    named: str | None = None,
) -> None:
    """Print the differences of two runs' metrics on the same images, a table for each metric.

    Args:
        run_dirs: of two runs that kept their images; A and B.
        metrics: names; by default accuracy, and balanced accuracy and AUROC of runs with clinical metrics.
        points: of a round, that A and B were scored at.
        split: of the images.
        named: a class, by its name or its label, whose AUROC is compared beside.

    Raises:
        ConfigurationError: the runs kept no such images, or not the same ones; or there is no such metric or class.
    """
    from rich.console import Console
    from rich.text import Text

    runs, console = (stored_run(run_dirs[0]), stored_run(run_dirs[1])), Console(highlight=False, markup=False)
    rows = paired_images(*runs, points, split)
    names = chosen_metrics(metrics, *runs, points, split)
    class_names = runs[0].class_names(len(rows[0]["logits"].iloc[0]), split)
    label = None if named is None else label_of(named, class_names, f"{runs[0].folder}")
    for letter, run, images, point in zip("AB", runs, rows, points, strict=True):
        console.print(Text(printable(f"{letter}  {run.folder}: {_words(run, images, point)}")), soft_wrap=True)
    made: list[Comparison] = []
    asked: list[tuple[Metric, int | None]] = []
    for name in names:
        of_class = 1 if name == "auroc" and len(class_names) == 2 else None  # both classes have the same AUROC
        metric = auroc_of(1) if of_class and runs[0].min_support == 1 else runs[0].metric(name)
        asked.append((metric, of_class))
    if label is not None and label not in [of_class for _, of_class in asked]:
        asked.append((auroc_of(label), label))
    for metric, of_class in asked:  # each is printed once it is made: AUROCs of many classes and images take minutes
        made.append(each := compared(rows, metric, runs[0].record.client_names, of_class))
        of = "" if each.of_class is None else f" of {class_names[each.of_class]}"
        mean = ", mean over classes" if each.metric in MEANS_OVER_CLASSES and not of else ""
        less = ", less is better" if lower_is_better(each.metric) else ""
        title = f"{split} {each.metric.replace('_', ' ')}{of}{mean}{unit_of(each.metric)}{less}"
        console.print("", Text(printable(title), style="italic"), sep="\n")
        console.print(_table(each, console.width < NARROW))
    console.print("")
    about = [PARTITIONS] * (not same_partition(*runs)) + [PIXELS] * (not same_pixels(*runs))
    for said in [*about, *_remarks(made, "auroc" in names and label is None)]:
        console.print(Text(printable(said)))


def _words(run: StoredRun, rows: "pd.DataFrame", point: str) -> str:
    best = " (best on val)" if run.keep == "best_on_val" else ""
    of = f"{run.record.method} on {run.record.dataset}, seed {run.record.seed}"
    return f"{of}, round {rows['round'].iloc[0]}{best}, {POINT_WORDS[point]}"


def _table(of: Comparison, narrow: bool) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    lines = [*of.clients, *of.over]
    tests = [line.test for line in lines if line.test is not None]
    alone = any(test.alone is not None for test in tests)
    error = any(test.error is not None for test in tests)
    p_value = any(test.p_value is not None for test in tests)
    shown = Table(box=SIMPLE_HEAD, show_edge=False, padding=0 if narrow else (0, 1, 0, 0))
    heads = ["images", "A", "B", "B - A", "95 %\nfrom", "to"]
    heads += ["A / B\nalone"] * alone + ["se"] * error + ["p"] * p_value + ["Holm's\np"] * bool(of.adjusted)
    shown.add_column("", overflow="fold")
    for head in heads:
        shown.add_column(head, justify="right", no_wrap=True)
    adjusted = [*of.adjusted, *([None] * (len(lines) - len(of.adjusted)))]
    for position, (line, holm) in enumerate(zip(lines, adjusted, strict=True)):
        if position == len(of.clients):
            shown.add_section()
        cells = [str(line.images), *_values(line, of.metric)]
        test = line.test
        if alone:
            cells.append("" if test is None or test.alone is None else "{} / {}".format(*test.alone))
        if error:
            cells.append("" if test is None or test.error is None else f"{test.error:.4f}")
        if p_value:
            cells.append(_p_value(None if test is None else test.p_value))
        if of.adjusted:
            cells.append(_p_value(holm))
        shown.add_row(Text(printable(line.of)), *cells)
    return shown


def _values(line: Difference, metric: str) -> list[str]:
    """Return both values, their difference and its interval, empty where there are none."""
    plain = ["" if value is None else metric_number(value, metric) for value in (line.first, line.second)]
    signed = [line.value, *line.interval]
    return plain + ["" if value is None or value != value else _signed(value, metric) for value in signed]


def _signed(value: float, metric: str) -> str:
    """Return a difference with its sign; zero has none."""
    said = metric_number(value, metric)
    if not float(said):
        return said.removeprefix("-")
    return said if value < 0 else f"+{said}"


def _p_value(value: float | None) -> str:
    return "" if value is None else "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _remarks(made: Sequence[Comparison], one_class: bool) -> list[str]:
    """Return sentences on how the numbers are made, and why some are missing."""
    lines = [(each, line) for each in made for line in (*each.clients, *each.over)]
    tests = [line.test for _, line in lines if line.test is not None]
    said = [DRAWN] + [SPANS] * any(each.span_clients for each in made)
    if any(line.value is not None and line.interval.low != line.interval.low for _, line in lines):
        said.append(NO_INTERVAL)
    said += [MCNEMAR] * any(test.alone is not None for test in tests)
    said += [DELONG] * any(test.error is not None for test in tests)
    for each in made:
        name = "McNemar" if each.of_class is None else "DeLong"
        by_reason: dict[str, list[str]] = {}
        for line in (*each.clients, *each.over):
            if line.test is not None and line.test.why:
                by_reason.setdefault(line.test.why, []).append(line.of)
        said += [f"No {name} test of {listed(of)}: {why}." for why, of in by_reason.items()]
        if each.unpaired:
            said.append(f"In no mean, as {each.metric} is defined in one run alone: {listed(each.unpaired)}.")
        if each.undefined:
            said.append(f"In no mean, as {each.metric} is not defined for their images: {listed(each.undefined)}.")
    if any(test.p_value is not None for test in tests):
        adjusted = "; Holm's p is, for the clients of its table" if any(each.adjusted for each in made) else ""
        said.append(f"{SEVERAL}{adjusted}.")
    if any(each.metric in {*MEANS_OVER_CLASSES, "auroc_weighted"} and len(each.over) > 1 for each in made):
        said.append(PERSONAL)
    if one_class and not any(each.of_class is not None for each in made):
        said.append(ONE_CLASS)
    return list(dict.fromkeys(said))
