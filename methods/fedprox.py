"""FedProx: FedAvg with a pull towards the received model."""

from torch import Tensor, nn

from benchmark.backbones.pixel_prompts import PixelPrompt
from benchmark.contract import Client, LocalTraining, MiniBatch
from benchmark.ranges import NonNegativeFloat
from methods.fedavg import FedAvg
from methods.losses import squared_distance


class FedProx(FedAvg):
    """FedProx (Li et al., MLSys 2020): objective ``CE(w; D_k) + (mu / 2) ||w - w^t||^2`` with w^t the received model.

    The squared norm of the paper; some published codes leave out the square. With ``mu=0`` it is FedAvg bit for bit.
    A prompt on the pixels has no such term. Other arguments as ``FedAvg``.

    Args:
        mu: weight of the proximal term; pFedPT uses 1e-4.
    """

    def __init__(
        self,
        num_classes: int,
        num_clients: int,
        backbone: nn.Module,
        mu: NonNegativeFloat = 1e-4,
        training: LocalTraining = LocalTraining(lr=0.005),
        visual_prompt: PixelPrompt | None = None,
    ) -> None:
        super().__init__(num_classes, num_clients, backbone, training, visual_prompt)
        self.mu = mu

    def model_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Cross-entropy plus the proximal term."""
        loss = super().model_loss(client, batch)
        return loss + self.mu / 2 * squared_distance(client.parameters, client.received) if self.mu else loss
