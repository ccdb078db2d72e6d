"""Options of the data that choose metrics and the images that are kept, checked against each other."""

from typing import Any

from benchmark.errors import ConfigurationError
from benchmark.metrics import MEANS_OVER_CLASSES, keep_images
from benchmark.own_metrics import check_own_metrics, chosen_metrics
from benchmark.records.kept_rounds import Keep

Given = list[str | dict[str, Any]] | dict[str, Any] | str | None


def checked_scoring(
    metrics: Given, min_support: int, keep_predictions: Keep | None, val_fraction: float, classes: int
) -> Keep:
    """Return the evaluations whose images a run keeps; try metrics of the user's own.

    Args:
        metrics: ``data.metrics``.
        min_support: of the same name.
        keep_predictions: likewise; None keeps the last evaluation's images where metrics are made of them.
        val_fraction: likewise.
        classes: of the data set.

    Raises:
        ConfigurationError: they do not fit each other, or a metric of one's own is none.
    """
    chosen = chosen_metrics(metrics)
    check_own_metrics(chosen, classes)
    if min_support > 1 and not any(metric.name in MEANS_OVER_CLASSES for metric in chosen):
        raise ConfigurationError(
            f"data.min_support={min_support} says which classes {' and '.join(MEANS_OVER_CLASSES)} are means of, and "
            "the run has neither; give data.metrics=clinical, or leave data.min_support out"
        )
    if keep_predictions == "best_on_val" and not val_fraction:
        raise ConfigurationError(
            "data.keep_predictions=best_on_val keeps the images of the round that is best on held-out training images, "
            "and data.val_fraction=0 holds none out; give for example data.val_fraction=0.1, or keep_predictions=last"
        )
    return keep_predictions or ("last" if keep_images(chosen) else "none")
