"""LocalCLIP: every client fine-tunes a whole CLIP of its own and nothing is sent."""

from typing import Any

from torch import Tensor

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import LocalTraining, MiniBatch, Phase
from methods.zeroshotclip import ZeroShotCLIP


class LocalCLIP(ZeroShotCLIP):
    """Full-model fine-tuning, one reading of the local training in ATPFL (Zhao et al., UbiComp/ISWC'23 Companion).

    The paper does not say what is trained locally, and names full-model fine-tuning as what may forget. Here both
    towers and the logit scale are trained by ``CE_k``, with hand-written prompts; ``CoOp`` is the other reading. The
    table of token embeddings rests: the class names would move a few of its rows. Each client goes on from its own
    weights in the rounds in which it is selected. Nothing is sent. Further arguments as ``ZeroShotCLIP``.

    Args:
        training: of the towers; ATPFL's is Adam with lr 1e-3 and a cosine schedule.

    Raises:
        ConfigurationError: an image tower that is called as a whole.
    """

    clip_class = PromptedCLIP
    paper_names = ("Local training",)
    personal = (
        "clip.model.visual",
        "clip.model.positional_embedding",
        "clip.model.transformer",
        "clip.model.ln_final",
        "clip.model.text_projection",
        "clip.model.logit_scale",
    )
    per_example = True
    inputs = ("images",)  # no image goes through a frozen tower

    def __init__(
        self,
        *arguments: Any,
        training: LocalTraining = LocalTraining(lr=1e-3, epochs=1, optimizer="adam", schedule="cosine"),
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.clip.need_image_tower("vit", "resnet", needs="LocalCLIP trains the image tower")
        self.training_settings = training

    def image_features(self, batch: MiniBatch) -> Tensor:
        """Return features [B, e] from the client's own tower."""
        return self.clip.image_features(batch.x)

    def local_phases(self) -> list[Phase]:
        """Train the towers."""
        return [self.training_settings.phase(*self.personal)]
