"""Per-client scores, kept as counts so that they do not depend on how clients and images were batched."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import Metric
from torchmetrics.functional.classification import multiclass_stat_scores

from benchmark.masked import IGNORE, at_least_float32
from benchmark.placing import placed


class ClientScores(Metric):
    """Accuracy, balanced accuracy, macro F1 and mean cross-entropy of every client on its own held-out images.

    An image whose logits have no largest one (NaN, or infinite) has no prediction: it counts as wrong, and its client's
    loss is NaN.

    Args:
        num_clients: N.
        num_classes: C.
    """

    full_state_update = False
    counts: Tensor
    loss_sum: Tensor

    def __init__(self, num_clients: int, num_classes: int) -> None:
        super().__init__(sync_on_compute=False)  # ranks gather scores by themselves
        self.num_classes = num_classes
        # One class more, which no image has: what has no prediction is predicted to be it.
        self.add_state("counts", torch.zeros(num_clients, num_classes + 1, 3, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("loss_sum", torch.zeros(num_clients, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, y: Tensor, clients: Sequence[int]) -> None:
        """Count one stacked batch.

        Args:
            logits: [K, B, C].
            y: [K, B], -100 where there is no image.
            clients: client ids, K of them.
        """
        rows = placed(torch.tensor(clients), logits.device)
        has_prediction = logits.amax(-1).isfinite()
        scores = multiclass_stat_scores(
            logits.argmax(-1).masked_fill(~has_prediction, self.num_classes),
            y,
            num_classes=self.num_classes + 1,
            average=None,
            multidim_average="samplewise",
            ignore_index=IGNORE,
            validate_args=False,
        )
        # torchmetrics gives (tp, fp, tn, fn, support); true positives, false positives and support say it all.
        self.counts.index_add_(0, rows, torch.stack([scores[..., kind] for kind in (0, 1, 4)], -1).long())
        losses = cross_entropy(
            at_least_float32(logits).flatten(0, 1), y.flatten(), reduction="none", ignore_index=IGNORE
        )
        self.loss_sum.index_add_(0, rows, losses.double().view(y.shape).sum(1))

    def add(self, clients: Sequence[int], counts: Tensor, loss_sum: Tensor) -> None:
        """Count what somebody else has counted.

        Args:
            clients: whose, each at most once.
            counts: [K, C + 1, 3].
            loss_sum: [K].
        """
        rows = torch.tensor(clients, dtype=torch.int64, device=self.counts.device)
        given = {"counts": counts, "loss_sum": loss_sum}
        own = {"counts": self.counts, "loss_sum": self.loss_sum}
        state = {name: torch.zeros_like(own[name]).index_copy_(0, rows, v.to(rows.device)) for name, v in given.items()}
        self.merge_state(state)
        self._update_count += 1  # else it warns that nothing has been counted

    def scored(self) -> list[int]:
        """Return the clients of whom an image was counted."""
        return self.images().nonzero().flatten().tolist()

    def compute(self) -> dict[str, Tensor]:
        """Per metric name [N], float64; NaN for a client that was not evaluated.

        ``balanced_accuracy`` and ``macro_f1`` are the means of recall and of F1 over the classes that occur in the
        client's held-out images.
        """
        hits, false, support = self.counts[:, :-1].double().unbind(-1)
        present = support > 0
        recall = torch.where(present, hits / support, 0.0)
        f1 = torch.where(present, 2 * hits / (hits + false + support), 0.0)
        total = support.sum(1)
        return {
            "accuracy": hits.sum(1) / total,
            "balanced_accuracy": recall.sum(1) / present.sum(1),
            "macro_f1": f1.sum(1) / present.sum(1),
            "loss": self.loss_sum / total,
        }

    def images(self) -> Tensor:
        """Images of each client that were scored, int64 [N]."""
        return self.counts[..., 2].sum(1)

    def without_prediction(self) -> Tensor:
        """Those of them that have no prediction, int64 [N]."""
        return self.counts[:, -1, 1]
