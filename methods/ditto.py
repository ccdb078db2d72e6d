"""Ditto: the average, and beside it each client's own model, which is pulled towards it."""

import copy
from typing import Any

from torch import Tensor

from benchmark.contract import Client, LocalTraining, MiniBatch, Phase
from benchmark.ranges import NonNegativeFloat
from methods.classifier import ClassifierMethod, new_client_training
from methods.losses import cross_entropy, squared_distance


class Ditto(ClassifierMethod):
    """Ditto (Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021).

    With w^t the model that client k receives: ``CE(w; D_k)`` trains w, which the server averages weighted with n_k, and
    ``CE(v_k; D_k) + (lam / 2) ||v_k - w^t||^2`` trains the client's own model v_k, which never leaves it. Evaluated
    with v_k, which starts as w does. With ``lam=0`` each client trains alone.

    Readings: both are trained on every mini-batch, v_k thus as many steps and at the same rate as w. They have no
    parameter in common, so that one SGD on the sum of both terms is two optimizers; a gradient clip takes the norm over
    both. Further arguments as ``ClassifierMethod``.

    Args:
        training: of both models.
        lam: weight of the pull towards the average; 0 is none. Its value here is ours, the paper tunes it.
        train_backbone: without, a model is a linear head on the features of a frozen backbone.
    """

    per_example = True

    def __init__(
        self,
        *arguments: Any,
        training: LocalTraining = LocalTraining(lr=0.01),
        lam: NonNegativeFloat = 0.1,
        train_backbone: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, training=training, **settings)
        self.lam = lam
        self.train_backbone = train_backbone
        self.personal_head = copy.deepcopy(self.head)
        if train_backbone:
            self.personal_backbone = copy.deepcopy(self.backbone)
            self.shared, self.personal = ("backbone", "head"), ("personal_backbone", "personal_head")
        else:
            self.shared, self.personal, self.inputs = ("head",), ("personal_head",), ("features",)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] of the client's own model for images [B, 3, H, W]."""
        return self.personal_head(self.personal_backbone(x) if self.train_backbone else self.backbone(x))

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return logits [B, C] of the client's own model."""
        return self(batch.x) if self.train_backbone else self.personal_head(self.features(batch))

    def client_loss(self, client: Client, batch: MiniBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of both objectives, and the cross-entropy of each model."""
        average = cross_entropy(self.head(self.features(batch)), batch.y, batch.mask)
        own = cross_entropy(self.client_logits(client, batch), batch.y, batch.mask)
        pull = self.regulariser(client, batch.phase)
        return average + own + pull, {"average_loss": average, "own_loss": own}

    def regulariser(self, client: Client, phase: int) -> Tensor:
        """Return the pull ``(lam / 2) ||v_k - w^t||^2``, which reads no image."""
        received = {f"personal_{name}": value for name, value in client.received.items()}
        return self.lam / 2 * squared_distance(client.parameters, received)

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fit the own model of a client that never trains, pulled towards the average."""
        return [new_client_training(self.training_settings).phase(*self.personal)] if new else []
