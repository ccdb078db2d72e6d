"""Counts that metrics are made of: sums over images, hence over batches, ranks and clients.

Importing this module loads neither torch nor NumPy.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # slow to import
    from torch import Tensor

#: Bins of the confidence, and units of what is summed in whole numbers.
BINS, CONFIDENCE_UNITS, ERROR_UNITS = 15, 2**30, 2**32


@dataclass(frozen=True)
class ScoredBatch:
    """One stacked batch of logits and labels, or the images of one client.

    Attributes:
        logits: [K, B, C], or [n, C].
        y: [K, B], -100 where there is no image, or [n].
    """

    logits: "Tensor"
    y: "Tensor"

    @property
    def classes(self) -> int:
        """Return the number of classes, C."""
        return self.logits.shape[-1]

    @cached_property
    def predictions(self) -> "Tensor":
        """Return the predicted classes, as ``y``; C where the logits have no largest one (NaN, or infinite)."""
        return self.logits.argmax(-1).masked_fill(~self.logits.amax(-1).isfinite(), self.classes)

    @cached_property
    def probabilities(self) -> "Tensor":
        """Return the predicted probabilities, float64, as ``logits``; of an image without a prediction zeros."""
        from benchmark.masked import at_least_float32

        made = at_least_float32(self.logits).double().softmax(-1)
        return made.masked_fill((self.predictions == self.classes).unsqueeze(-1), 0.0)

    @property
    def there(self) -> "Tensor":
        """Return where there is an image, bool, as ``y``."""
        from benchmark.masked import IGNORE

        return self.y != IGNORE


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


class SquaredErrors(Counts):
    """Sum over images of the squared distance of their probabilities from the label's, in units of 2^-32.

    Whole numbers: their sum does not depend on the order of images.
    """

    name = "squared_errors"

    @staticmethod
    def shape(classes: int) -> tuple[int, ...]:
        """Return the shape of one number."""
        return ()

    @staticmethod
    def count(batch: ScoredBatch) -> "Tensor":
        """Return the summed squares, [K]."""
        from torch.nn.functional import one_hot

        label = one_hot(batch.y.where(batch.there, 0), batch.classes)
        squares = (batch.probabilities - label).square().sum(-1)
        return (squares * ERROR_UNITS).round().long().where(batch.there, 0).sum(1)


class Confidences(Counts):
    """Images, right predictions and the sum of confidences (in units of 2^-30) in equal bins of the confidence.

    Bin j of 15 holds confidences in (j / 15, (j + 1) / 15]. Images without a prediction are in none.
    """

    name = "confidences"

    @staticmethod
    def shape(classes: int) -> tuple[int, ...]:
        """Return bins by three numbers."""
        return BINS, 3

    @staticmethod
    def count(batch: ScoredBatch) -> "Tensor":
        """Return what the images add to each bin, [K, 15, 3]."""
        import torch

        confidence = batch.probabilities.amax(-1)
        counted = batch.there & (batch.predictions < batch.classes)
        right = (batch.predictions == batch.y) & counted
        place = ((BINS * confidence).ceil().long() - 1).clamp(0, BINS - 1)
        numbers = torch.stack([counted, right, (confidence * CONFIDENCE_UNITS).round().where(counted, 0)], -1).long()
        made = numbers.new_zeros(len(place), BINS, 3)
        return made.scatter_add_(1, place.unsqueeze(-1).expand(-1, -1, 3), numbers)
