"""The base of FedAvg and of the methods derived from it: a model with a prompt on the pixels."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmark.backbones.pixel_prompts import PixelPrompt
from benchmark.contract import Client, MiniBatch, Phase, Stage
from methods.classifier import ClassifierMethod
from methods.losses import cross_entropy


class PixelPromptMethod(ClassifierMethod):
    """Base of FedAvg and its relatives, which can be given a prompt on the pixels (the ``+PT`` rows of Li et al.,
    "Visual Prompt Based Personalized Federated Learning").

    The prompt is the same on all clients at the start, is each client's own from then on and is never sent. A round
    then begins with a phase that trains it alone, by cross-entropy, while the model rests; the method's own phases
    follow while the prompt rests. Arguments beside the prompt are those of ``ClassifierMethod``.

    Args:
        visual_prompt: a prompt on the pixels, with its own training, or None.
    """

    per_example = True

    def __init__(self, *arguments: Any, visual_prompt: PixelPrompt | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.visual_prompt = visual_prompt
        if visual_prompt is not None:
            self.personal = (*self.personal, "visual_prompt")

    # ------------------------------------------------------------------ what a method writes in its own way

    def model_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return the objective under which the model is trained; cross-entropy of the prompted images by default."""
        return cross_entropy(self.client_logits(client, batch), batch.y, batch.mask)

    def model_phases(self) -> list[Phase]:
        """List the phases that train the model; backbone and head together by default."""
        return [self.training_settings.phase("backbone", "head")]

    # ------------------------------------------------------------------ the contract

    def prompted(self, x: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
        """Put the client's prompt on images [B, 3, H, W], if there is one."""
        return x if self.visual_prompt is None else self.visual_prompt(x, noise)

    def is_models(self, phase: int) -> bool:
        """Return whether the model is trained in a phase, and not the prompt."""
        return self.visual_prompt is None or phase > 0

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy in the prompt's phase, the method's objective in its own."""
        if self.is_models(batch.phase):
            return self.model_loss(client, batch)
        return PixelPromptMethod.model_loss(self, client, batch)

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return logits [B, C] of the images under the client's prompt."""
        return self(self.prompted(batch.x, batch.noise))

    def draw_noise(self, generator: torch.Generator, batch_size: int, stage: Stage) -> dict[str, Tensor]:
        """Draw what the prompt needs, if there is one."""
        return {} if self.visual_prompt is None else self.visual_prompt.draw(generator)

    def local_phases(self) -> list[Phase]:
        """Train the prompt, if there is one; then the model."""
        prompt = self.visual_prompt
        return [*([] if prompt is None else [prompt.training_settings.phase("visual_prompt")]), *self.model_phases()]
