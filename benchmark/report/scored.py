"""Confusion, calibration, ROC, precision-recall and decision curves of test images that a run kept, as charts' rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmark.metrics import POOLED_CLIENT
from benchmark.records.averaged_classes import averaged_classes, not_alike
from benchmark.records.group_fairness import GroupFairness, columns_of, group_fairness
from benchmark.records.grouped_runs import Run
from benchmark.records.predictions import PREDICTIONS, by_class, confusion, images_of
from benchmark.records.stored_run import StoredRun, stored_run
from benchmark.records.subgroups import SUBGROUPS
from benchmark.records.words import POINT_WORDS

if TYPE_CHECKING:  # slow to import
    import pandas as pd

    from benchmark.counts import ScoredBatch

#: A curve with more corners is shown with so many of them.
MOST_CORNERS = 100
#: Of more classes, the curves of single ones are shown of all clients together alone: a client has few images of each.
MOST_CLASSES_BY_CLIENT = 20
#: Stands for the mean over classes, where a class is chosen.
MEAN = -1
#: Place of the threshold .5 among those of a decision curve.
HALF = 9
DIGITS = 4

Curve = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Scored:
    """Test images of a run's last evaluation, or of the one that it keeps, at one point of a round.

    A row is of one client (-1: all together) and holds lists of equal length, an entry a mark.

    Attributes:
        label: the experiment, its seed and the point, in a reader's words.
        clients: names of those that have images, by their number.
        classes: names by label.
        confusion: ``label``, ``predicted`` (the number of classes: no prediction) and ``images`` of pairs that occur.
        reliability: ``bin``, ``images``, ``confidence`` and ``accuracy`` of the bins of the calibration error in which
            there are images; ``said`` is the error.
        ranks: a sentence where AUROCs do not rank the clients, as they are means over different classes; else empty.
        roc: ``x`` (false positive rate) and ``y`` (true positive rate) of the curve of class ``of`` against the rest,
            -1 for the mean over classes; ``said`` is the area under it.
        precision_recall: likewise, ``x`` recall and ``y`` precision; a precision reaches from the recall before to its
            own.
        decision: likewise, ``x`` threshold, ``y`` net benefit of the model and ``every`` that of acting on every image;
            -1 for the mean over the classes that occur. ``said`` is the net benefit at a half.
        subgroups: compared by each column that the run kept.
    """

    label: str
    clients: Mapping[int, str]
    classes: Sequence[str]
    confusion: Sequence[dict[str, Any]]
    reliability: Sequence[dict[str, Any]]
    roc: Sequence[dict[str, Any]]
    precision_recall: Sequence[dict[str, Any]]
    decision: Sequence[dict[str, Any]]
    ranks: str = ""
    subgroups: Sequence[GroupFairness] = ()

    @property
    def first(self) -> int:
        """Return the class whose curve is shown first: the mean, of two classes the second, which is the positive."""
        return 1 if len(self.classes) == 2 else MEAN


def scored_images(name: str, run: Run) -> list[Scored]:
    """Return the images that a run kept, by the points of a round; nothing of a run that kept none.

    Runs whose clients distinguish different numbers of classes have no table of all of them, and are left out.

    Args:
        name: of the experiment.
        run: one of its runs.

    Raises:
        ConfigurationError: the kept images are not the ones that the run wrote, or not of its clients and classes.
    """
    if not stored_run(run.folder).has(PREDICTIONS):
        return []
    stored = StoredRun(run.folder)  # not kept in memory, as other runs' files are
    by_point = {point: stored.scored(point, "test") for point in stored.points_scored("test")}
    sizes = {len(row) for rows in by_point.values() for row in rows["logits"]}
    if len(sizes) != 1:
        return []
    classes = stored_run(run.folder).class_names(sizes.pop())
    found = []
    for point, rows in by_point.items():
        label = f"{name}, seed {run.record.seed}, {POINT_WORDS[point]}"
        label += f", round {rows['round'].iloc[0]} (best on val)" if stored.keep == "best_on_val" else ""
        columns = columns_of(stored) if stored.has(SUBGROUPS) else []
        subgroups = [group_fairness(stored, column, point) for column in columns]
        found.append(_scored(label, rows, run.record.client_names, classes, stored.min_support, subgroups))
    return found


def _scored(
    label: str,
    rows: "pd.DataFrame",
    names: Sequence[str],
    classes: Sequence[str],
    min_support: int,
    subgroups: Sequence[GroupFairness],
) -> Scored:
    charts = ("confusion", "reliability", "roc", "precision_recall", "decision")
    made: dict[str, list[dict[str, Any]]] = {chart: [] for chart in charts}
    by_client = {client: rows[rows["client"] == client] for client in sorted({*rows["client"]})}
    for client, own in {POOLED_CLIENT: rows, **by_client}.items():
        images = images_of(own)
        made["confusion"].append({"client": client, **_pairs(confusion(own))})
        made["reliability"].append({"client": client, **_bins(images)})
        every_class = client == POOLED_CLIENT or len(classes) <= MOST_CLASSES_BY_CLIENT
        for of, said, roc, steps in _curves(images, min_support):
            if of == MEAN or every_class:
                chosen = {"client": client, "of": of}
                made["roc"].append({**chosen, "said": said[0], **_corners(roc, roc[0] + roc[1])})
                made["precision_recall"].append({**chosen, "said": said[1], **_corners(steps, steps[0])})
        made["decision"] += [
            {"client": client, **row} for row in _decisions(images) if row["of"] == MEAN or every_class
        ]
    ((_, averaged),) = averaged_classes(by_class(rows), min_support).items()
    shown = {client: names[client] for client in by_client}
    ranks = not_alike(averaged, names)
    return Scored(label, shown, classes, **made, ranks=ranks, subgroups=subgroups)


def _pairs(counts: np.ndarray) -> dict[str, list[int]]:
    """Return what occurs of a confusion matrix [C, C + 1]."""
    label, predicted = counts.nonzero()
    made = {"label": label, "predicted": predicted, "images": counts[label, predicted]}
    return {name: values.tolist() for name, values in made.items()}


def _bins(images: "ScoredBatch") -> dict[str, Any]:
    """Return the bins of the calibration error, and the error, of a client's images."""
    from benchmark.counts import CONFIDENCE_UNITS, Confidences, ScoredBatch

    batch = ScoredBatch(images.logits.unsqueeze(0), images.y.unsqueeze(0))
    there, right, units = Confidences.count(batch)[0].numpy().T
    confidence, bins = units / CONFIDENCE_UNITS, there.nonzero()[0]
    told = "ECE not defined: an image has no prediction"
    if there.sum() == len(images.y):
        told = f"ECE {np.abs(right - confidence).sum() / len(images.y):.3f}"
    return {
        "bin": bins.tolist(),
        "images": there[bins].tolist(),
        "confidence": _rounded(confidence[bins] / there[bins]),
        "accuracy": _rounded(right[bins] / there[bins]),
        "said": f"{told}, {_images(len(images.y))}",
    }


