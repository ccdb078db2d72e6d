"""Temperatures of a finished run, fitted on held-out training images, and the calibration of its test images by them.

Temperature scaling divides logits by one number (Guo et al., ICML 2017). It changes probabilities and no prediction.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmark.errors import ConfigurationError, printable
from benchmark.metrics import METRICS, POOLED_CLIENT
from benchmark.records.drawn_images import values_in
from benchmark.records.predictions import PREDICTIONS, images_of
from benchmark.records.stored_run import StoredRun, stored_run
from benchmark.records.words import POINT_WORDS, metric_number

if TYPE_CHECKING:  # slow to import
    import pandas as pd

    from benchmark.counts import ScoredBatch

#: Between which logarithms a temperature is looked for, and how close to the least loss.
BOUNDS, CLOSE = (-4.0, 4.0), 1e-8
#: Metrics that a temperature changes.
MEASURED = ("ece", "loss", "brier")
POOLED = "all images together"
NO_VAL = "give --data.val_fraction=0.1, and --data.metrics=clinical or --data.keep_predictions=last"


class Temperature(NamedTuple):
    """A fitted temperature.

    Attributes:
        value: what logits are divided by.
        at_bound: the loss still falls at an end of the range, or is flat there: no temperature in it is the best one.
    """

    value: float
    at_bound: bool


@dataclass(frozen=True)
class Calibration:
    """The calibration of one client's test images, or of all clients' together, with and without a temperature.

    Attributes:
        val_images: that the temperature was fitted on.
        test_images: that are measured.
        temperature: None where there are no val images, or one of them has no prediction.
        before: :data:`MEASURED` by name, of the logits as they are; None where it is not defined.
        after: likewise, of the logits divided by the temperature.
    """

    val_images: int
    test_images: int
    temperature: Temperature | None
    before: Mapping[str, float | None]
    after: Mapping[str, float | None]


def fit_temperature(images: "ScoredBatch") -> Temperature | None:
    """Return the temperature of the least mean cross-entropy of some images, found over its logarithm (bounded Brent).

    The loss is convex in 1 / T, so it has one valley over log T. If all images are right, by however little, it falls
    down to the lower bound; if the right class is on average below the others' mean, up to the upper one.

    Args:
        images: logits [n, C], labels [n].

    Returns:
        None without images, or where one has no prediction.
    """
    from scipy.optimize import minimize_scalar

    if not len(images.y) or (images.predictions == images.classes).any():
        return None
    logits = images.logits.double()
    away = logits - logits.gather(1, images.y.unsqueeze(1))

    def loss(log: float) -> float:
        return float((away / math.exp(log)).logsumexp(1).mean())

    found = minimize_scalar(loss, bounds=BOUNDS, method="bounded", options={"xatol": CLOSE})
    bound = min(BOUNDS, key=loss)
    at_bound = loss(bound) <= loss(float(found.x))  # equal: so little is left that float64 tells no difference
    return Temperature(math.exp(bound if at_bound else float(found.x)), at_bound)


def scaled(images: "ScoredBatch", temperature: float) -> "ScoredBatch":
    """Return images with their logits in float64, divided by a temperature."""
    from benchmark.counts import ScoredBatch

    return ScoredBatch(images.logits.double() / temperature, images.y)


def calibration_of(val: "ScoredBatch | None", test: "ScoredBatch | None") -> Calibration:
    """Fit a temperature on ``val`` and measure ``test`` with and without it; None stands for no images."""
    temperature = None if val is None else fit_temperature(val)
    nothing: dict[str, float | None] = dict.fromkeys(MEASURED)
    return Calibration(
        0 if val is None else len(val.y),
        0 if test is None else len(test.y),
        temperature,
        nothing if test is None else _measured(scaled(test, 1.0)),
        nothing if test is None or temperature is None else _measured(scaled(test, temperature.value)),
    )


def _measured(images: "ScoredBatch") -> dict[str, float | None]:
    import numpy as np

    once = np.ones((1, len(images.y)), dtype="int32")
    made = {name: float(values_in(METRICS[name], images, once)[0]) for name in MEASURED}
    return {name: value if math.isfinite(value) else None for name, value in made.items()}


def calibrations(run: StoredRun, point: str) -> dict[int, Calibration]:
    """Return the calibration of each client with its own temperature, and of all images with one of them all (-1).

    Temperatures are fitted on the images of the split ``val``, which are held out of training, and never on test
    images. Both splits are of the same evaluation.

    Args:
        run: that kept its images.
        point: of a round, ``"server"`` or ``"local"``.

    Raises:
        ConfigurationError: the run kept no images of ``val`` or none of ``test`` at this point, or they are not the
            ones that it wrote.
    """
    splits = val_and_test(run, point, "a temperature is fitted")
    clients = sorted({int(client) for rows in splits for client in rows["client"]})
    made = {client: calibration_of(*(_images(rows[rows["client"] == client]) for rows in splits)) for client in clients}
    return made | {POOLED_CLIENT: calibration_of(*map(_images, splits))}


def val_and_test(run: StoredRun, point: str, what: str) -> "list[pd.DataFrame]":
    """Return the rows of ``val`` and of ``test``.

    Args:
        run: that kept its images.
        point: of a round, ``"server"`` or ``"local"``.
        what: becomes of the images of ``val``, for messages.

    Raises:
        ConfigurationError: the run kept no images of ``val`` or none of ``test`` at this point, or they are not the
            ones that it wrote.
    """
    _check_kept(run)
    splits = [run.scored(point, split) for split in ("val", "test")]
    if not all(map(len, splits)):
        missing = "val" if not len(splits[0]) else "test"
        raise ConfigurationError(
            f"{run.folder} stored no predictions of {missing} images {POINT_WORDS[point]}: {what} on val images and "
            f"measured on test images; {NO_VAL}"
        )
    return splits


def points_with_both(run: StoredRun) -> list[str]:
    """Return the points of a round at which a run kept images of ``val`` and of ``test``."""
    _check_kept(run)
    return run.points_scored("val", "test")


def _check_kept(run: StoredRun) -> None:
    if PREDICTIONS not in run.record.files:
        raise ConfigurationError(f"{run.folder} stored no predictions: {NO_VAL}")


def _images(rows: "pd.DataFrame") -> "ScoredBatch | None":
    return images_of(rows) if len(rows) else None


def print_calibration(run_dir: str | Path) -> None:
    """Print the calibration of a run's test images before and after temperature scaling, a table for each point.

    Raises:
        ConfigurationError: as :func:`calibrations`.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    run, console = stored_run(run_dir), Console(highlight=False, markup=False)
    at_bound = False
    for point in points_with_both(run) or ["server"]:  # with neither, it says what is missing
        made = calibrations(run, point)
        shown = Table(
            title=f"calibration of test images {POINT_WORDS[point]}, before -> after temperature scaling by T"
        )
        for head in ("", "val images", "test images", "T", *MEASURED):
            shown.add_column(head, no_wrap=head == "T")
        for client, of in made.items():
            name = POOLED if client == POOLED_CLIENT else run.record.client_names[client]
            fitted = "" if of.temperature is None else f"{of.temperature.value:.4f}{' *' * of.temperature.at_bound}"
            numbers = [_change(of, metric) for metric in MEASURED]
            shown.add_row(Text(printable(name)), str(of.val_images), str(of.test_images), fitted, *numbers)
            at_bound |= of.temperature is not None and of.temperature.at_bound
        console.print(shown)
    console.print(
        f"Temperatures were fitted on the val images of round {int(run.predictions['round'].max())}, held out of "
        "training, and never on test images: each client's on its own, that of all images together on all clients'. "
        "Accuracy does not change."
    )
    if at_bound:
        low, high = map(math.exp, BOUNDS)
        console.print(
            f"* At a bound of the range from {low:.4f} to {high:.2f}: the val images, all right or mostly wrong, "
            "determine no temperature."
        )


def _change(of: Calibration, metric: str) -> str:
    """Say a metric before and after, where it is defined."""
    both = of.before[metric], of.after[metric]
    return " -> ".join(metric_number(value, metric) for value in both if value is not None)
