"""FedProx: FedAvg with a pull towards the received model."""

from typing import Any

from torch import Tensor

from benchmark.contract import Client, MiniBatch
from benchmark.ranges import NonNegativeFloat
from methods.fedavg import FedAvg
from methods.losses import squared_distance


class FedProx(FedAvg):
    """FedProx (Li et al., MLSys 2020): objective ``CE(w; D_k) + (mu / 2) ||w - w^t||^2`` with w^t the received model.

    The squared norm of the paper; some published codes leave out the square. With ``mu=0`` it is FedAvg bit for bit.
    A prompt on the pixels has no such term. Further arguments as ``FedAvg``.

    Args:
        mu: weight of the proximal term; pFedPT uses 1e-4.
    """

    per_example = True

    def __init__(self, *arguments: Any, mu: NonNegativeFloat = 1e-4, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.mu = mu

    def model_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy plus the proximal term."""
        loss = super().model_loss(client, batch)
        return loss + self.proximal(client) if self.mu else loss

    def proximal(self, client: Client) -> Tensor:
        """Return the proximal term."""
        return self.mu / 2 * squared_distance(client.parameters, client.received)

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return the proximal term, in the phase that knows it."""
        return self.proximal(client) if self.mu and self.is_models(phase) else None
