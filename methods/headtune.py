"""Head-Tune: FedAvg of a linear classifier on the features of a frozen backbone, or each client's own."""

from typing import Any, Literal

from torch import Tensor

from benchmark.contract import Client, LocalTraining, MiniBatch, Phase
from methods.classifier import ClassifierMethod, new_client_training
from methods.losses import cross_entropy


class HeadTune(ClassifierMethod):
    """Head-Tune, baseline of pFedBayesPT (CIKM 2025) after Sun et al. (2022): FedAvg on the head alone.

    Objective ``CE(H(F(x)); D_k)``, convex in the head H; server ``H <- sum_k n_k H_k / sum_k n_k``. The one global head
    is evaluated on every client's test images. The backbone F never moves, so the features of an image are computed
    once where the transform is deterministic. A client that never trains fits a copy of the global head first.
    With ``head=personal`` nothing is sent, and every client fits a head of its own: the local baseline of all that is
    trained in front of a frozen backbone. Further arguments as ``ClassifierMethod``.

    Args:
        training: of the head; the paper tunes the rate and does not state it.
        head: whose it is.
    """

    shared: tuple[str, ...] = ("head",)
    inputs = ("features",)
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        training: LocalTraining = LocalTraining(lr=0.01, momentum=0.9),
        head: Literal["shared", "personal"] = "shared",
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, training=training, **settings)
        if head == "personal":
            self.shared, self.personal = (), ("head",)

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """Return the backbone's features [B, d] of images [B, 3, H, W]."""
        return {"features": self.backbone(x)}

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return the head's logits [B, C] of the features."""
        return self.head(batch.features["features"])

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy."""
        return cross_entropy(self.client_logits(client, batch), batch.y, batch.mask)

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fit the head of a client that never trains, from the global one, or from the initial one of all."""
        return [new_client_training(self.training_settings).phase("head")] if new else []
