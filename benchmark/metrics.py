"""Metrics, the counts they are made of, and statistics over clients: names, words, units, directions and formulas.

Engine, records, tables, report, tuning and loggers read all of this here. To add a metric, add an entry to
:data:`METRICS`; to add a statistic, add one to :data:`STATISTICS`. Importing this module loads neither torch nor NumPy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:  # slow to import
    import numpy as np
    from torch import Tensor

#: Client of a row of the metrics table that holds the value of all clients' images taken together.
POOLED_CLIENT = -1
#: NaN for a client of which no image was scored, so that it tells who was evaluated.
EVALUATED = "accuracy"


# --- counts: sums over images, hence over batches, ranks and clients ---


@dataclass(frozen=True)
class ScoredBatch:
    """One stacked batch of logits and labels.

    Attributes:
        logits: [K, B, C].
        y: [K, B], -100 where there is no image.
    """

    logits: "Tensor"
    y: "Tensor"

    @property
    def classes(self) -> int:
        """Return the number of classes, C."""
        return self.logits.shape[-1]

    @cached_property
    def predictions(self) -> "Tensor":
        """Return the predicted classes [K, B]; C where the logits have no largest one (NaN, or infinite)."""
        return self.logits.argmax(-1).masked_fill(~self.logits.amax(-1).isfinite(), self.classes)


class Counts:
    """Numbers per client that add up over its images.

    Attributes:
        name: of the state that holds them, [N, ...].
        dtype: of the state, in torch's words.
    """

    name: ClassVar[str]
    dtype: ClassVar[str] = "int64"

    @staticmethod
    def shape(classes: int) -> tuple[int, ...]:
        """Return the shape of one client's numbers."""
        raise NotImplementedError

    @staticmethod
    def count(batch: ScoredBatch) -> "Tensor":
        """Return what a batch adds for each of its clients, [K, ...]."""
        raise NotImplementedError


class ClassCounts(Counts):
    """True positives, false positives and images of every class.

    A last class, which no image has, is predicted where there is no prediction.
    """

    name = "counts"

    @staticmethod
    def shape(classes: int) -> tuple[int, ...]:
        """Return C + 1 classes by three numbers."""
        return classes + 1, 3

    @staticmethod
    def count(batch: ScoredBatch) -> "Tensor":
        """Return true positives, false positives and images, [K, C + 1, 3]."""
        import torch
        from torchmetrics.functional.classification import multiclass_stat_scores

        from benchmark.masked import IGNORE

        scores = multiclass_stat_scores(
            batch.predictions,
            batch.y,
            num_classes=batch.classes + 1,
            average=None,
            multidim_average="samplewise",
            ignore_index=IGNORE,
            validate_args=False,
        )
        # torchmetrics gives (tp, fp, tn, fn, support); the other two follow from these.
        return torch.stack([scores[..., kind] for kind in (0, 1, 4)], -1).long()


class LossSum(Counts):
    """Sum of the cross-entropy over images."""

    name = "loss_sum"
    dtype = "float64"

    @staticmethod
    def shape(classes: int) -> tuple[int, ...]:
        """Return the shape of one number."""
        return ()

    @staticmethod
    def count(batch: ScoredBatch) -> "Tensor":
        """Return the summed cross-entropy, [K]; not finite where the logits of an image are not."""
        from torch.nn.functional import cross_entropy

        from benchmark.masked import IGNORE, at_least_float32

        logits = at_least_float32(batch.logits).flatten(0, 1)
        losses = cross_entropy(logits, batch.y.flatten(), reduction="none", ignore_index=IGNORE)
        return losses.double().view(batch.y.shape).sum(1)


# --- metrics ---


@dataclass(frozen=True)
class Metric:
    """A number for each client, made of its counts.

    Attributes:
        name: in files, options and tables.
        counts: kinds of counts that it is made of.
        of: makes its values, float64 [N], of these counts, [N, ...] each, in this order; NaN where it is not defined.
        lower_is_better: direction, for the worst client, the best round and tuning.
        per_cent: people read it in per cent; files keep fractions.
        pooled: how it is made of all clients' images together: ``"images"``, the mean weighted by test images, which is
            the same number for a mean over images; ``"counts"``, ``of`` the counts summed over clients; None, it isn't.
        always_defined: every client with images has a value, and NaN says that it diverged. Otherwise NaN says "not
            defined": the client has no row in the metrics table and is left out of statistics.
        logs_worst: loggers get the worst client's value beside the average.
    """

    name: str
    counts: tuple[type[Counts], ...]
    of: Callable[..., "Tensor"]
    lower_is_better: bool = False
    per_cent: bool = False
    pooled: Literal["images", "counts"] | None = None
    always_defined: bool = True
    logs_worst: bool = False


def _by_class(counts: "Tensor") -> "tuple[Tensor, ...]":
    """Return true positives, false positives and images of the real classes, float64 [N, C] each."""
    return counts[:, :-1].double().unbind(-1)


def _accuracy(counts: "Tensor") -> "Tensor":
    """Return the share of right predictions."""
    hits, _, support = counts[:, :-1].sum(1).unbind(-1)
    return hits.double() / support


def _balanced_accuracy(counts: "Tensor") -> "Tensor":
    """Return the mean recall over the classes that occur in the client's images."""
    hits, _, support = _by_class(counts)
    return (hits / support).where(support > 0, 0.0).sum(1) / (support > 0).sum(1)


def _macro_f1(counts: "Tensor") -> "Tensor":
    """Return the mean F1 over the classes that occur in the client's images."""
    hits, false, support = _by_class(counts)
    return (2 * hits / (hits + false + support)).where(support > 0, 0.0).sum(1) / (support > 0).sum(1)


def _loss(loss_sum: "Tensor", counts: "Tensor") -> "Tensor":
    """Return the mean cross-entropy."""
    return loss_sum / counts[:, :-1, 2].sum(1)


#: By name, in the order in which people read them.
METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", (ClassCounts,), _accuracy, per_cent=True, pooled="images", logs_worst=True),
        Metric("balanced_accuracy", (ClassCounts,), _balanced_accuracy, per_cent=True),
        Metric("macro_f1", (ClassCounts,), _macro_f1, per_cent=True),
        Metric("loss", (LossSum, ClassCounts), _loss, lower_is_better=True),
    )
}


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
            NaN where it is not defined. None for what is no function of these values (pooled).
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


#: By name, in the order in which people read them.
STATISTICS = {
    statistic.name: statistic
    for statistic in (
        Statistic("average", "average", "averaged over clients", lambda values, _: float(values.mean()), "Avg"),
        Statistic("worst", "worst client", "worst client", _worst, "Worst"),
        Statistic("worst_decile", "worst decile", "mean of the worst tenth", _worst_decile),
        Statistic("std", "spread over clients", "standard deviation over clients", _std, "Std"),
        Statistic("pooled", "pooled", "pooled over all test images", None),
    )
}


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
