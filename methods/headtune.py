"""Head-Tune: FedAvg of a linear classifier on the features of a frozen backbone, or each client's own."""

from typing import Any, ClassVar, Literal

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
    trained in front of a frozen backbone. With ``head_mu`` it is ``FedProx`` of the head, which adds
    ``(mu / 2) ||H - H^t||^2`` with H^t as received. With ``head_finetuning`` it is ``FedAvgFT`` of the head: every
    client fits a throw-away copy before it is evaluated. Further arguments as ``ClassifierMethod``.

    Args:
        training: of the head; the paper tunes the rate and does not state it.
        head: whose it is.
        head_mu: weight of the pull towards the received head; None is none. Not ``mu``, nor ``finetuning``: a method
            that stands in another's place takes over the arguments that both have.
        head_finetuning: of the copy of the shared head before it is evaluated; None leaves it as it is.

    Raises:
        ConfigurationError: ``head_mu`` or ``head_finetuning`` of a personal head, which nobody receives.
    """

    shared: tuple[str, ...] = ("head",)
    inputs = ("features",)
    train_backbone = False
    per_example = True
    paper_arguments: ClassVar = {"head": "shared", "head_mu": None, "head_finetuning": None}

    def __init__(
        self,
        *arguments: Any,
        training: LocalTraining = LocalTraining(lr=0.01, momentum=0.9),
        head: Literal["shared", "personal"] = "shared",
        head_mu: NonNegativeFloat | None = None,
        head_finetuning: LocalTraining | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, training=training, **settings)
        self.head_mu = head_mu
        self.head_finetuning = head_finetuning
        if head == "personal":
            self.shared, self.personal = (), ("head",)
            if head_mu is not None or head_finetuning is not None:
                raise ConfigurationError(
                    "HeadTune: head_mu and head_finetuning need the head that all share; leave them out, or give "
                    "head=shared"
                )

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return the head's logits [B, C] of the features."""
        return self.head(self.features(batch))

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy, with ``head_mu`` plus the pull towards the received head."""
        loss = cross_entropy(self.client_logits(client, batch), batch.y, batch.mask)
        pull = self.regulariser(client, batch.phase)
        return loss if pull is None else loss + pull

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return ``(mu / 2) ||H - H^t||^2``, if there is a mu."""
        return self.head_mu / 2 * squared_distance(client.parameters, client.received) if self.head_mu else None

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fit a copy of the head as ``head_finetuning`` says; else that of a client that never trains.

        It starts from the global one, or with ``head=personal`` from the initial one of all.
        """
        if self.head_finetuning is not None:
            return [self.head_finetuning.phase("head")]
        return [new_client_training(self.training_settings).phase("head")] if new else []
