"""Metrics and statistics over clients: names, words, units, directions and formulas.

Engine, records, tables, report, tuning and loggers read all of this here. To add a metric, add an entry to
:data:`METRICS`; to add a statistic, add one to :data:`STATISTICS`. Importing this module loads neither torch nor NumPy.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchmark import formulas
from benchmark.counts import ClassCounts, Confidences, Counts, LossSum, ScoredBatch, SquaredErrors
from benchmark.errors import ConfigurationError
from benchmark.intervals import of_clients

if TYPE_CHECKING:  # slow to import
    import numpy as np
    from torch import Tensor

#: Client of a row of the metrics table that holds the value of all clients' images taken together.
POOLED_CLIENT = -1
#: Sets of metrics that a run can have (``data.metrics``); each holds those of the sets before it too.
SETS = ("basic", "clinical")
#: NaN for a client of which no image was scored, so that it tells who was evaluated.
EVALUATED = "accuracy"
#: The accuracy of clients that are not hostile; hostile ones have no value.
HONEST_ACCURACY = "honest_accuracy"
#: Scores by which own images are held against a stream of foreign ones. Metrics of the first have no suffix.
OOD_SCORES = ("msp", "energy", "maxlogit")
#: What happens to corrupted images, at five severities each; and what an image is called to which nothing does.
CORRUPTIONS = ("gaussian_noise", "gaussian_blur", "brightness", "contrast", "jpeg", "pixelate")
CLEAN = "clean"
#: The mean accuracy over corruptions, and how far it lies below that of the same images without one.
CORRUPTED_ACCURACY, CORRUPTED_DROP = "corrupted_accuracy", "corrupted_drop"
#: Numbers of records: far beyond what is counted or measured, and small enough to be multiplied without an overflow.
HUGE = 1e40
#: Signs of the name of a metric of the user's own.
LONGEST_NAME = 100


# --- metrics ---


@dataclass(frozen=True)
class Metric:
    """A number for each client, made of its counts, or of its images together where counts do not add up.

    Attributes:
        name: in files, options and tables.
        counts: kinds of counts that it is made of.
        of: makes its values, float64 [N], of these counts, [N, ...] each, in this order; NaN where it is not defined.
        of_images: instead of both: makes one value of n > 0 images, logits [n, C] and labels [n] in the order of
            the images, each with a prediction; NaN where it is not defined.
        of_draws: makes a value for each of some draws of such images, float64 [draws], given how often each image is in
            each draw, [draws, n]. None where ``of_images`` must be asked for each. NaN where a drawn image has no
            prediction is added by whoever asks.
        lower_is_better: direction, for the worst client, the best round and tuning.
        per_cent: people read it in per cent; files keep fractions.
        pooled: how it is made of all clients' images together: ``"images"``, the mean weighted by test images, which is
            the same number for a mean over images; ``"counts"``, of the counts summed over clients, or of all their
            images; None, it isn't.
        always_defined: every client with images has a value, and NaN says that it diverged. Otherwise NaN says "not
            defined": the client has no row in the metrics table and is left out of statistics.
        logs_worst: loggers get the worst client's value beside the average.
        first_in: the first of :data:`SETS` that has it; ``"attacked"`` for what runs with hostile clients have beside;
            ``"ood"`` for what runs with a stream of foreign images have beside, ``"corrupted"`` for what those with
            corrupted images have in the last round; None for one of a user's own (:mod:`benchmark.own_metrics`).
    """

    name: str
    counts: tuple[type[Counts], ...]
    of: Callable[..., "Tensor"] | None = None
    of_images: Callable[[ScoredBatch], float] | None = None
    of_draws: "Callable[[ScoredBatch, Tensor], Tensor] | None" = None
    lower_is_better: bool = False
    per_cent: bool = False
    pooled: Literal["images", "counts"] | None = None
    always_defined: bool = True
    logs_worst: bool = False
    first_in: Literal["basic", "clinical", "attacked", "ood", "corrupted"] | None = "basic"


def _clinical(
    name: str,
    of: "Callable[..., Tensor]",
    *more: type[Counts],
    lower_is_better: bool = False,
    per_cent: bool = False,
) -> Metric:
    """Return a metric that is made of class counts and of ``more``, and is not defined for every client."""
    return Metric(
        name,
        (*more, ClassCounts),
        of,
        lower_is_better=lower_is_better,
        per_cent=per_cent,
        pooled="counts",
        always_defined=False,
        first_in="clinical",
    )


def _ranked(name: str, of: "Callable[[ScoredBatch, Tensor], Tensor]") -> Metric:
    """Return a metric of how images are ranked, which is not defined for every client."""

    def once(images: ScoredBatch) -> float:
        return float(of(images, images.y.new_ones(1, len(images.y))))

    return Metric(name, (), of_images=once, of_draws=of, pooled="counts", always_defined=False, first_in="clinical")


def ood_name(metric: str, score: str) -> str:
    """Return what a number of :class:`benchmark.formulas.Separation` is called: ``fpr95``, ``fpr95_energy``."""
    return metric if score == OOD_SCORES[0] else f"{metric}_{score}"


def _separating(metric: str, score: str) -> Metric:
    """Return a metric of a score that tells own images from foreign ones, which is not defined for every client."""
    return Metric(
        ood_name(metric, score),
        (),
        lower_is_better=metric == "fpr95",
        per_cent=True,
        pooled="counts",
        always_defined=False,
        first_in="ood",
    )


def version_name(kind: str, severity: int) -> str:
    """Return what the accuracy on images of a kind of corruption is called: ``accuracy_jpeg_3``."""
    return f"{EVALUATED}_{kind}_{severity}"


def _on_corrupted(name: str) -> Metric:
    """Return a metric of corrupted images, which only the last round has."""
    return Metric(
        name,
        (),
        lower_is_better=name == CORRUPTED_DROP,
        per_cent=True,
        pooled="counts",
        always_defined=False,
        first_in="corrupted",
    )


#: By name, in the order in which people read them.
METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", (ClassCounts,), formulas.accuracy, per_cent=True, pooled="images", logs_worst=True),
        Metric("balanced_accuracy", (ClassCounts,), formulas.balanced_accuracy, per_cent=True),
        Metric("macro_f1", (ClassCounts,), formulas.macro_f1, per_cent=True),
        Metric("loss", (LossSum, ClassCounts), formulas.loss, lower_is_better=True),
        # The mean sensitivity over classes, TP / (TP + FN), is the balanced accuracy; here it is pooled, too.
        _clinical("sensitivity", formulas.balanced_accuracy, per_cent=True),
        _clinical("specificity", formulas.specificity, per_cent=True),
        _clinical("ppv", formulas.ppv, per_cent=True),
        _clinical("npv", formulas.npv, per_cent=True),
        _clinical("kappa", formulas.kappa),
        _clinical("mcc", formulas.mcc),
        _ranked("auroc", formulas.auroc),
        _ranked("auroc_weighted", formulas.auroc_weighted),
        _ranked("ap", formulas.average_precision),
        _clinical("ece", formulas.ece, Confidences, lower_is_better=True),
        _clinical("brier", formulas.brier, SquaredErrors, lower_is_better=True),
        Metric(HONEST_ACCURACY, (), per_cent=True, always_defined=False, first_in="attacked"),
        *(_separating(metric, score) for score in OOD_SCORES for metric in formulas.Separation._fields),
        *map(_on_corrupted, (CORRUPTED_ACCURACY, CORRUPTED_DROP)),
        *(_on_corrupted(version_name(kind, severity)) for kind in CORRUPTIONS for severity in range(1, 6)),
    )
}


def metrics_of(chosen: str) -> tuple[Metric, ...]:
    """Return the metrics of one of :data:`SETS`."""
    sets = SETS[: SETS.index(chosen) + 1]
    return tuple(metric for metric in METRICS.values() if metric.first_in in sets)


#: Metrics that are means over classes of which some may have few images, and what makes them given how many are enough.
MEANS_OVER_CLASSES = {"auroc": formulas.auroc, "ap": formulas.average_precision}


def with_support(metric: Metric, min_support: int) -> Metric:
    """Return a metric as a run with ``data.min_support`` has it: a mean over classes with enough images alone."""
    mean = MEANS_OVER_CLASSES.get(metric.name)
    if mean is None or min_support == 1:
        return metric
    return _ranked(metric.name, functools.partial(mean, min_support=min_support))


def know_metric(name: str, lower_is_better: bool) -> None:
    """Make a metric of a user's own known by its name, for tables of values that were computed elsewhere.

    Raises:
        ConfigurationError: a metric of this name has another direction, or is one of the suite's.
    """
    known = METRICS.setdefault(
        name, Metric(name, (), lower_is_better=lower_is_better, pooled="counts", always_defined=False, first_in=None)
    )
    if known.first_in is not None or known.lower_is_better != lower_is_better:
        raise ConfigurationError(
            f"two metrics are called {name!r}, and they are not the same: give one of them another name"
        )


def keep_images(metrics: Iterable[Metric]) -> bool:
    """Return whether an evaluation keeps its images with their logits, since one of these metrics is made of them."""
    return any(metric.of_images is not None for metric in metrics)


def value_of_images(metric: Metric, images: ScoredBatch) -> float:
    """Return a metric that is made of images together; NaN without any, or where one has no prediction."""
    if metric.of_images is None or not len(images.y) or (images.predictions == images.classes).any():
        return float("nan")
    return metric.of_images(images)


def lower_is_better(metric: str) -> bool:
    """Return whether less is better; False for a name that is not in :data:`METRICS`, as methods report."""
    return metric in METRICS and METRICS[metric].lower_is_better


def in_per_cent(metric: str) -> bool:
    """Return whether people read a metric in per cent; files keep fractions."""
    return metric in METRICS and METRICS[metric].per_cent


def scale_of(metric: str) -> int:
    """Return what a stored value is multiplied by for people."""
    return 100 if in_per_cent(metric) else 1


def pooled_by(metric: str, split: str) -> Literal["images", "counts"] | None:
    """Return how a metric is pooled on a split: by images only on test images, whose number per client is recorded."""
    how = METRICS[metric].pooled if metric in METRICS and split != "train" else None
    return None if how == "images" and split != "test" else how


# --- statistics over clients ---


@dataclass(frozen=True)
class Statistic:
    """A number made of one value per client.

    Attributes:
        name: in files, options and tables.
        words: as people read it, in a heading for example.
        reading: as it is explained in a sentence.
        of: makes it of the values of the clients that have one, float64 [n] with n > 0, given whether less is better;
            NaN where it is not defined. None for what is no function of these values alone: ``pooled``, and means over
            some clients (:data:`benchmark.records.client_groups.GROUPS`).
        label: heading of a table's column; by default the words.
        always: it is in the summary of every record, and a record without it is refused by ``benchmark verify``; so a
            new one is not. Others are computed for the tables that ask for them, of any run.
    """

    name: str
    words: str
    reading: str
    of: "Callable[[np.ndarray, bool], float] | None"
    label: str = ""
    always: bool = True

    @property
    def heading(self) -> str:
        """Return the heading of a table's column."""
        return self.label or self.words.capitalize()


