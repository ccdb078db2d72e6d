"""Options of the data that choose metrics and the images that are kept, checked against each other."""

from collections.abc import Sequence
from typing import Any

from benchmark.errors import ConfigurationError
from benchmark.metrics import MEANS_OVER_CLASSES, keep_images
from benchmark.own_metrics import check_own_metrics, chosen_metrics
from benchmark.records.kept_rounds import Keep
from datamodules.source import ImageSource
from datamodules.subgroups import check_columns

Given = list[str | dict[str, Any]] | dict[str, Any] | str | None


def checked_scoring(
    source: ImageSource,
    metrics: Given,
    min_support: int,
    keep_predictions: Keep | None,
    subgroups: Sequence[str] | None,
    val_fraction: float,
    val_only: bool,
    label_orders: int = 1,
) -> Keep:
    """Return the evaluations whose images a run keeps; try metrics of the user's own.

    Args:
        source: of the images.
        metrics: ``data.metrics``.
        min_support: of the same name.
        keep_predictions: likewise; None keeps the last evaluation's images where metrics are made of them.
        subgroups: likewise.
        val_fraction: likewise.
        val_only: likewise.
        label_orders: likewise; above 1 a label is another class to another client, which no value of all together says.

    Raises:
        ConfigurationError: they do not fit each other or the images, or a metric of one's own is none.
    """
    chosen = chosen_metrics(metrics)
    check_own_metrics(chosen, len(source.class_names))
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
    if val_only and not val_fraction:
        raise ConfigurationError(
            "data.val_only scores the held-out training images alone, and data.val_fraction=0 holds none out; "
            "give for example data.val_fraction=0.1"
        )
    kept = keep_predictions or ("last" if keep_images(chosen) else "none")
    asked = {"metrics": chosen != chosen_metrics(None), "keep_predictions": kept != "none"}
    for what, given in asked.items():
        if given and label_orders > 1:
            raise ConfigurationError(
                f"data.{what} compares classes of all clients together, and with data.label_orders={label_orders} a "
                f"label is another class to another client; leave data.{what} out, or give data.label_orders=1"
            )
    if subgroups is not None:
        check_columns(subgroups, source)
        if kept == "none":
            raise ConfigurationError(
                "data.subgroups compares subgroups of the images that a run keeps, and this one keeps none; give "
                "data.keep_predictions=last, or data.metrics=clinical, which keeps them"
            )
    return kept