def _curves(images: "ScoredBatch", min_support: int) -> Iterator[tuple[int, tuple[str, str], Curve, Curve]]:
    """Yield class, areas in words, ROC curve and precision by recall: of each class with images and without, the mean.

    There is none where an image has no prediction, as its probabilities are not known, and no mean over two classes,
    whose curves are of the same images. The mean is over classes of which, and beside which, there are ``min_support``
    images.
    """
    import torch
    from sklearn.metrics import precision_recall_curve, roc_curve

    from benchmark.formulas import classes_in_mean, ranked_classes

    if (images.predictions == images.classes).any():
        return
    ranked = ranked_classes(images, torch.ones(1, len(images.y)))
    areas = [ranked.auroc[0].numpy(), ranked.ap[0].numpy()]
    probabilities, labels = images.probabilities.numpy(), images.y.numpy()
    enough = classes_in_mean(images, min_support).tolist()
    rocs, steps = [], []
    for of in np.isfinite(areas[0]).nonzero()[0].tolist():
        own = labels == of
        false, true, _ = roc_curve(own, probabilities[:, of])
        precision, recall, _ = (each[::-1] for each in precision_recall_curve(own, probabilities[:, of]))
        kept = np.diff(recall, prepend=0) > 0
        curves = (false, true), _from_zero(recall[kept], precision[kept])
        if enough[of]:
            rocs.append(curves[0])
            steps.append(curves[1])
        yield of, _said(areas, of, f"{own.sum()} of {_images(len(own))}"), *curves
    if rocs and images.classes > 2:
        of_mean = [np.mean(area[enough], keepdims=True) for area in areas]
        classes = f"mean over {len(rocs)} of {images.classes} classes"
        yield MEAN, _said(of_mean, 0, classes), _mean_roc(rocs), _mean_steps(steps)


