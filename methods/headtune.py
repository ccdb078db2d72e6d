"""Head-Tune: FedAvg of a linear classifier on the features of a frozen backbone."""

from torch import Tensor, nn

from benchmark.backbones.head import LinearHead
from benchmark.contract import Client, LocalTraining, MiniBatch, Phase
from benchmark.method import FederatedMethod
from methods.fedvpt import new_client_training
from methods.losses import cross_entropy


class HeadTune(FederatedMethod):
    """Head-Tune, baseline of pFedBayesPT (CIKM 2023) after Sun et al. (2022): FedAvg on the head alone.

    Objective ``CE(H(F(x)); D_k)``, convex in the head H; server ``H <- sum_k n_k H_k / sum_k n_k``. The one global head
    is evaluated on every client's test images. The backbone F never moves, so the features of an image are computed
    once where the transform is deterministic. A client that never trains fits a copy of the global head first.

    Args:
        num_classes: C.
        num_clients: N.
        backbone: images [B, 3, H, W] to features [B, d], frozen.
        training: of the head; the paper tunes the rate and does not state it.
    """

    shared = ("head",)
    inputs = ("features",)

    def __init__(
        self,
        num_classes: int,
        num_clients: int,
        backbone: nn.Module,
        training: LocalTraining = LocalTraining(lr=0.01, momentum=0.9),
    ) -> None:
        super().__init__(num_clients)
        self.backbone = backbone
        self.head = LinearHead(backbone.num_features, num_classes)  # type: ignore[arg-type]
        self.training_settings = training

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """The backbone's features of images [B, 3, H, W], [B, d]."""
        return {"features": self.backbone(x)}

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] of images [B, 3, H, W]."""
        return self.head(self.backbone(x))

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """As ``forward``, from the features."""
        return self.head(batch.features["features"])

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Cross-entropy."""
        return cross_entropy(self.client_logits(client, batch), batch.y, batch.mask)

    def local_phases(self) -> list[Phase]:
        """The head."""
        return [self.training_settings.phase("head")]

    def finetune_phases(self, new: bool) -> list[Phase]:
        """The head of a client that never trains, from the global one."""
        return [new_client_training(self.training_settings).phase("head")] if new else []
