"""ATPFL: TPFL with a contrast between the received prompts and the client's previous ones, in both modalities."""

import copy
import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmark.contract import Client, LocalTraining, MiniBatch, Phase, Stage
from benchmark.ranges import NonNegativeFloat, PositiveFloat
from methods.losses import cross_entropy, masked_mean, model_contrast
from methods.tpfl import TPFL

Prompts = dict[str, Tensor]


class ATPFL(TPFL):
    """ATPFL, augmented TPFL (Zhao et al., "Inclusive Data Representation in Federated Learning", UbiComp/ISWC 2023
    Companion).

    Objective (Eq. 5) ``l_con + mu (l_aug(z_tau, z_tau_g, z_tau_p) + l_aug(z_v, z_v_g, z_v_p))`` with TPFL's l_con and
    ``l_aug(z, z_g, z_p) = -log(e^{cos(z,z_g)/G} / (e^{cos(z,z_g)/G} + e^{cos(z,z_p)/G}))``. z_tau are the text features
    of all classes (compared class by class, mean over the classes), z_v the features of the prompted images (image by
    image, mean over the mini-batch); _g is under the received prompts, _p under the client's previous ones, both
    without gradient. Server, message and evaluation are TPFL's. With ``mu=0`` it is TPFL bit for bit.

    Readings: previous prompts are those at the end of the client's last participation, as in MOON and in the caption of
    the paper's Figure 1; before the first they are the received ones, so that each l_aug is log 2 and has no gradient.
    The text can also be read as the prompts one local step ago: ``prev="step"``; a round's first step then compares
    with the end of the last participation. mu and G are not given: 1, and 0.5 as in MOON. Further
    arguments as ``TPFL``.

    Args:
        mu: weight of the contrasts.
        temperature: G.
        prev: what the previous prompts are, of the last ``round`` or of the last ``step``.

    Raises:
        ConfigurationError: an unknown ``prev``, a temperature not above 0.
    """

    per_example = True

    def __init__(
        self,
        *arguments: Any,
        mu: NonNegativeFloat = 1.0,
        temperature: PositiveFloat = 0.5,
        prev: Literal["round", "step"] = "round",
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.remembers = self.shared if mu else ()
        self.mu = mu
        self.temperature = temperature
        self.by_step = prev == "step" and mu != 0
        if self.by_step:  # follow the prompts one step behind: moved by ``follow`` alone
            self.previous_context = nn.Parameter(self.context.detach().clone())
            self.previous_visual_prompt = copy.deepcopy(self.visual_prompt)
            self.personal = ("previous_context", "previous_visual_prompt")

    # ------------------------------------------------------------------ the previous prompts

    def received_prompts(self, client: Client) -> Prompts:
        """Return the global prompts that ONE client received in this round."""
        return {name: client.received[name] for name in client.previous}

    def has_moved(self, client: Client) -> Tensor:
        """Say whether ONE client has taken a step in this round, a boolean scalar."""
        received = self.received_prompts(client)
        return torch.stack([(client.parameters[name] != value).any() for name, value in received.items()]).any()

    def previous_prompts(self, client: Client) -> tuple[Prompts, Tensor]:
        """Return ONE client's previous prompts, and whether there are any: else they are the received ones."""
        previous = {name: client.previous[name] for name in client.previous}
        known = client.participated
        if self.by_step:
            moved = self.has_moved(client)
            behind = {name: client.parameters[f"previous_{name}"].detach() for name in previous}
            previous = {name: torch.where(moved, behind[name], value) for name, value in previous.items()}
            known = known | moved
        return previous, known

    def follow(self, client: Client, update: Prompts) -> Prompts:
        """Move the prompts one step behind to where the prompts are before this step."""
        own = client.parameters
        return {n: own[n.removeprefix("previous_")] - own[n] for n in update if n.startswith("previous_")}

    def local_phases(self) -> list[Phase]:
        """Train both prompts; what follows them takes no step of its own."""
        phase = self.training_settings.phase(*self.shared)
        if self.by_step:
            rest = LocalTraining(lr=0.0).group(*self.personal)
            phase = replace(self.training_settings.phase_of(*phase.groups, rest), transform=self.follow)
        return [phase]

    # ------------------------------------------------------------------ the objective

    def prepare(self, client: Client, stage: Stage, split: str) -> Prompts:
        """Return, in training, the text features [C, e] under the received and, if it rests, the previous context."""
        if stage is Stage.EVALUATE or not self.mu:
            return super().prepare(client, stage, split)
        prepared = {"text_received": self.text_features_under(self.received_prompts(client), split)}
        if not self.by_step:
            prepared["text_previous"] = self.text_features_under(self.previous_prompts(client)[0], split)
        return prepared

    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        """Return cross-entropy plus both contrasts, whose sum is reported as ``contrast``."""
        if not self.mu:
            return super().client_loss(client, batch)
        text, images = self.text_features(batch.split), self.image_features(batch)
        with torch.no_grad():
            previous, known = self.previous_prompts(client)
            images_received = self.image_features_under(self.received_prompts(client), batch)
            images_previous = self.image_features_under(previous, batch)
        of_text = self.contrast_of_text(client, text, batch.split)
        of_images = masked_mean(model_contrast(images, images_received, images_previous, self.temperature), batch.mask)
        # Without previous prompts both are log 2 with no gradient at all, and not one of rounding errors.
        contrast = torch.where(known, of_text + of_images, 2 * math.log(2))
        loss = cross_entropy(self.logits(images, text), batch.y, batch.mask) + self.mu * contrast
        return loss, {"contrast": contrast}

    def contrast_of_text(self, client: Client, text: Tensor, split: str) -> Tensor:
        """Return the contrast of ONE client's text features, [C, e]."""
        with torch.no_grad():
            if self.by_step:
                previous = self.text_features_under(self.previous_prompts(client)[0], split)
            else:
                previous = client.prepared["text_previous"]
        return model_contrast(text, client.prepared["text_received"], previous, self.temperature).mean()

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return the contrast of text, which reads no image."""
        if not self.mu:
            return None
        known = self.previous_prompts(client)[1]
        of_text = self.contrast_of_text(client, self.text_features("train"), "train")
        return self.mu * torch.where(known, of_text, 0.0)

    def text_features_under(self, prompts: Prompts, split: str) -> Tensor:
        """Return text features [C, e] of a split's classes under other prompts."""
        return self.clip.text_features(self.class_prompts(split), prompts["context"])

    def image_features_under(self, prompts: Prompts, batch: MiniBatch) -> Tensor:
        """Return features [B, e] of a mini-batch under other prompts."""
        prefix = "visual_prompt."
        own = {name.removeprefix(prefix): value for name, value in prompts.items() if name.startswith(prefix)}
        return self.clip.image_features(functional_call(self.visual_prompt, own, (batch.x, batch.noise)))
