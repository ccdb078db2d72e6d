"""FedRep: first the client's own head, then the shared body."""

from torch import Tensor, nn

from benchmark.backbones.head import LinearHead
from benchmark.method import FederatedMethod, LocalTraining, Phase


class FedRep(FederatedMethod):
    """FedRep (Collins et al., ICML 2021).

    A round has two phases: the body rests while the head is trained, then the head rests while the body is trained. The
    server averages the body weighted with n_k. Evaluated with the global body and the client's own head.

    Readings: pFedPT gives the head's rate, 0.01; its code trains both for 5 epochs. FedRep's own last round, in which
    every client refits its head, is left out, since neither pFedPT nor pFedPG mentions it.

    Args:
        num_classes: C.
        num_clients: N.
        backbone: images [B, 3, H, W] to features [B, d].
        head_training: of the head, first.
        training: of the body, second.
    """

    shared = ("backbone",)
    personal = ("head",)

    def __init__(
        self,
        num_classes: int,
        num_clients: int,
        backbone: nn.Module,
        head_training: LocalTraining = LocalTraining(lr=0.01),
        training: LocalTraining = LocalTraining(lr=0.005),
    ) -> None:
        super().__init__(num_clients)
        self.backbone = backbone
        self.head = LinearHead(backbone.num_features, num_classes)  # type: ignore[arg-type]
        self.head_training = head_training
        self.training_settings = training

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] of images [B, 3, H, W]."""
        return self.head(self.backbone(x))

    def local_phases(self) -> list[Phase]:
        """Head, then body."""
        return [self.head_training.phase("head"), self.training_settings.phase("backbone")]
