"""Formulas of metrics: of counts per client, or of a client's images where counts do not add up.

A formula of counts takes them as [N, ...] and returns float64 [N], NaN where it is not defined; one of images returns a
value for each draw of them. Importing this module loads neither torch nor NumPy.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from benchmark.counts import CONFIDENCE_UNITS, ERROR_UNITS, ScoredBatch

if TYPE_CHECKING:  # slow to import
    import numpy as np
    from torch import Tensor

_Counts = TypeVar("_Counts", "Tensor", "np.ndarray[Any, Any]")


def _by_class(counts: "Tensor") -> "tuple[Tensor, ...]":
    """Return true positives, false positives and images of the real classes, float64 [N, C] each."""
    return counts[:, :-1].double().unbind(-1)


def _mean_where_defined(part: "Tensor", of: "Tensor") -> "Tensor":
    """Return the mean of ``part / of`` over the classes in which ``of`` is not 0, [N]; NaN where it is in all."""
    return (part / of).where(of > 0, 0.0).sum(1) / (of > 0).sum(1)


def accuracy(counts: "Tensor") -> "Tensor":
    """Return the share of right predictions."""
    hits, _, support = counts[:, :-1].sum(1).unbind(-1)
    return hits.double() / support


def balanced_accuracy(counts: "Tensor") -> "Tensor":
    """Return the mean recall over the classes that occur in the client's images."""
    hits, _, support = _by_class(counts)
    return _mean_where_defined(hits, support)


def macro_f1(counts: "Tensor") -> "Tensor":
    """Return the mean F1 over the classes that occur in the client's images."""
    hits, false, support = _by_class(counts)
    return (2 * hits / (hits + false + support)).where(support > 0, 0.0).sum(1) / (support > 0).sum(1)


def loss(loss_sum: "Tensor", counts: "Tensor") -> "Tensor":
    """Return the mean cross-entropy."""
    return loss_sum / counts[:, :-1, 2].sum(1)


def _rates(counts: "Tensor") -> "tuple[Tensor, ...]":
    """Return true and false positives, false and true negatives of each class, float64 [N, C] each."""
    hits, false, support = _by_class(counts)
    missed = support - hits
    return hits, false, missed, support.sum(1, keepdim=True) - hits - false - missed


def specificity(counts: "Tensor") -> "Tensor":
    """Return the mean over classes of TN / (TN + FP), where another class occurs."""
    _, false, _, rest = _rates(counts)
    return _mean_where_defined(rest, rest + false)


def ppv(counts: "Tensor") -> "Tensor":
    """Return the mean over classes of TP / (TP + FP), the precision, where the class was predicted."""
    hits, false, _, _ = _rates(counts)
    return _mean_where_defined(hits, hits + false)


def npv(counts: "Tensor") -> "Tensor":
    """Return the mean over classes of TN / (TN + FN), where the class was not predicted of every image."""
    _, _, missed, rest = _rates(counts)
    return _mean_where_defined(rest, rest + missed)


def _margins(counts: "Tensor") -> "tuple[Tensor, Tensor, Tensor, Tensor]":
    """Return right predictions [N] and images [N], and images by true and by predicted class [N, C + 1].

    Without a prediction counts as a class of its own that nothing is of.
    """
    hits, false, support = counts.double().unbind(-1)
    return hits.sum(1), support.sum(1), support, hits + false


def kappa(counts: "Tensor") -> "Tensor":
    """Return Cohen's kappa, (p_o - p_e) / (1 - p_e); NaN where p_e is 1."""
    right, images, true, predicted = _margins(counts)
    expected = (true * predicted).sum(1)  # times the square of the images, so that it is whole
    square = images.square()
    return ((right * images - expected) / (square - expected)).where(square > expected, float("nan"))


def mcc(counts: "Tensor") -> "Tensor":
    """Return Matthews' coefficient for several classes (Gorodkin's R_K); NaN where one class is all there is."""
    right, images, true, predicted = _margins(counts)
    spread = (images.square() - true.square().sum(1)) * (images.square() - predicted.square().sum(1))
    made = (right * images - (true * predicted).sum(1)) / spread.sqrt()
    return made.where(spread > 0, float("nan"))


def _all_predicted(values: "Tensor", counts: "Tensor") -> "Tensor":
    """Return values, NaN for a client without images, or of which an image has no prediction."""
    images = counts[:, :-1, 2].sum(1)
    return values.where((images > 0) & (counts[:, -1, 1] == 0), float("nan"))


