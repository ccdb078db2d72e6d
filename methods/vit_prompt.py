"""What the methods that learn prompts for a frozen ViT have in common."""

from benchmark.backbones.head import LinearHead
from benchmark.backbones.prompts import VisualPromptTokens
from benchmark.backbones.vit import PromptedViT
from benchmark.contract import LocalTraining, Phase
from benchmark.method import FederatedMethod
from benchmark.ranges import NumClients, PositiveInt
from methods.classifier import new_client_training


class ViTPromptMethod(FederatedMethod):
    """Base of the methods that learn prompts for a frozen ViT, and a linear head on its features.

    Evaluated after the aggregation (point ``server``) and right after local training (point ``local``). A client that
    never trains fits its head first.

    Args:
        num_classes: C.
        num_clients: N.
        backbone: a ViT, frozen.
        training: of prompts and head together; pFedPG states lr 0.25, weight decay 1e-3 and E=5, and no momentum.
    """

    evaluate_local = True

    def __init__(
        self,
        num_classes: PositiveInt,
        num_clients: NumClients,
        backbone: PromptedViT,
        *,
        training: LocalTraining = LocalTraining(lr=0.25, weight_decay=1e-3),
    ) -> None:
        super().__init__(num_clients)
        self.num_classes = num_classes
        self.backbone = backbone
        self.training_settings = training

    def new_head(self) -> LinearHead:
        """Return a linear head on the ViT's features."""
        return LinearHead(self.backbone.num_features, self.num_classes)

    def new_tokens(self, count: int, depth: int | None = None) -> VisualPromptTokens:
        """Return prompt tokens for the first layer, [count, d], or for so many layers, [depth, count, d]."""
        return VisualPromptTokens(count, self.backbone.embed_dim, depth, self.backbone.patch_size)

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fit the head of a client that never trains."""
        return [new_client_training(self.training_settings).phase("head")] if new else []
