"""LocalCLIP: every client fine-tunes a whole CLIP of its own and nothing is sent."""

from torch import Tensor

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import LocalTraining, MiniBatch, Phase
from methods.zeroshotclip import ZeroShotCLIP


class LocalCLIP(ZeroShotCLIP):
    """Full-model fine-tuning, one reading of the local training in ATPFL (Zhao et al., UbiComp/ISWC'23 Companion).

    The paper does not say what is trained locally, and names full-model fine-tuning as what may forget. Here both
    towers and the logit scale are trained by ``CE_k``, with hand-written prompts; ``CoOp`` is the other reading. The
    table of token embeddings rests: the class names would move a few of its rows. Each client goes on from its own
    weights in the rounds in which it is selected. Nothing is sent.

    Args:
        num_clients: N.
        class_names: names of all classes, in the order of the labels.
        clip: CLIP's towers, which every client starts from.
        template: a text with ``{}`` for the name.
        training: of the towers; ATPFL's is Adam with lr 1e-3 and a cosine schedule.
    """

    personal = (
        "clip.model.visual",
        "clip.model.positional_embedding",
        "clip.model.transformer",
        "clip.model.ln_final",
        "clip.model.text_projection",
        "clip.model.logit_scale",
    )
    inputs = ("images",)  # no image goes through a frozen tower

    def __init__(
        self,
        num_clients: int,
        class_names: list[str],
        clip: PromptedCLIP,
        template: str = "a photo of a {}.",
        training: LocalTraining = LocalTraining(lr=1e-3, epochs=1, optimizer="adam", schedule="cosine"),
    ) -> None:
        super().__init__(num_clients, class_names, clip, template)
        self.training_settings = training

    def image_features(self, batch: MiniBatch) -> Tensor:
        """Features [B, e] from the client's own tower."""
        return self.clip.image_features(batch.x)

    def local_phases(self) -> list[Phase]:
        """The towers."""
        return [self.training_settings.phase(*self.personal)]