def brier(squared_errors: "Tensor", counts: "Tensor") -> "Tensor":
    """Return the mean over images of the squared distance of their probabilities from the label's, 0 to 2."""
    return _all_predicted(squared_errors.double() / ERROR_UNITS / counts[:, :-1, 2].sum(1), counts)


def ece(confidences: "Tensor", counts: "Tensor") -> "Tensor":
    """Return the expected calibration error: mean distance of confidence and accuracy over 15 bins, by images."""
    images, right, sums = confidences.double().unbind(-1)
    apart = (right - sums / CONFIDENCE_UNITS).abs().sum(1)
    return _all_predicted(apart / images.sum(1), counts)


class RankedClasses(NamedTuple):
    """Areas under the curves of each class against the rest, for some draws of images.

    NaN where a class has all images of a draw or none.

    Attributes:
        auroc: area under the ROC curve; ties count half. [draws, C].
        ap: average precision over distinct probabilities, without interpolation. [draws, C].
        support: images of each class, [draws, C].
    """

    auroc: "Tensor"
    ap: "Tensor"
    support: "Tensor"


def ranked_classes(images: ScoredBatch, times: "Tensor", only: int | None = None) -> RankedClasses:
    """Rank images by the probability of each class.

    torchmetrics and scikit-learn have both numbers for one draw alone: a thousand draws of a hundred images would take
    a minute.

    Args:
        images: logits [n, C], labels [n].
        times: how often each image is in each draw, [draws, n].
        only: the class to rank by; those of others are NaN then. None ranks by all.
    """
    import torch

    weights = times.double()
    auroc, ap = (torch.full((len(times), images.classes), float("nan"), dtype=torch.float64) for _ in range(2))
    support = torch.zeros(len(times), images.classes, dtype=torch.float64)
    for each in images.y.unique().tolist() if only is None else [only]:
        scores, order = images.probabilities[:, each].sort(descending=True)
        last = torch.cat([scores.diff() != 0, torch.tensor([True])])  # of the images with equal probabilities
        own, drawn = images.y[order] == each, weights[:, order]
        right, wrong = ((drawn * kind).cumsum(1)[:, last] for kind in (own, ~own))
        hits, false = (counts.diff(dim=1, prepend=torch.zeros(len(times), 1)) for counts in (right, wrong))
        positives, negatives = right[:, -1], wrong[:, -1]
        defined = (positives > 0) & (negatives > 0)
        area = (false * (right - hits / 2)).sum(1) / (positives * negatives)
        precision = (right / (right + wrong)).nan_to_num(0.0)
        auroc[:, each] = area.where(defined, float("nan"))
        ap[:, each] = ((hits * precision).sum(1) / positives).where(defined, float("nan"))
        support[:, each] = positives
    return RankedClasses(auroc, ap, support)


def with_enough_images(support: "_Counts", min_support: int) -> "_Counts":
    """Return which classes a mean over classes is of, bool [C]; of two classes the second at most.

    Of each there are at least ``min_support`` images, and as many of other classes: with fewer, one image moves the
    area by much, and yet the class counts as much as the others.

    Args:
        support: images of each class, whole numbers [C], a tensor or an array.
        min_support: at least 1.
    """
    chosen = (support >= min_support) & (support.sum() - support >= min_support)
    if len(support) == 2:
        chosen[0] = False
    return chosen


def classes_in_mean(images: ScoredBatch, min_support: int) -> "Tensor":
    """Return which classes a mean over classes of these images is of (:func:`with_enough_images`), bool [C]."""
    return with_enough_images(images.y.bincount(minlength=images.classes), min_support)


def _mean_over_classes(values: "Tensor", images: ScoredBatch, min_support: int) -> "Tensor":
    """Return the mean over classes with enough images where it is defined, [draws]; of two classes the second's value.

    The means of torchmetrics count a class without images as 0.
    """
    return values.where(classes_in_mean(images, min_support), float("nan")).nanmean(1)


def auroc(images: ScoredBatch, times: "Tensor", min_support: int = 1) -> "Tensor":
    """Return the area under the ROC curve of one class against the rest, mean over classes, [draws].

    Args:
        images: logits [n, C], labels [n].
        times: how often each image is in each draw, [draws, n].
        min_support: a class is left out of the mean if it has fewer images, or if all other classes together have.
            The images themselves are counted, not those of a draw, so that all draws are means over the same classes;
            a draw without an image of a class leaves it out as well.
    """
    return _mean_over_classes(ranked_classes(images, times).auroc, images, min_support)


