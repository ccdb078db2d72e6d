"""pFedPrompt: PromptFL, and at each client an attention on its own images that has no parameters."""

from typing import Any, Literal

import torch
from torch import Tensor

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Client, MiniBatch, Stage
from benchmark.ranges import NonNegativeFloat
from methods.attention import memory_attention, spatial_attention
from methods.losses import cross_entropy
from methods.promptfl import PromptFL


class PFedPrompt(PromptFL):
    """pFedPrompt (Guo, Guo, Wang, "pFedPrompt: Learning Personalized Prompt for Vision-Language Models", WWW 2023).

    The context p is learned and averaged as in PromptFL, and it alone is sent: the global consensus of the users. The
    attention on a client's own images has no parameters and never leaves it. Keys K_k are the features of its training
    images, without augmentation, values V_k their labels; an image with features f has the logits
    ``s f^T W(p) + alpha exp(-beta (1 - f K_k^T)) V_k``. With ``alpha=0`` it is PromptFL; no logit of a class that the
    client does not hold is ever raised.

    Readings: no code is public and the paper's own description of the attention was not at hand; this is the
    training-free form of Tip-Adapter (Zhang et al., ECCV 2022), whose first values are ``alpha=1``, ``beta=1``. In
    training it is off, and ``lfa_in_train`` adds it there too (an image then finds itself in the memory).
    ``lfa="spatial"`` is the other form, CALIP's, which remembers nothing:
    ``s (f^T W + b2 f^T W_a + b3 f_a^T W)``, see ``spatial_attention``; CALIP searches b2 and b3 for each data set, and
    0.1 is a choice. Further arguments as ``PromptFL``.

    Args:
        lfa: local feature attention: ``memory`` or ``spatial``.
        alpha: weight of the memory.
        beta: sharpness of the memory.
        b2: weight of the attended classes.
        b3: weight of the attended image.
        lfa_in_train: use the attention in training too.

    Raises:
        ConfigurationError: an unknown ``lfa``, or an image tower without positions for the spatial one.
    """

    clip_class = PromptedCLIP

    def __init__(
        self,
        *arguments: Any,
        lfa: Literal["memory", "spatial"] = "memory",
        alpha: NonNegativeFloat = 1.0,
        beta: NonNegativeFloat = 1.0,
        b2: NonNegativeFloat = 0.1,
        b3: NonNegativeFloat = 0.1,
        lfa_in_train: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.lfa, self.lfa_in_train = lfa, lfa_in_train
        self.alpha, self.beta, self.b2, self.b3 = alpha, beta, b2, b3
        if lfa == "spatial":
            needs = "PFedPrompt with lfa=spatial looks at the positions of an image"
            self.clip.need_image_tower("vit", "resnet", needs=needs, otherwise="or lfa=memory")
        else:
            self.inputs = ("features", "own_images")

    @property
    def per_example(self) -> bool:  # type: ignore[override]
        """Return whether no other image takes part in an image's loss, as the memory's do in training."""
        return self.lfa == "spatial" or not self.lfa_in_train

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """Return features of images [B, 3, H, W], [B, e]; for the spatial form of their positions too, [B, M, e]."""
        if self.lfa == "memory":
            return super().frozen_features(x)
        image, positions = self.clip.spatial_features(x)
        return {"image": image, "positions": positions}

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Add to PromptFL's, where the memory takes part, the one-hot labels that it votes with, ``votes`` [n, C]."""
        prepared = super().prepare(client, stage, split)
        if "own_images" in self.inputs and (stage is Stage.EVALUATE or self.lfa_in_train):
            prepared["votes"] = self.memory_values(client, split)
        return prepared

    def attention(self, client: Client, batch: MiniBatch, classes: Tensor) -> Tensor:
        """Return what ONE client adds to PromptFL's logits, [B, C]; ``classes`` are text features [C, e]."""
        images = self.image_features(batch)
        if self.lfa == "memory":
            keys, votes = client.own_images["image"], client.prepared["votes"]
            return self.alpha * memory_attention(images, keys, votes, self.beta)
        to_classes, to_image = spatial_attention(images, batch.features["positions"], classes)
        return self.clip.logit_scale * (self.b2 * to_classes + self.b3 * to_image)

    def memory_values(self, client: Client, split: str) -> Tensor:
        """Return the one-hot labels [n, C] of ONE client's memory among a split's classes; zeros for others."""
        classes = self.classes_of(split)
        label, mask = client.own_images["label"].unsqueeze(1), client.own_images["mask"].unsqueeze(1)
        return ((label == torch.tensor(list(classes), device=label.device)) & mask).to(self.dtype)

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy, by default of PromptFL's logits."""
        if not self.lfa_in_train:
            return super().client_loss(client, batch)
        classes = self.text_features(batch.split)
        logits = self.logits(self.image_features(batch), classes) + self.attention(client, batch, classes)
        return cross_entropy(logits, batch.y, batch.mask)

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return PromptFL's logits with the attention."""
        return super().client_logits(client, batch) + self.attention(client, batch, client.prepared["text"])
