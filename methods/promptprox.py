"""Prompt+Prox: PromptFL with a pull towards the received prompt."""

from typing import Literal

from torch import Tensor

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Client, LocalTraining, MiniBatch
from benchmark.ranges import FewOrNone, NonNegativeFloat
from methods.losses import squared_distance
from methods.promptfl import PromptFL
from methods.text_prompt import TRAINING


class PromptProx(PromptFL):
    """Prompt+Prox, baseline of FedPGP (Cui et al., ICML 2024) after FedProx (Li et al., MLSys 2020).

    Objective ``CE_k(p) + (mu / 2) ||p - p^t||^2`` with p^t the received context. Messages and evaluation are
    PromptFL's, and with ``mu=0`` it is PromptFL bit for bit.

    ``prox_grad``: FedPGP's code makes the term from detached copies, so that it has no gradient and the method is
    PromptFL. ``detached`` is that: the term is left out. ``live`` is the objective above.

    Args:
        num_clients: N.
        class_names: names of all classes, in the order of the labels.
        clip: CLIP's towers, frozen.
        num_context: L, tokens of the context.
        mu: weight of the term; FedPGP does not state it.
        prox_grad: see above.
        training: of the context.
        init_words: as ``TextPromptMethod``.

    Raises:
        ConfigurationError: an unknown ``prox_grad``.
    """

    def __init__(
        self,
        num_clients: int,
        class_names: list[str],
        clip: PromptedCLIP,
        num_context: FewOrNone = 16,
        mu: NonNegativeFloat = 1.0,
        prox_grad: Literal["live", "detached"] = "live",
        training: LocalTraining = TRAINING,
        init_words: str | None = None,
    ) -> None:
        super().__init__(num_clients, class_names, clip, num_context, training, init_words)
        self.mu = mu if prox_grad == "live" else 0.0

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Cross-entropy plus the proximal term."""
        loss = super().client_loss(client, batch)
        return loss + self.mu / 2 * squared_distance(client.parameters, client.received) if self.mu else loss
