"""FedProGrad: PromptFL whose steps leave out what contradicts zero-shot CLIP."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad, vjp

from benchmark.contract import Client, MiniBatch, Stage
from benchmark.masked import in_float32, masked_mean
from benchmark.ranges import NonNegativeFloat, PositiveFloat
from methods.losses import cross_entropy
from methods.text_prompt import TextPromptMethod


def without_conflict(task: Tensor, general: Tensor, lam: float) -> Tensor:
    """Return ``g_d - lambda min(0, <g_d, u>) u`` with ``u = g_g / ||g_g||``: g_d without what contradicts g_g.

    Args:
        task: g_d, the gradient of the cross-entropy.
        general: g_g, the gradient of the distance to the teacher, of the same shape; where it is 0, g_d stays.
        lam: lambda, the share of the contradiction that is left out.
    """
    direction = general / general.square().sum().sqrt().clamp(min=1e-12)
    return task - lam * (task * direction).sum().clamp(max=0) * direction


@in_float32
def distance_to_teacher(student: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Return ``-T^2 mean_b sum_c softmax(z_b / T)_c log softmax(s_b / T)_c``.

    Args:
        student: logits s, [B, C].
        teacher: logits z, [B, C].
        mask: [B], the images that count.
        temperature: T.
    """
    soft = (teacher / temperature).softmax(1) * (student / temperature).log_softmax(1)
    return -(temperature**2) * masked_mean(soft.sum(1), mask)


class FedProGrad(TextPromptMethod):
    """FedAvg of ProGrad (Zhu et al., "Prompt-aligned Gradient for Prompt Tuning", ICCV 2023).

    Of a mini-batch come two gradients by the context: g_d of the cross-entropy, and g_g of the distance K to zero-shot
    CLIP under a template (``distance_to_teacher``). A step follows g_d without the component that contradicts g_g
    (``without_conflict``); momentum and weight decay act on what is left. The recorded loss is the cross-entropy. The
    server averages the context weighted with n_k; one global context is evaluated. Message: L x w numbers each way,
    as PromptFL's; the template's features are computed by every client itself. With ``lam=0`` it is PromptFL.

    Readings: the paper trains one centralised model; federated, the projection is a client's, of each mini-batch.
    lambda is the code's 1; it has 0.8 for Flowers, DTD and EuroSAT with 8 and 16 shots. ``mode=distill`` is what a
    re-implementation calls ProGrad, ``CE + lambda K``. The context has the family's 16 random tokens; the code's own
    start is ``init_words``, which stand at the context's end, with zeros before them. Its templates: "a type of pet, a
    photo of a {}.", "... of flower, ...", "... of aircraft, ..."; "a type of food, a photo of {}.", "a texture of {}.",
    "a centered satellite photo of {}." and "a photo of a person doing {}.". A projected gradient is no mean over
    images, so record-level privacy does not take it.

    Further arguments as ``TextPromptMethod``.

    Args:
        lam: lambda.
        temperature: T, of both softmaxes in K.
        template: with ``{}`` for the name of a class, or ``own``: what the data set says of each class.
        mode: ``project`` or ``distill``.
    """

    per_example = False

    def __init__(
        self,
        *arguments: Any,
        lam: NonNegativeFloat = 1.0,
        temperature: PositiveFloat = 1.0,
        template: str = "a photo of a {}.",
        mode: Literal["project", "distill"] = "project",
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.lam, self.temperature, self.template, self.mode = lam, temperature, template, mode

    def initial_context(self, init_words: str | None) -> Tensor:
        """Return a random context, or zeros and, at its end, the words."""
        if init_words is None:
            return super().initial_context(None)
        count = min(self.num_context, len(self.clip.tokenizer.encode(init_words)))
        words = self.clip.initial_context(count, init_words)
        return torch.cat([words.new_zeros(self.num_context - count, self.clip.text_width), words])

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Return, in training, the teacher's text features, as ``template`` [C, e]."""
        if stage is Stage.EVALUATE or not self.lam:
            return super().prepare(client, stage, split)
        return {"template": self.template_features(split)}

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return the cross-entropy, whose gradient is the projected one."""
        if not self.lam:
            return super().client_loss(client, batch)
        images = self.image_features(batch)
        teacher = self.logits(images, client.prepared["template"])

        def task(classes: Tensor) -> Tensor:
            return cross_entropy(self.logits(images, classes), batch.y, batch.mask)

        def general(classes: Tensor) -> Tensor:
            return distance_to_teacher(self.logits(images, classes), teacher, batch.mask, self.temperature)

        if self.mode == "distill":
            classes = self.text_features(batch.split)
            return task(classes) + self.lam * general(classes)
        features_of = partial(self.clip.text_features, self.class_prompts(batch.split))
        classes, to_context = vjp(features_of, self.context.detach())[:2]
        (g_d,), (g_g,) = (to_context(grad(objective)(classes)) for objective in (task, general))
        follow = (without_conflict(g_d, g_g, self.lam).detach() * self.context).sum()
        return task(classes).detach() + follow - follow.detach()
