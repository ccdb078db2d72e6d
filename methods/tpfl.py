"""TPFL: FedAvg of a text prompt and a prompt on the pixels for a frozen CLIP."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmark.backbones.pixel_prompts import PaddingPrompt, PixelPrompt
from benchmark.contract import LocalTraining, MiniBatch, Stage
from methods.text_prompt import TextPromptMethod

#: Adam with 0.001 and a cosine over 20 rounds are the paper's; it does not say how many epochs a round has.
TWIN_TRAINING = LocalTraining(lr=0.001, epochs=1, optimizer="adam", schedule="cosine")


class TPFL(TextPromptMethod):
    """TPFL (Zhao et al., "Inclusive Data Representation in Federated Learning", UbiComp/ISWC 2023 Companion).

    Twin prompts: a text context tau and a prompt v on the pixels, both shared. Objective (Eq. 2): cross-entropy of
    ``s cos(g(tau_c), f(x + v))``; server (Eq. 3): both are averaged with the weights n_k. Evaluated with the global tau
    and v. Message: L x w numbers and those of v. With v resting at 0 it is PromptFL with Adam.

    Readings: the denominator of Eq. 2 runs over classes, as the text's p(y = c | x) says, not over images as printed;
    1 / Gamma is CLIP's own scale s; the context has 16 tokens; the paper names three templates of v and no size, taken
    is the frame of Bahng et al. (30 of 224 pixels). v starts at 0, so that round 0 is that of PromptFL.
    Further arguments as ``TextPromptMethod``.

    Args:
        visual_prompt: v; by default a frame of 30 / 224 of the image's side that starts at 0.
        training: of both prompts.

    Raises:
        ConfigurationError: an image tower that is called as a whole.
    """

    shared: tuple[str, ...] = ("context", "visual_prompt")
    per_example = True
    inputs = ("images",)  # no feature of an image is frozen: the prompt on it moves

    def __init__(
        self,
        *arguments: Any,
        visual_prompt: PixelPrompt | None = None,
        training: LocalTraining = TWIN_TRAINING,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, training=training, **settings)
        needs = f"{type(self).__name__} trains a prompt on pixels through the image tower"
        self.clip.need_image_tower("vit", "resnet", "named", needs=needs)
        side = self.clip.image_size[0]
        if visual_prompt is None:
            visual_prompt = PaddingPrompt(round(side * 30 / 224), side, init="zeros")
        self.visual_prompt = visual_prompt

    def forward(self, x: Tensor, split: str = "test", noise: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return logits [B, C] of images [B, 3, H, W]; ``noise`` is of ``draw_noise``, if the prompt needs any."""
        return self.logits(self.clip.image_features(self.visual_prompt(x, noise or {})), self.text_features(split))

    def image_features(self, batch: MiniBatch) -> Tensor:
        """Return features of the prompted images, [B, e]."""
        return self.clip.image_features(self.visual_prompt(batch.x, batch.noise))

    def draw_noise(self, generator: torch.Generator, batch_size: int, stage: Stage) -> dict[str, Tensor]:
        """Draw what the prompt on the pixels needs."""
        return self.visual_prompt.draw(generator)