def _decisions(images: "ScoredBatch") -> Iterator[dict[str, Any]]:
    """Yield the decision curve of each class that occurs and, of more than two classes, the mean over those."""
    from benchmark.formulas import THRESHOLDS, net_benefit

    def row(of: int, curves: np.ndarray, told: str) -> dict[str, Any]:
        model, every = map(_rounded, curves)
        said = f"{model[HALF]:.3f} at {THRESHOLDS[HALF]}, {told}"
        return {"of": of, "said": said, "x": list(THRESHOLDS), "y": model, "every": every}

    there = images.y.unique().tolist()
    found = [np.stack([each.numpy() for each in net_benefit(images, of)]) for of in there]
    for of, curves in zip(there, found, strict=True):
        yield row(of, curves, f"{int((images.y == of).sum())} of {_images(len(images.y))}")
    if images.classes > 2:
        yield row(MEAN, np.mean(found, axis=0), f"mean over {len(there)} of {images.classes} classes")


def _said(areas: Sequence[np.ndarray], place: int, of: str) -> tuple[str, str]:
    roc, precision = (float(area[place]) for area in areas)
    return f"AUROC {roc:.3f}, {of}", f"AP {precision:.3f}, {of}"


def _images(count: int) -> str:
    return f"{count:,} image{'s' * (count != 1)}"


def _mean_roc(curves: Sequence[Curve]) -> Curve:
    """Return the mean true positive rate of curves by the false positive rate; the area under it is their mean area.

    A curve goes up at some rates: there the mean has two corners, one below the other.
    """
    x = np.unique(np.concatenate([curve[0] for curve in curves]))
    # Of several corners at one x, interp takes the last: of a curve that is read from behind, the lowest.
    low = np.mean([np.interp(-x, -a[::-1], b[::-1]) for a, b in curves], axis=0)
    high = np.mean([np.interp(x, a, b) for a, b in curves], axis=0)
    twice = np.repeat(x, 2), np.stack([low, high], axis=1).ravel()
    kept = np.stack([low < high, np.ones(len(x), dtype=bool)], axis=1).ravel()
    return twice[0][kept], twice[1][kept]


def _mean_steps(curves: Sequence[Curve]) -> Curve:
    """Return the mean precision of curves by recall, each a flight of steps; the area under it is their mean area."""
    x = np.unique(np.concatenate([curve[0][1:] for curve in curves]))
    return _from_zero(x, np.mean([b[1:][np.searchsorted(a[1:], x)] for a, b in curves], axis=0))


def _from_zero(recall: np.ndarray, precision: np.ndarray) -> Curve:
    return np.concatenate([[0.0], recall]), np.concatenate([precision[:1], precision])


def _corners(curve: Curve, along: np.ndarray) -> dict[str, list[float]]:
    """Return a curve's corners, of many those nearest behind equal steps of ``along``, which ascends with them."""
    places = np.arange(len(along))
    if len(along) > MOST_CORNERS:
        places = np.unique(np.searchsorted(along, np.linspace(along[0], along[-1], MOST_CORNERS)))
    return {"x": _rounded(curve[0][places]), "y": _rounded(curve[1][places])}


def _rounded(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.round(values, DIGITS)]