def auroc_weighted(images: ScoredBatch, times: "Tensor") -> "Tensor":
    """Return the area under the ROC curve of one class against the rest, mean weighted by images, [draws].

    No class is left out for having few images, whatever the run's ``min_support``: its weight is small, too.
    """
    ranked = ranked_classes(images, times)
    weights = ranked.support.where(ranked.auroc.isfinite(), 0.0)
    return (ranked.auroc.nan_to_num(0.0) * weights).sum(1) / weights.sum(1)


class Separation(NamedTuple):
    """Measure how well scores tell a client's own images, the positive ones, from foreign ones.

    Attributes:
        ood_auroc: share of pairs in which the own image has the higher score; ties count half.
        fpr95: share of foreign images that pass at the highest score that 95 % of the own images reach.
        aupr_in: average precision with own images as positive ones and high scores first, without interpolation.
        aupr_out: the same with foreign images as positive ones and low scores first.
    """

    ood_auroc: float
    fpr95: float
    aupr_in: float
    aupr_out: float


def in_distribution_scores(logits: "Tensor") -> "dict[str, Tensor]":
    """Return by name how much an image looks as if it were of the known classes, float64 [...]; high: it does.

    ``msp`` is the largest probability (Hendrycks and Gimpel, ICLR 2017), ``energy`` the negative free energy
    ``logsumexp(logits)`` at temperature 1 (Liu et al., NeurIPS 2020), ``maxlogit`` the largest logit (Hendrycks et al.,
    ICML 2022).

    Args:
        logits: [..., C]; where they have no finite largest one, all scores are NaN.
    """
    from benchmark.masked import at_least_float32

    exact = at_least_float32(logits).double()
    largest, energy = exact.amax(-1), exact.logsumexp(-1)
    made = {"msp": (largest - energy).exp(), "energy": energy, "maxlogit": largest}
    return {name: score.masked_fill(~largest.isfinite(), float("nan")) for name, score in made.items()}


def separation(own: "Tensor", foreign: "Tensor") -> Separation:
    """Hold the scores of own images, [n], against those of foreign ones, [m]; NaN without either, or where one is NaN.

    All four numbers depend on the scores alone, not on the order of the images.
    """
    import torch

    scores = torch.cat([own, foreign])
    if not len(own) or not len(foreign) or scores.isnan().any():
        return Separation(*[float("nan")] * 4)
    ordered, order = scores.sort(descending=True)
    last = torch.cat([ordered.diff() != 0, torch.ones(1, dtype=torch.bool, device=scores.device)])  # of equal scores
    kind = order < len(own)
    # Images with at least each distinct score, and with just that one.
    right, wrong = (of.cumsum(0)[last].double() for of in (kind, ~kind))
    hits, false = (above.diff(prepend=above.new_zeros(1)) for above in (right, wrong))
    rest, below = len(own) - right + hits, len(foreign) - wrong + false
    reached = int((100 * right >= 95 * len(own)).int().argmax())
    return Separation(
        float((false * (right - hits / 2)).sum() / (len(own) * len(foreign))),
        float(wrong[reached] / len(foreign)),
        float((hits * right / (right + wrong)).sum() / len(own)),
        float((false * below / (below + rest)).sum() / len(foreign)),
    )


def average_precision(images: ScoredBatch, times: "Tensor", min_support: int = 1) -> "Tensor":
    """Return the average precision of one class against the rest, mean over classes, [draws]; as :func:`auroc`."""
    return _mean_over_classes(ranked_classes(images, times).ap, images, min_support)


#: Of a decision curve: probabilities from which an image counts as positive.
THRESHOLDS = tuple(n / 20 for n in range(1, 20))


def net_benefit(images: ScoredBatch, of: int, thresholds: Sequence[float] = THRESHOLDS) -> "tuple[Tensor, Tensor]":
    """Return the net benefit of acting on a class, TP / n - FP / n * t / (1 - t) (Vickers and Elkin, MDM 2006).

    At a threshold t one missed image is worth (1 - t) / t images that are acted on in vain. To act on none has the net
    benefit 0. An image without a prediction is not acted on by the model.

    Args:
        images: logits [n, C], labels [n]; n > 0.
        of: the class.
        thresholds: t, above 0 and below 1; the model acts on an image if the class has at least this probability.

    Returns:
        Of acting as the model says, and of acting on every image, float64 [thresholds] each.
    """
    import torch

    at = torch.tensor(thresholds, dtype=torch.float64)
    own = (images.y == of).unsqueeze(1)

    def benefit(acted: "Tensor") -> "Tensor":
        hits, false = ((acted & kind).double().mean(0) for kind in (own, ~own))
        return hits - false * at / (1 - at)

    model = images.probabilities[:, of].unsqueeze(1) >= at
    return benefit(model), benefit(torch.ones_like(model))
