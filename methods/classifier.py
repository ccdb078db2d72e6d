"""The base of methods that learn a linear head on a backbone's features."""

from dataclasses import replace

from torch import Tensor, nn

from benchmark.backbones.head import LinearHead
from benchmark.contract import LocalTraining, MiniBatch
from benchmark.method import FederatedMethod
from benchmark.ranges import NumClients, PositiveInt


def new_client_training(training: LocalTraining) -> LocalTraining:
    """Return how a client that never trains fits its head before it is tested: 5 epochs (pFedBayesPT, Table 3).

    The paper says no more; the rest is that of ``training``, at the rates of its first round.
    """
    return replace(training, epochs=5, steps=None, schedule="constant")


class ClassifierMethod(FederatedMethod):
    """Base of the methods whose model is a linear head on the features of a backbone.

    Attributes:
        train_backbone: without, the head alone is trained, and an image's features are computed once where the
            transform is deterministic; ``inputs`` of ``("features",)`` goes with it.

    Args:
        num_classes: C.
        num_clients: N.
        backbone: images [B, 3, H, W] to features [B, d]; starts from whatever weights it holds.
        training: of all that is trained together; lr 0.005 and E=5 are pFedPT's.
    """

    train_backbone: bool = True

    def __init__(
        self,
        num_classes: PositiveInt,
        num_clients: NumClients,
        backbone: nn.Module,
        *,
        training: LocalTraining = LocalTraining(lr=0.005),
    ) -> None:
        super().__init__(num_clients)
        self.backbone = backbone
        self.head = LinearHead(backbone.num_features, num_classes)  # type: ignore[arg-type]
        self.training_settings = training

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] of images [B, 3, H, W]."""
        return self.head(self.backbone(x))

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """Return the frozen backbone's features [B, d] of images [B, 3, H, W]; nothing where it is trained."""
        return {} if self.train_backbone else {"features": self.backbone(x)}

    def features(self, batch: MiniBatch) -> Tensor:
        """Return the backbone's features [B, d] of a mini-batch."""
        return self.backbone(batch.x) if self.train_backbone else batch.features["features"]
