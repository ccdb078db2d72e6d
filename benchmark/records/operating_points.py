"""Operating points of a finished run of two classes: a threshold that is chosen on val images, applied to test images.

The threshold has the largest Youden index, sensitivity + specificity - 1 (Youden, Cancer 1950).
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmark.errors import ConfigurationError, printable
from benchmark.intervals import Interval, of_share
from benchmark.metrics import POOLED_CLIENT
from benchmark.records.calibration import points_with_both, val_and_test
from benchmark.records.class_values import label_of
from benchmark.records.predictions import images_of
from benchmark.records.stored_run import StoredRun, stored_run
from benchmark.records.words import POINT_WORDS, metric_number

if TYPE_CHECKING:  # slow to import
    import pandas as pd
    from torch import Tensor

    from benchmark.counts import ScoredBatch

#: Names of the rates in tables.
RATES = {"sensitivity": "sensitivity", "specificity": "specificity", "ppv": "PPV", "npv": "NPV"}


class Rate(NamedTuple):
    """A share of images."""

    right: int
    images: int

    @property
    def value(self) -> float | None:
        """Return it; None without images."""
        return self.right / self.images if self.images else None

    @property
    def interval(self) -> Interval:
        """Return its Wilson interval of 95 %; NaN without images."""
        return of_share(self.right, self.images)


class OperatingPoint(NamedTuple):
    """The rates of one client's test images, or of all clients' together, by prediction and by a threshold.

    Attributes:
        val_images: that the threshold is chosen on.
        threshold: of the probability of the positive class, from which on an image is positive; None where the images
            of ``val`` are of one class, or one of them has no prediction.
        predicted: :data:`RATES` by name, positive as predicted.
        chosen: likewise, positive from the threshold on; empty without one.
    """

    val_images: int
    threshold: float | None
    predicted: dict[str, Rate]
    chosen: dict[str, Rate]


def youden_threshold(images: "ScoredBatch", of: int) -> float | None:
    """Return the probability of these images with the largest Youden index, the largest of equal ones.

    Args:
        images: logits [n, 2], labels [n]; those that give the positive class at least the threshold count as positive.
        of: the positive class.

    Returns:
        None where all are of one class, or one has no prediction.
    """
    import torch

    positive = images.y == of
    if positive.all() or not positive.any() or (images.predictions == images.classes).any():
        return None
    scores, order = images.probabilities[:, of].sort(descending=True)
    last = torch.cat([scores.diff() != 0, torch.ones(1, dtype=torch.bool)])  # of equal probabilities
    hits, false = (kind[order].cumsum(0)[last] for kind in (positive, ~positive))
    # Times both numbers of images, so that it is whole, and equal indices are equal; the first of them is taken.
    index = hits * int((~positive).sum()) - false * int(positive.sum())
    return float(scores[last][index == index.max()][0])


def rates(positive: "Tensor", called: "Tensor") -> dict[str, Rate]:
    """Return the :data:`RATES` of images, given which are positive and which are called so, bool [n] each."""
    counted = {
        "sensitivity": (called, positive),
        "specificity": (~called, ~positive),
        "ppv": (positive, called),
        "npv": (~positive, ~called),
    }
    return {name: Rate(int((right & among).sum()), int(among.sum())) for name, (right, among) in counted.items()}


def operating_points(run: StoredRun, of: int, point: str) -> dict[int, OperatingPoint]:
    """Return the operating point of each client by its own threshold, and of all images by one of them all (-1).

    Thresholds are chosen on the images of the split ``val``, which are held out of training, and never on test images.
    An image without a prediction is not called positive.

    Args:
        run: of two classes, that kept its images.
        of: the positive class, 0 or 1.
        point: of a round, ``"server"`` or ``"local"``.

    Raises:
        ConfigurationError: the run has not two classes, kept no images of ``val`` or none of ``test`` at this point, or
            they are not the ones that it wrote.
    """
    splits = val_and_test(run, point, "a threshold is chosen")
    classes = {len(row) for rows in splits for row in rows["logits"]}
    if classes != {2}:
        raise ConfigurationError(
            f"{run.folder} has {' and '.join(map(str, sorted(classes)))} classes; an operating point is of two"
        )
    clients = sorted({int(client) for client in splits[1]["client"]})
    made = {POOLED_CLIENT: _point(of, *splits)}
    return made | {client: _point(of, *(rows[rows["client"] == client] for rows in splits)) for client in clients}


def _point(of: int, val: "pd.DataFrame", test: "pd.DataFrame") -> OperatingPoint:
    threshold = youden_threshold(images_of(val), of) if len(val) else None
    images = images_of(test)
    positive = images.y == of
    chosen = {} if threshold is None else rates(positive, images.probabilities[:, of] >= threshold)
    return OperatingPoint(len(val), threshold, rates(positive, images.predictions == of), chosen)


def print_youden(run_dir: str | Path, named: str) -> None:
    """Print rates of a run's test images by prediction and by the threshold chosen on val, a table for each point.

    Args:
        run_dir: of a run of two classes that kept its images.
        named: the positive class, by its name or its label.

    Raises:
        ConfigurationError: as :func:`operating_points`; or the run has no such class.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    run, console = stored_run(run_dir), Console(highlight=False, markup=False)
    places = points_with_both(run)
    # of a run of other than two classes, its own classes are named before it is refused
    names = run.class_names(len(run.predictions["logits"].iloc[0]) if places else 2)
    for place in places or ["server"]:  # without any, it says what is missing
        positive = label_of(named, names, f"{run.folder}")
        of = operating_points(run, positive, place)[POOLED_CLIENT]
        if of.threshold is None:
            console.print(f"No threshold {POINT_WORDS[place]}: val images are of one class, or one has no prediction.")
            continue
        title = Text(
            printable(f"{names[positive]} as the positive class, test images {POINT_WORDS[place]}"), style="italic"
        )
        shown = Table("positive", "", "images", "%", "95 % from", "to", title=title)
        for how, found in {"as predicted": of.predicted, f"from {of.threshold:.4f} on": of.chosen}.items():
            for rate, share in found.items():
                ends = ["" if math.isnan(end) else metric_number(end, rate) for end in share.interval]
                value = "" if share.value is None else metric_number(share.value, rate)
                shown.add_row(how, RATES[rate], str(share.images), value, *ends)
                how = ""
            shown.add_section()
        console.print(shown)
        console.print(
            f"The threshold has the largest sensitivity + specificity - 1 on {of.val_images} val images, held out of "
            "training, and was never chosen on test images. All clients' images together: where models are personal, "
            "this compares probabilities of different models."
        )
