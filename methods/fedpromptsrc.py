"""FedPromptSRC: FedAvg of deep prompts in both towers of CLIP, held near what CLIP does without them."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmark.backbones.parts import Prompts
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Client, MiniBatch, Stage
from benchmark.masked import masked_mean
from benchmark.ranges import Few, NonNegativeFloat, PositiveFloat
from benchmark.seeds import keyed_initialization
from benchmark.server import ServerRule
from methods.losses import cross_entropy, divergence_from_frozen
from methods.templates import TaughtByTemplates
from methods.trajectory import AveragedTrajectory


class FedPromptSRC(TaughtByTemplates):
    """FedAvg of PromptSRC (Khattak et al., "Self-regulating Prompts: Foundational Model Adaptation without
    Forgetting", ICCV 2023).

    Each of the first ``depth`` layers of both towers has prompts of its own, n tokens each: those of the text tower
    begin as a context and take its place from layer to layer, those of the image tower stand behind the patches. With
    features w_c, f_b and logits of the prompted model, and w_c^0, f_b^0 of the frozen one under a mean of templates,
    the objective is ``CE + 25 mean |w - w^0| + 10 mean |f - f^0| + KL / C`` (``divergence_from_frozen``), with means
    over all numbers. All prompts are shared and averaged weighted with n_k. Evaluated with the Gaussian-weighted mean
    of the global prompts over the rounds (``AveragedTrajectory``), which training never sees. Message: depth x n x
    (w + v) numbers each way, 46,080 for ViT-B/16. With weights of 0 and no trajectory it is FedAvg of independent
    prompts.

    Readings: the paper trains one centralised model, and averages over its epochs; federated, rounds take their place.
    Its mean and spread are 15 and 1 of 20 epochs; here 0.75 T and 0.05 T of T planned rounds. The templates are the
    first 60 of open_clip's list for ImageNet. The divergence is divided by the classes too, as in the code.

    CLIP's image tower must be a ViT. Further arguments as ``TaughtByTemplates``.

    Args:
        num_context: n, tokens of each prompt, in both towers.
        depth: layers with prompts, 1 for the first alone.
        init_words: words the context starts from; None draws it from N(0, 0.02^2), as all other prompts are.
        text_weight: of the distance of text features.
        image_weight: of the distance of image features.
        logit_weight: of the divergence.
        trajectory: ``server``, the mean over the rounds; ``none`` evaluates the last round's prompts.
        trajectory_mean: the round with the greatest weight; None is 0.75 T. A run that may be continued beyond T rounds
            says both.
        trajectory_spread: in rounds; None is 0.05 T.

    Raises:
        ConfigurationError: an image tower that is no ViT; a depth that a tower has not; ``init_words`` of fewer than
            n tokens.
    """

    clip_class = PromptedCLIP
    shared: tuple[str, ...] = ("context", "deep_context", "image_prompts")
    inputs = ("images", "features")
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        num_context: Few = 4,
        depth: Few = 9,
        init_words: str | None = "a photo of a",
        text_weight: NonNegativeFloat = 25.0,
        image_weight: NonNegativeFloat = 10.0,
        logit_weight: NonNegativeFloat = 1.0,
        trajectory: Literal["server", "none"] = "server",
        trajectory_mean: PositiveFloat | None = None,
        trajectory_spread: PositiveFloat | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, num_context=num_context, init_words=init_words, **settings)
        clip = self.clip
        clip.need_image_tower("vit", needs="FedPromptSRC puts prompts between the patches of a ViT")
        for tower in (clip.text_tower, clip.image_tower):
            tower.layers_from(depth, "FedPromptSRC: depth")
        self.weights = (text_weight, image_weight, logit_weight)
        with keyed_initialization("PromptSRC"):
            self.image_prompts = nn.Parameter(0.02 * torch.randn(depth, num_context, clip.vision_width))
            deep = 0.02 * torch.randn(depth - 1, num_context, clip.text_width)
        self.deep = depth > 1
        if self.deep:
            self.deep_context = nn.Parameter(deep)
        else:
            self.shared = ("context", "image_prompts")
        averaged = partial(AveragedTrajectory, trajectory_mean, trajectory_spread)
        self._new_rule = averaged if trajectory == "server" else ServerRule

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Return, in training, the frozen model's text features, as ``frozen`` [C, e]."""
        if stage is Stage.EVALUATE or not any(self.weights):
            return super().prepare(client, stage, split)
        return {"frozen": self.frozen_text(split)}

    def text_features(self, split: str) -> Tensor:
        """Return ONE client's features of the classes of a split under all text prompts, [C, e]."""
        deep = [Prompts(self.deep_context, first_layer=1)] if self.deep else []
        return self.clip.text_features(self.class_prompts(split), self.context, *deep)

    def image_features(self, batch: MiniBatch) -> Tensor:
        """Return ONE client's features of a mini-batch among all image prompts, [B, e]."""
        return self.clip.image_features(batch.x, self.image_prompts)

    def forward(self, x: Tensor, split: str = "test") -> Tensor:
        """Classify images [B, 3, H, W] among the classes of a split, by default the own test set's: logits [B, C]."""
        return self.logits(self.clip.image_features(x, self.image_prompts), self.text_features(split))

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy and the three distances to the frozen model."""
        classes, images = self.text_features(batch.split), self.image_features(batch)
        logits = self.logits(images, classes)
        loss = cross_entropy(logits, batch.y, batch.mask)
        if not any(self.weights):
            return loss
        frozen_images, frozen_classes = batch.features["image"], client.prepared["frozen"]
        far_images = masked_mean((images - frozen_images).abs().mean(1), batch.mask)
        far_logits = divergence_from_frozen(logits, self.logits(frozen_images, frozen_classes), batch.mask)
        _, image_weight, logit_weight = self.weights
        return loss + self.far_classes(classes, client) + image_weight * far_images + logit_weight * far_logits

    def far_classes(self, classes: Tensor, client: Client) -> Tensor:
        """Return the weighted distance of text features."""
        return self.weights[0] * (classes - client.prepared["frozen"]).abs().mean()

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return the distance of text features, which reads no image."""
        return self.far_classes(self.text_features("train"), client) if any(self.weights) else None

    def make_server(self) -> ServerRule:
        """Return the server that averages over the rounds, unless it does not."""
        return self._new_rule()
