"""MOON: FedAvg with a contrast between the received model and the client's previous one."""

from torch import Tensor, nn
from torch.func import functional_call

from benchmark.backbones.pixel_prompts import PixelPrompt
from benchmark.contract import Client, LocalTraining, MiniBatch
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
    projection head: z is the input of the last linear layer, as in pFedPT's and PFLlib's code.

    Args:
        num_classes: C.
        num_clients: N.
        backbone: images [B, 3, H, W] to features z [B, d].
        mu: weight of the contrast.
        temperature: tau.
        training: of backbone and head together.
        visual_prompt: a prompt on the pixels, or None.
    """

    remembers = ("backbone",)

    def __init__(
        self,
        num_classes: int,
        num_clients: int,
        backbone: nn.Module,
        mu: NonNegativeFloat = 1.0,
        temperature: PositiveFloat = 0.5,
        training: LocalTraining = LocalTraining(lr=0.005),
        visual_prompt: PixelPrompt | None = None,
    ) -> None:
        super().__init__(num_classes, num_clients, backbone, training, visual_prompt)
        self.mu = mu
        self.temperature = temperature

    def model_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Cross-entropy plus the contrast."""
        if not self.mu:
            return super().model_loss(client, batch)
        x = self.prompted(batch.x, batch.noise)
        z = self.backbone(x)
        received, previous = (self._features(values, x) for values in (client.received, client.previous))
        contrast = model_contrast(z, received, previous, self.temperature)
        return cross_entropy(self.head(z), batch.y, batch.mask) + self.mu * masked_mean(contrast, batch.mask)

    def _features(self, values: dict[str, Tensor], x: Tensor) -> Tensor:
        """Features under other values of the backbone, without gradient."""
        own = {n.removeprefix("backbone."): v for n, v in values.items() if n.startswith("backbone.")}
        return functional_call(self.backbone, own, (x,)).detach()
