"""The kept images of the last evaluation as a table, and what the images of a whole run come to."""

import logging
from typing import TYPE_CHECKING

from benchmark.counts import ScoredBatch
from benchmark.errors import ConfigurationError
from benchmark.records.predictions import COLUMNS, MOST_BYTES

if TYPE_CHECKING:  # slow to import
    import pandas as pd

    from benchmark.method import FederatedMethod
    from datamodules.federated import FederatedDataModule

log = logging.getLogger(__name__)
#: Bytes of a row of the table beside its logits.
ROW = 40


def tell_size(method: "FederatedMethod", data: "FederatedDataModule", rounds: int, every: int) -> None:
    """Say how large the images of all evaluations are, before any training.

    Args:
        method: of the run.
        data: the images.
        rounds: of the run.
        every: how many rounds lie between evaluations.

    Raises:
        ConfigurationError: the table would be larger than what is read of such a file.
    """
    local = method.evaluate_local if data.evaluate_local is None else data.evaluate_local
    images = sum(len(rows) for split in data.held_out.values() for rows in split.values()) * (2 if local else 1)
    evaluations = 1 + rounds // every
    size = evaluations * images * (4 * data.num_classes + ROW)
    said = f"{evaluations:,} evaluations of {images:,} images, {size / 1e6:,.1f} MB at most before compression"
    if size > MOST_BYTES:
        raise ConfigurationError(
            f"data.keep_predictions=all keeps {said}, and {MOST_BYTES / 1e6:,.0f} MB are read; give "
            "data.keep_predictions=last, or a larger trainer.check_val_every_n_epoch"
        )
    log.info(f"keeping {said}")


def refuse_files(data: "FederatedDataModule") -> None:
    """Refuse data of which a run keeps files, where it has no directory.

    Raises:
        ConfigurationError: it is so.
    """
    if data.kept_rounds in ("best_on_val", "all"):
        raise ConfigurationError(
            f"data.keep_predictions={data.kept_rounds} keeps a file of images, and the run has no directory; give "
            "fit(..., run_dir=FOLDER), or keep_predictions='last'"
        )
    if data.subgroups is not None:
        raise ConfigurationError(
            "data.subgroups keeps a file of subgroups, and the run has no directory; give fit(..., run_dir=FOLDER), or "
            "leave it out"
        )


def predictions_of(method: "FederatedMethod", data: "FederatedDataModule") -> "pd.DataFrame | None":
    """Return the images of the last evaluation, columns as in :data:`benchmark.records.predictions.COLUMNS`.

    Args:
        method: that was evaluated.
        data: the images.

    Returns:
        A row for each image; None where none are kept.
    """
    import pandas as pd

    parts = []
    for (point, split), scores in sorted(method.evaluation.scores.items()):
        kept = scores.kept
        if not len(kept.label):
            continue
        predicted = ScoredBatch(kept.logits, kept.label).predictions
        columns = {
            "point": point,
            "split": split,
            "round": method.server.finished_rounds,
            "client": kept.client.numpy(),
            "image": kept.image.numpy(),
            "group": data.pool.group[kept.image].numpy(),
            "label": kept.label.numpy(),
            "prediction": predicted.where(predicted < scores.num_classes, -1).numpy(),
            "logits": list(kept.logits.numpy()),
        }
        parts.append(pd.DataFrame(columns, columns=list(COLUMNS)))
    return pd.concat(parts, ignore_index=True) if parts else None
