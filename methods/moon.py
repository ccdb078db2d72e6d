"""MOON: FedAvg with a contrast between the received model and the client's previous one."""

from typing import Any

from torch import Tensor
from torch.func import functional_call

from benchmark.contract import Client, MiniBatch
from benchmark.ranges import NonNegativeFloat, PositiveFloat
from methods.fedavg import FedAvg
from methods.losses import cross_entropy, masked_mean, model_contrast


class MOON(FedAvg):
    """MOON (Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021).

    Objective ``CE + mu * L_con`` with ``L_con = -log(e^{cos(z,z_g)/tau} / (e^{cos(z,z_g)/tau} + e^{cos(z,z_p)/tau}))``:
    z are features under the model being trained, z_g under the received one, z_p under the client's model at the end of
    its previous participation (at first the initial model); z_g and z_p have no gradient. With ``mu=0`` it is FedAvg
    bit for bit. With a prompt on the pixels all three models see the same prompted image, and the prompt's own phase
    has no contrast.

    Reading: pFedPT's appendix lost the symbol of its value 1.0, taken here as mu; tau = 0.5 is MOON's own. There is no
    projection head: z is the input of the last linear layer, as in pFedPT's and PFLlib's code. Further
    arguments as ``FedAvg``.

    Args:
        mu: weight of the contrast.
        temperature: tau.
    """

    remembers = ("backbone",)
    per_example = True

    def __init__(
        self, *arguments: Any, mu: NonNegativeFloat = 1.0, temperature: PositiveFloat = 0.5, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self.mu = mu
        self.temperature = temperature

    def model_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy plus the contrast."""
        if not self.mu:
            return super().model_loss(client, batch)
        x = self.prompted(batch.x, batch.noise)
        z = self.backbone(x)
        received, previous = (self._features(values, x) for values in (client.received, client.previous))
        contrast = model_contrast(z, received, previous, self.temperature)
        return cross_entropy(self.head(z), batch.y, batch.mask) + self.mu * masked_mean(contrast, batch.mask)

    def _features(self, values: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return features under other values of the backbone, without gradient."""
        own = {n.removeprefix("backbone."): v for n, v in values.items() if n.startswith("backbone.")}
        return functional_call(self.backbone, own, (x,)).detach()
