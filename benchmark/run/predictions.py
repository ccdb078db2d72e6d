"""The kept images of the last evaluation as a table."""

from typing import TYPE_CHECKING

from benchmark.counts import ScoredBatch
from benchmark.records.predictions import COLUMNS

if TYPE_CHECKING:  # slow to import
    import pandas as pd

    from benchmark.method import FederatedMethod
    from datamodules.federated import FederatedDataModule


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
