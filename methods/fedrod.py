"""FedRoD: a generic head that is shared and, on the same features, a personal one that is not."""

import copy
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from benchmark.contract import Client, LocalTraining, MiniBatch, Phase
from methods.classifier import ClassifierMethod, new_client_training
from methods.losses import cross_entropy

#: Instead of 0 images of a class that a client does not have: with 0 its logit would be -inf.
FEWEST_IMAGES = 1e-8


def balanced_logits(logits: Tensor, class_counts: Tensor) -> Tensor:
    """``z_c + log n_c``: their cross-entropy is the balanced softmax loss (Ren et al., NeurIPS 2020).

    Args:
        logits: z, [B, C].
        class_counts: n, training images of each class, [C]; 0 counts as 1e-8.

    Returns:
        [B, C].
    """
    return logits + class_counts.to(logits.dtype).clamp(min=FEWEST_IMAGES).log()


class FedRoD(ClassifierMethod):
    """FedRoD (Chen and Chao, "On Bridging Generic and Personalized Federated Learning", ICLR 2022), linear version.

    With features z of the backbone, generic head G and personal head P of client k, which has n_kc images of class c:
    ``CE(G(z) + log n_k, y)`` trains backbone and G, and ``CE(sg[G(z)] + P(sg[z]), y)`` trains P alone, both on every
    mini-batch; sg stops gradients. The server averages backbone and G weighted with n_k, P never leaves its client.
    Evaluated with ``G(z) + P(z)``; the losses of both terms are recorded as means over the training steps.

    Readings: counts are clamped to 1e-8, since log 0 is -inf. P starts as a copy of G, as in PFLlib. The two terms
    have no parameter in common, so that one SGD with one rate on their sum is two optimizers. A gradient clip takes the
    norm over both. Further arguments as ``ClassifierMethod``.

    Args:
        training: of backbone and both heads.
        personal_init: P at the start: a ``copy`` of G, or ``zero``, with which P says nothing at the start.
        train_backbone: without, both heads are trained on the features of a frozen backbone.

    Raises:
        ConfigurationError: an unknown ``personal_init``.
    """

    shared: tuple[str, ...] = ("backbone", "head")
    personal = ("personal_head",)
    paper_arguments: ClassVar = {"train_backbone": True}

    def __init__(
        self,
        *arguments: Any,
        training: LocalTraining = LocalTraining(lr=0.01, momentum=0.9, clip=1.0),
        personal_init: Literal["copy", "zero"] = "copy",
        train_backbone: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, training=training, **settings)
        self.train_backbone = train_backbone
        if not train_backbone:
            self.shared, self.inputs = ("head",), ("features",)
        self.personal_head = copy.deepcopy(self.head)
        if personal_init == "zero":
            for parameter in self.personal_head.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Return personal logits [B, C] of images [B, 3, H, W]."""
        return self.classify(self.backbone(x))

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return personal logits [B, C] of a mini-batch."""
        return self.classify(self.features(batch))

    def classify(self, z: Tensor) -> Tensor:
        """Return ``G(z) + P(z)`` [B, C] of features [B, d]."""
        return self.head(z) + self.personal_head(z)

    def client_loss(self, client: Client, batch: MiniBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of both terms, and each of them."""
        z = self.features(batch)
        generic = self.head(z)
        balanced = cross_entropy(balanced_logits(generic, client.class_counts), batch.y, batch.mask)
        personal = cross_entropy(generic.detach() + self.personal_head(z.detach()), batch.y, batch.mask)
        return balanced + personal, {"generic_loss": balanced, "personal_loss": personal}

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fit the personal head of a client that never trains."""
        return [new_client_training(self.training_settings).phase("personal_head")] if new else []
