"""Head-Tune: FedAvg of a linear classifier on the features of a frozen backbone, or each client's own."""

from typing import Any, Literal

from torch import Tensor

from benchmark.contract import Client, LocalTraining, MiniBatch, Phase
from benchmark.errors import ConfigurationError
from benchmark.ranges import NonNegativeFloat
from methods.classifier import ClassifierMethod, new_client_training
from methods.losses import cross_entropy, squared_distance


class HeadTune(ClassifierMethod):
    """Head-Tune, baseline of pFedBayesPT (CIKM 2025) after Sun et al. (2022): FedAvg on the head alone.

    Objective ``CE(H(F(x)); D_k)``, convex in the head H; server ``H <- sum_k n_k H_k / sum_k n_k``. The one global head
    is evaluated on every client's test images. The backbone F never moves, so the features of an image are computed
    once where the transform is deterministic. A client that never trains fits a copy of the global head first.
    With ``head=personal`` nothing is sent, and every client fits a head of its own: the local baseline of all that is
    trained in front of a frozen backbone. With ``mu`` it is ``FedProx`` of the head, ``CE(H) + (mu / 2) ||H - H^t||^2``
    with H^t as received; with ``finetuning`` it is ``FedAvgFT`` of the head, in which every client fits a throw-away
    copy before it is evaluated. Further arguments as ``ClassifierMethod``.

    Args:
        training: of the head; the paper tunes the rate and does not state it.
        head: whose it is.
        mu: weight of the pull towards the received head; None is none.
        finetuning: of the copy of the shared head before it is evaluated; None leaves it as it is.

    Raises:
        ConfigurationError: ``mu`` or ``finetuning`` of a personal head, which nobody receives.
    """

    shared: tuple[str, ...] = ("head",)
    inputs = ("features",)
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        training: LocalTraining = LocalTraining(lr=0.01, momentum=0.9),
        head: Literal["shared", "personal"] = "shared",
        mu: NonNegativeFloat | None = None,
        finetuning: LocalTraining | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, training=training, **settings)
        self.mu = mu
        self.finetuning = finetuning
        if head == "personal":
            self.shared, self.personal = (), ("head",)
            if mu is not None or finetuning is not None:
                raise ConfigurationError("HeadTune: mu and finetuning start from a shared head; give head=shared")

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """Return the backbone's features [B, d] of images [B, 3, H, W]."""
        return {"features": self.backbone(x)}

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return the head's logits [B, C] of the features."""
        return self.head(batch.features["features"])

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy, with ``mu`` plus the pull towards the received head."""
        loss = cross_entropy(self.client_logits(client, batch), batch.y, batch.mask)
        pull = self.regulariser(client, batch.phase)
        return loss if pull is None else loss + pull

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return ``(mu / 2) ||H - H^t||^2``, if there is a mu."""
        return self.mu / 2 * squared_distance(client.parameters, client.received) if self.mu else None

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fit a copy of the head as ``finetuning`` says; else that of a client that never trains.

        It starts from the global one, or with ``head=personal`` from the initial one of all.
        """
        if self.finetuning is not None:
            return [self.finetuning.phase("head")]
        return [new_client_training(self.training_settings).phase("head")] if new else []
