"""Base of the methods that put prompts, or other parts, into a frozen ViT."""

from collections.abc import Sequence

from torch import Tensor, nn

from benchmark.backbones.head import LinearHead
from benchmark.backbones.parts import TowerPart
from benchmark.backbones.prompts import VisualPromptTokens
from benchmark.backbones.vit import PromptedViT
from benchmark.contract import Client, LocalTraining, Loss, MiniBatch, Phase
from benchmark.method import FederatedMethod
from benchmark.ranges import NumClients, PositiveInt
from methods.classifier import new_client_training
from methods.losses import cross_entropy


class ViTPromptMethod(FederatedMethod):
    """Base of the methods that learn prompts, or other parts, for a frozen ViT, and a linear head on its features.

    Where nothing that is trained stands before a later block, the tokens at its input are kept for every image, in half
    precision, and a step goes through the blocks from there on alone. Evaluated after the aggregation (point
    ``server``) and right after local training (point ``local``). A client that never trains fits its head first.

    Args:
        num_classes: C.
        num_clients: N.
        backbone: a ViT, frozen.
        training: of all that is trained together; pFedPG states lr 0.25, weight decay 1e-3 and E=5, and no momentum.
    """

    head: nn.Module
    evaluate_local = True
    first_layer = 0  #: the first layer, from 0, with a part in it

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

    def begin_at(self, first_block: int) -> None:
        """Say that nothing is put into the tower before this block, counted from 1: tokens at its input are kept.

        Raises:
            ConfigurationError: there is no such block.
        """
        self.backbone.tower.layers_from(first_block, f"{type(self).__name__}: first_block")
        self.first_layer = first_block - 1
        if self.first_layer:
            self.inputs = ("features",)

    def new_head(self) -> LinearHead:
        """Return a linear head on the ViT's features."""
        return LinearHead(self.backbone.num_features, self.num_classes)

    def new_tokens(self, count: int, depth: int | None = None, first_block: int = 1) -> VisualPromptTokens:
        """Return prompt tokens for one layer, [count, d], or for so many layers, [depth, count, d]."""
        return VisualPromptTokens(count, self.backbone.embed_dim, depth, self.backbone.patch_size, first_block)

    def parts(self) -> Sequence[TowerPart | Tensor]:
        """Return what ONE client puts into the tower."""
        return ()

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """Return the tokens of images [B, 3, H, W] at the input of the first layer with parts, float16 [B, T, d]."""
        return {"tokens": self.backbone.tokens_before(x, self.first_layer).half()}

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] of images [B, 3, H, W]."""
        logits: Tensor = self.head(self.backbone(x, *self.parts()))
        return logits

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return logits [B, C] of a mini-batch, from its first layer with parts on."""
        if not self.first_layer:
            return self(batch.x)
        tokens = batch.features["tokens"].to(self.dtype)
        logits: Tensor = self.head(self.backbone.from_tokens(tokens, *self.parts(), first_layer=self.first_layer))
        return logits

    def client_loss(self, client: Client, batch: MiniBatch) -> Loss:
        """Return cross-entropy."""
        return cross_entropy(self.client_logits(client, batch), batch.y, batch.mask)

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fit the head of a client that never trains."""
        return [new_client_training(self.training_settings).phase("head")] if new else []
