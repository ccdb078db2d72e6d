"""FedAvg: every client trains the whole model, the server averages."""

from torch import Tensor, nn

from benchmark.backbones.head import LinearHead
from benchmark.method import FederatedMethod, LocalTraining, Phase


class FedAvg(FederatedMethod):
    """FedAvg (McMahan et al., AISTATS 2017); with a ViT it is ViT-FL (Qu et al., CVPR 2022).

    Objective ``CE(w; D_k)``, E epochs from the received w; server ``w <- sum_k n_k w_k / sum_k n_k``. The one global
    model
    is evaluated on every client's test images, without fine-tuning. Local momentum starts anew each round.

    Args:
        num_classes: C.
        num_clients: N.
        backbone: images [B, 3, H, W] to features [B, d]; trained from whatever weights it holds.
        training: of backbone and head together; lr 0.005 and E=5 are pFedPT's.
    """

    shared: tuple[str, ...] = ("backbone", "head")

    def __init__(
        self,
        num_classes: int,
        num_clients: int,
        backbone: nn.Module,
        training: LocalTraining = LocalTraining(lr=0.005),
    ) -> None:
        super().__init__(num_clients)
        self.backbone = backbone
        self.head = LinearHead(backbone.num_features, num_classes)  # type: ignore[arg-type]
        self.training_settings = training

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] of images [B, 3, H, W]."""
        return self.head(self.backbone(x))

    def local_phases(self) -> list[Phase]:
        """Backbone and head together."""
        return [self.training_settings.phase("backbone", "head")]
