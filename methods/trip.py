"""TRIP: FedAvg of several text contexts, which each image mixes by how its tokens fall into clusters."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Client, LocalTraining, MiniBatch, Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.ranges import Few, NonNegativeFloat, PositiveInt
from benchmark.seeds import derived_seed
from benchmark.server import ServerRule
from methods.losses import cross_entropy, own_similarities, taught_entropy
from methods.templates import TaughtByTemplates
from methods.token_routing import orthonormal_keys, routing_weights, start_tokens
from methods.trajectory import BetaTrajectory

#: As in its code, but for AdamW with betas (0.9, 0.98), whose rate falls to 0.8 of itself in each round.
EXPERT_TRAINING = LocalTraining(lr=5e-4, epochs=1, optimizer="adam", schedule="cosine")


class TRIP(TaughtByTemplates):
    """TRIP (Gong et al., "Token-Level Prompt Mixture with Parameter-Free Routing for Federated Domain
    Generalization", arXiv 2504.21063, 2025).

    K contexts of n tokens, the experts P_k, are mixed for each image: ``P(x) = sum_k omega_k(x) P_k``. The weights are
    not trained. CLIP's output tokens of the image fall into K clusters of bounded size, which are matched to K fixed
    orthonormal keys, and omega_k is the share of tokens in the cluster of key k (``methods.token_routing``). Clusters
    have room for each token once in training, so that some stay out, and twice in an evaluation. Objective:
    ``CE(s) + alpha H(z, s)`` with logits s of an image among its own text features, and z of the frozen model under a
    mean of templates. The server averages the experts weighted with n_k; evaluated is their Beta-weighted mean over the
    rounds (``BetaTrajectory``), which training never sees. Message: K x n x w numbers each way, 131,072 for ViT-B/16.
    With K = 1 and ``alpha=0`` it is PromptFL, up to the rounding of a text pass for each image.

    Readings: the paper could not be read beyond its abstract, formulas are its code's. Adam has torch's betas and no
    decay, and its rate falls with a cosine, where the code's AdamW has (0.9, 0.98) and 0.8^t. Clusters start from
    tokens that are drawn for each image, where the code draws anew in every run; several empty ones start anew at as
    many tokens. The sums on the server have 32 bits. The code's mean over the rounds begins with the untrained start
    (``average="beta"``), 18% of it after 15 rounds. Images that are augmented are so for their tokens too.

    The text tower runs B x C times a step: mini-batches (16) and ``data.eval_batch_size`` should be small. CLIP's image
    tower must be a ViT. Further arguments as ``TaughtByTemplates``.

    Args:
        num_experts: K, at most the tokens of an image and their width.
        num_context: n, tokens of each expert.
        expert_init: all from the ``same`` draw, so that only omega tells them apart, or ``independent``.
        alpha: weight of the teacher.
        average: evaluate the mean over the rounds without the start, with it (``beta``), or the last round (``off``).
        average_rounds: T of the mean's weights; None for the run's. A run that may be continued beyond these says it.
        training: of the experts.

    Raises:
        ConfigurationError: an image tower that is no ViT; more experts than tokens, or than these have numbers;
            independent experts that start from words.
    """

    clip_class = PromptedCLIP
    per_example = True
    keys: Tensor

    def __init__(
        self,
        *arguments: Any,
        num_experts: Few = 8,
        num_context: Few = 32,
        expert_init: Literal["same", "independent"] = "same",
        alpha: NonNegativeFloat = 1.0,
        average: Literal["beta_no_init", "beta", "off"] = "beta_no_init",
        average_rounds: PositiveInt | None = None,
        training: LocalTraining = EXPERT_TRAINING,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, num_context=num_context, training=training, **settings)
        self.clip.need_image_tower("vit", needs="TRIP routes by the tokens of a ViT")
        tokens, width = 1 + self.clip.num_patches, self.clip.vision_width
        if num_experts > min(tokens, width):
            raise ConfigurationError(
                f"TRIP: num_experts={num_experts}, but an image has {tokens} tokens of {width} numbers; give at most "
                f"{min(tokens, width)}"
            )
        if expert_init == "same":
            experts = self.context.detach().expand(num_experts, -1, -1)
        elif settings.get("init_words") is not None:
            raise ConfigurationError("TRIP: init_words start all experts alike; leave expert_init=independent out")
        else:
            experts = self.clip.initial_context(num_experts * num_context).unflatten(0, (num_experts, num_context))
        self.context = nn.Parameter(experts.clone())
        self.register_buffer("keys", orthonormal_keys(num_experts, width))
        self.routing_seed = derived_seed(torch.initial_seed(), "routing")
        self.alpha = alpha
        averaged = partial(BetaTrajectory, average_rounds, average == "beta")
        self._new_rule = ServerRule if average == "off" else averaged

    def frozen_features(self, x: Tensor) -> Values:
        """Return features of images, as ``image`` [B, e], and omega [B, K], as ``training`` and ``test``."""
        images, tokens = self.clip.features_and_tokens(x)
        start = start_tokens(x, tokens.shape[1], len(self.keys), self.routing_seed)
        weights = partial(routing_weights, tokens, start, self.keys)
        return {"image": images, "training": weights(1), "test": weights(2)}

    def mixed(self, weights: Tensor) -> Tensor:
        """Return the contexts of images with weights [B, K], [B, n, w]."""
        return torch.einsum("bk,knw->bnw", weights.to(self.context), self.context)

    def logits_per_image(self, images: Tensor, weights: Tensor, split: str) -> Tensor:
        """Return logits [B, C] of image features [B, e], each among text features of its own."""
        classes = self.clip.text_features(self.class_prompts(split), self.mixed(weights))
        return self.clip.logit_scale * own_similarities(images, classes)

    def forward(self, x: Tensor, split: str = "test") -> Tensor:
        """Classify images [B, 3, H, W] among the classes of a split, by default the own test set's: logits [B, C]."""
        features = self.frozen_features(x)
        return self.logits_per_image(features["image"], features["test"], split)

    def prepare(self, client: Client, stage: Stage, split: str) -> Values:
        """Return, in training, the frozen model's text features, as ``frozen`` [C, e]."""
        return {"frozen": self.frozen_text(split)} if stage is not Stage.EVALUATE and self.alpha else {}

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy and, weighted, the teacher's."""
        images = batch.features["image"]
        logits = self.logits_per_image(images, batch.features["training"], batch.split)
        loss = cross_entropy(logits, batch.y, batch.mask)
        if not self.alpha:
            return loss
        teacher = self.logits(images, client.prepared["frozen"])
        return loss + self.alpha * taught_entropy(logits, teacher, batch.mask)

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return logits, each image among text features of its own."""
        return self.logits_per_image(batch.features["image"], batch.features["test"], batch.split)

    def make_server(self) -> ServerRule:
        """Return the server that averages over the rounds, unless it does not."""
        return self._new_rule()
