"""Optimal transport between an image's regions and several text prompts, and the base of the methods that use it."""

import math
from typing import Any

import torch
from torch import Tensor

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.masked import at_least_float32, in_float32
from benchmark.ranges import PositiveFloat, PositiveInt
from methods.text_prompt import TextPromptMethod


def transport_plan(similarity: Tensor, gamma: float, eps: float, iterations: int) -> Tensor:
    """Entropic plan T that brings a mass gamma from M patches to J prompts, by alternating projections.

    Every prompt receives gamma / J exactly. A patch gives at most 1 / M: the others may stay unmatched (gamma = 1:
    exactly 1 / M, Sinkhorn's iteration, since the bound would be reached too slowly). ``T = diag(u) K diag(v)`` with
    ``K = exp(-(1 - s) / eps)``, ``u = min(1, (1 / M) / K v)``, ``v = (gamma / J) / K^T u``, in logarithms.

    Args:
        similarity: s, [..., M, J].
        gamma: mass, above 0 and at most 1.
        eps: weight of the entropy.
        iterations: the same for all, so that a plan does not depend on what else is in the batch.

    Returns:
        T, [..., M, J], without gradient.
    """
    kernel = (at_least_float32(similarity.detach()) - 1) / eps
    patches, prompts = kernel.shape[-2:]
    to_prompts = kernel.new_zeros(*kernel.shape[:-2], 1, prompts)
    for _ in range(iterations):
        from_patches = -math.log(patches) - (kernel + to_prompts).logsumexp(-1, keepdim=True)
        if gamma < 1:
            from_patches = from_patches.clamp(max=0)
        to_prompts = math.log(gamma / prompts) - (kernel + from_patches).logsumexp(-2, keepdim=True)
    return (from_patches + kernel + to_prompts).exp()


class TransportMethod(TextPromptMethod):
    """Base of the methods that score a class by a transport of its J text features w_jc to an image's M patches F_m.

    ``logit_c = s sum_mj T_mj F_m . w_jc`` with a plan T (``transport_plan``) of that image and class, which has no
    gradient. Patches are all output tokens of the image tower but the class token, normed and projected like it (for a
    ResNet the attention pool's outputs at each position); the pooled feature is not used. They are kept where images
    are not augmented: M x e numbers an image. Further arguments as ``TextPromptMethod``.

    Args:
        eps: weight of the plan's entropy.
        iterations: of the plan.

    Raises:
        ConfigurationError: an image tower without positions.
    """

    clip_class = PromptedCLIP
    per_example = True
    gamma: float = 1.0  #: share of an image that is matched

    def __init__(
        self, *arguments: Any, eps: PositiveFloat = 0.1, iterations: PositiveInt = 100, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        needs = f"{type(self).__name__} matches the positions of an image with texts"
        self.clip.need_image_tower("vit", "resnet", needs=needs)
        self.eps, self.iterations = eps, iterations

    def prompts(self) -> Tensor:
        """Return the client's contexts, [J, L, w]."""
        return self.context

    def text_features(self, split: str) -> Tensor:
        """Return the features of a split's classes under each context, [J, C, e], L2-normalised."""
        return self.clip.text_features(self.class_prompts(split), self.prompts())

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """Return the patch features of images [B, 3, H, W], as ``image`` [B, M, e], L2-normalised."""
        return {"image": self.clip.spatial_features(x)[1]}

    @in_float32
    def logits(self, images: Tensor, classes: Tensor) -> Tensor:
        """Return logits [B, C] of patch features [B, M, e] and text features [J, C, e]."""
        similarity = torch.einsum("bme,jce->bcmj", images, classes)
        plan = transport_plan(similarity, self.gamma, self.eps, self.iterations)
        return self.clip.logit_scale * (plan * similarity).sum((-2, -1))
