"""FedAvg: every client trains the whole model, the server averages."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from benchmark.backbones.head import LinearHead
from benchmark.backbones.pixel_prompts import PixelPrompt
from benchmark.contract import Client, LocalTraining, MiniBatch, Phase, Stage
from benchmark.method import FederatedMethod
from methods.losses import cross_entropy


class FedAvg(FederatedMethod):
    """FedAvg (McMahan et al., AISTATS 2017); with a ViT it is ViT-FL (Qu et al., CVPR 2022).

    Objective ``CE(w; D_k)``, E epochs from the received w; server ``w <- sum_k n_k w_k / sum_k n_k``. The one global
    model is evaluated on every client's test images, without fine-tuning.

    It and the methods derived from it can be given a prompt on the pixels (the ``+PT`` rows of Li et al., "Visual
    Prompt Based Personalized Federated Learning"). The prompt is the same on all clients at the start, is each
    client's own from then on and is never sent. A round then begins with a phase that trains it alone, by
    cross-entropy, while the model rests; the method's own phases follow while the prompt rests.

    Args:
        num_classes: C.
        num_clients: N.
        backbone: images [B, 3, H, W] to features [B, d]; trained from whatever weights it holds.
        training: of backbone and head together; lr 0.005 and E=5 are pFedPT's.
        visual_prompt: a prompt on the pixels, with its own training, or None.
    """

    shared: tuple[str, ...] = ("backbone", "head")

    def __init__(
        self,
        num_classes: int,
        num_clients: int,
        backbone: nn.Module,
        training: LocalTraining = LocalTraining(lr=0.005),
        visual_prompt: PixelPrompt | None = None,
    ) -> None:
        super().__init__(num_clients)
        self.backbone = backbone
        self.head = LinearHead(backbone.num_features, num_classes)  # type: ignore[arg-type]
        self.training_settings = training
        self.visual_prompt = visual_prompt
        if visual_prompt is not None:
            self.personal = (*self.personal, "visual_prompt")

    def prompted(self, x: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
        """Images [B, 3, H, W] with the client's prompt on them, if there is one."""
        return x if self.visual_prompt is None else self.visual_prompt(x, noise)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] of images [B, 3, H, W] that have their prompt on them already."""
        return self.head(self.backbone(x))

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Cross-entropy in the prompt's phase, the method's objective in its own."""
        if self.visual_prompt is not None and batch.phase == 0:
            return cross_entropy(self.client_logits(client, batch), batch.y, batch.mask)
        return self.model_loss(client, batch)

    def model_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """The objective under which the model is trained: cross-entropy of the prompted images."""
        return cross_entropy(self.client_logits(client, batch), batch.y, batch.mask)

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Logits [B, C] of the images under the client's prompt."""
        return self(self.prompted(batch.x, batch.noise))

    def draw_noise(self, generator: torch.Generator, batch_size: int, stage: Stage) -> dict[str, Tensor]:
        """What the prompt needs of chance."""
        return {} if self.visual_prompt is None else self.visual_prompt.draw(generator)

    def local_phases(self) -> list[Phase]:
        """The prompt, if there is one; then the model."""
        prompt = self.visual_prompt
        return [*([] if prompt is None else [prompt.training_settings.phase("visual_prompt")]), *self.model_phases()]

    def model_phases(self) -> list[Phase]:
        """Backbone and head together."""
        return [self.training_settings.phase("backbone", "head")]
