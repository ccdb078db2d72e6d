"""Prompt+Prox: PromptFL with a pull towards the received prompt."""

from typing import Any, Literal

from torch import Tensor

from benchmark.contract import Client, MiniBatch
from benchmark.ranges import NonNegativeFloat
from methods.losses import squared_distance
from methods.promptfl import PromptFL


class PromptProx(PromptFL):
    """Prompt+Prox, baseline of FedPGP (Cui et al., ICML 2024) after FedProx (Li et al., MLSys 2020).

    Objective ``CE_k(p) + (mu / 2) ||p - p^t||^2`` with p^t the received context. Messages and evaluation are
    PromptFL's, and with ``mu=0`` it is PromptFL bit for bit.

    ``prox_grad``: FedPGP's code makes the term from detached copies, so that it has no gradient and the method is
    PromptFL. ``detached`` is that: the term is left out. ``live`` is the objective above.

    Further arguments as ``PromptFL``.

    Args:
        mu: weight of the term; FedPGP does not state it.
        prox_grad: see above.

    Raises:
        ConfigurationError: an unknown ``prox_grad``.
    """

    per_example = True

    def __init__(
        self,
        *arguments: Any,
        mu: NonNegativeFloat = 1.0,
        prox_grad: Literal["live", "detached"] = "live",
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.mu = mu if prox_grad == "live" else 0.0

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy plus the proximal term."""
        loss, proximal = super().client_loss(client, batch), self.regulariser(client, batch.phase)
        return loss if proximal is None else loss + proximal

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return the proximal term."""
        return self.mu / 2 * squared_distance(client.parameters, client.received) if self.mu else None