def _worst(values: "np.ndarray", lower_is_better: bool) -> float:
    """Return the lowest value, the highest where less is better; NaN if one is NaN."""
    return float(values.max() if lower_is_better else values.min())


def _worst_decile(values: "np.ndarray", lower_is_better: bool) -> float:
    """Return the mean of the worst tenth, rounded down, at least one; NaN if one is NaN, which is never sorted away."""
    import numpy as np

    if np.isnan(values).any():
        return float("nan")
    ordered = np.sort(values)[::-1] if lower_is_better else np.sort(values)
    return float(ordered[: max(1, len(ordered) // 10)].mean())


def _std(values: "np.ndarray", lower_is_better: bool) -> float:
    """Return the standard deviation with denominator n - 1; NaN for one client."""
    return float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def _percentile(share: int) -> "Callable[[np.ndarray, bool], float]":
    """Return a function that interpolates linearly between values."""

    def of(values: "np.ndarray", lower_is_better: bool) -> float:
        import numpy as np

        return float(np.percentile(values, share))

    return of


def _gini(values: "np.ndarray", lower_is_better: bool) -> float:
    """Return the Gini coefficient, sum of |x_i - x_j| / (2 n^2 mean); NaN where the mean is not above 0."""
    import numpy as np

    ordered, n = np.sort(values), len(values)
    if not ordered.mean() > 0:
        return float("nan")
    # Sorted, x_i stands above i values and below n - 1 - i.
    return float(((2 * np.arange(n) - n + 1) * ordered).sum() / (n * n * ordered.mean()))


def _jain(values: "np.ndarray", lower_is_better: bool) -> float:
    """Return Jain's index, (sum x)^2 / (n sum x^2); NaN where all are 0."""
    squares = float((values * values).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares else float("nan")


def _interval(end: int) -> "Callable[[np.ndarray, bool], float]":
    """Return a function for an end of the interval of the mean over clients like these."""

    def of(values: "np.ndarray", lower_is_better: bool) -> float:
        return of_clients(values)[end]

    return of


#: By name, in the order in which people read them.
STATISTICS = {
    statistic.name: statistic
    for statistic in (
        Statistic("average", "average", "averaged over clients", lambda values, _: float(values.mean()), "Avg"),
        Statistic("worst", "worst client", "worst client", _worst, "Worst"),
        Statistic("worst_decile", "worst decile", "mean of the worst tenth", _worst_decile),
        Statistic("std", "spread over clients", "standard deviation over clients", _std, "Std"),
        *(
            Statistic(f"p{n}", f"{n}th percentile", f"{n}th percentile over clients", _percentile(n), always=False)
            for n in (10, 50, 90)
        ),
        Statistic(
            "gini", "Gini coefficient", "Gini coefficient over clients, 0 where all are equal", _gini, always=False
        ),
        Statistic("jain", "Jain's index", "Jain's index over clients, 1 if all are equal", _jain, always=False),
        *(
            Statistic(
                f"ci_{end}",
                f"95 % {end}",
                f"{words} end of the 95 % interval of the mean over clients",
                of,
                always=False,
            )
            for end, words, of in (("low", "lower", _interval(0)), ("high", "upper", _interval(1)))
        ),
        Statistic(
            "by_data_set",
            "mean over data sets",
            "mean over data sets, of each data set over its clients",
            None,
            always=False,
        ),
        *(
            Statistic(name, f"average of {name}", f"averaged over clients {which}", None, always=False)
            for name, which in (("trained", "that have trained"), ("untrained", "that never have"))
        ),
        *(
            Statistic(
                name,
                f"average of the third with {which} training images",
                f"averaged over the third of the clients with {which} training images",
                None,
                always=False,
            )
            for name, which in (("fewest", "the fewest"), ("medium", "neither few nor many"), ("most", "the most"))
        ),
        Statistic("pooled", "pooled", "pooled over all test images", None),
    )
}


def _share(sign: int) -> "Callable[[np.ndarray, bool], float]":
    """Return a function for the share of gains of a sign, in per cent."""
    return lambda gains, _: 100 * float((sign * gains > 0).mean())


#: Statistics of what clients gain over another method with the same seed and partition, by name, in reading order.
#: They are made of gains, float64 [n]: a client's value minus its other one, turned round where less is better, so that
#: above 0 is better off. No record holds them, as they are of two runs; tables and the report compute them.
GAINS = {
    statistic.name: statistic
    for statistic in (
        Statistic(
            "mean_gain", "mean gain", "mean gain over clients", lambda gains, _: float(gains.mean()), always=False
        ),
        Statistic(
            "lowest_gain", "lowest gain", "lowest gain of a client", lambda gains, _: float(gains.min()), always=False
        ),
        Statistic("better_off", "% better off", "share of clients that gain, in per cent", _share(1), always=False),
        Statistic("worse_off", "% worse off", "share of clients that lose, in per cent", _share(-1), always=False),
    )
}
#: Of :data:`GAINS`, those that are shares of clients, in per cent whatever the metric's unit.
SHARES = frozenset({"better_off", "worse_off"})


def gains(values: "np.ndarray", others: "np.ndarray", metric: str) -> "np.ndarray":
    """Return what clients gain, [n], without those that lack a finite value on a side.

    Args:
        values: of a metric, a client each, [clients], as it is shown.
        others: the same clients' values under another method.
        metric: its name, for its direction.
    """
    import numpy as np

    found = (others - values) if lower_is_better(metric) else (values - others)
    return found[np.isfinite(found)]


def within_clients() -> list[Statistic]:
    """Return the statistics of every summary that say how clients differ: all but average and pooled."""
    return [each for each in STATISTICS.values() if each.always and each.of is not None and each.name != "average"]


def listed_within(explained: bool = False) -> str:
    """Name the statistics of :func:`within_clients` in a sentence.

    Args:
        explained: add in brackets how each is made.
    """
    names = [each.words.removesuffix(" over clients") for each in within_clients()]
    if explained:
        readings = [each.reading for each in within_clients()]
        names = [name if name == said else f"{name} ({said})" for name, said in zip(names, readings, strict=True)]
    return f"{', '.join(names[:-1])} and {names[-1]}"
