"""FedMaPLe: FedAvg of coupled deep prompts in both towers of CLIP."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.backbones.class_prompts import ClassPrompts
from benchmark.backbones.parts import Prompts
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import MiniBatch
from benchmark.errors import ConfigurationError
from benchmark.ranges import Few, FewOrNone
from benchmark.seeds import keyed_initialization
from methods.text_prompt import TextPromptMethod


class FedMaPLe(TextPromptMethod):
    """FedAvg of MaPLe (Khattak et al., "MaPLe: Multi-modal Prompt Learning", CVPR 2023).

    n context tokens before the class name, and J = depth - 1 deeper prompts of n tokens that take the context's place
    at the input of the text tower's layers 2 to depth. Each of these J + 1 prompts [n, w] goes through a linear map of
    its own to [n, v], which stands behind the patches at the input of the same layer of the image tower. All that is
    trained is shared: context, deeper prompts, maps. Evaluated with the global values. Message:
    ``depth (n w + (w + 1) v)`` numbers, 3,555,072 for ViT-B/16. With one client it is MaPLe.

    Readings: the initial values are those of MaPLe's code: the context starts from the first n words of ``init_words``
    and the rest of them stay where they were, between context and name; deeper prompts are drawn from N(0, 0.02^2); the
    J maps of the deeper prompts start alike. The rate is FedPGP's for all its methods, 0.001, where MaPLe has 0.0035.

    CLIP's image tower must be a ViT. Further arguments as ``TextPromptMethod``.

    Args:
        num_context: n, tokens of each prompt.
        depth: layers with prompts, 1 for the first alone.
        init_words: words the context starts from; None draws it from N(0, 0.02^2).

    Raises:
        ConfigurationError: an image tower that is no ViT; a depth that a tower has not; ``init_words`` of fewer
            than n words, or whose first n are not one token each.
    """

    clip_class = PromptedCLIP
    shared: tuple[str, ...] = ("context", "deep_context", "projection", "deep_projections")
    inputs = ("images",)
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        num_context: FewOrNone = 2,
        depth: Few = 9,
        init_words: str | None = "a photo of a",
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, num_context=num_context, init_words=init_words, **settings)
        clip = self.clip
        clip.need_image_tower("vit", needs="FedMaPLe puts prompts between the patches of a ViT")
        deepest = min(clip.text_depth, clip.vision_depth)
        if depth > deepest:
            raise ConfigurationError(
                f"FedMaPLe: depth={depth}, the towers have {clip.text_depth} (text) and {clip.vision_depth} (image) "
                f"layers; give 1 to {deepest}"
            )
        self.name_template = self.rest_of_words(init_words)
        with keyed_initialization("MaPLe"):
            self.projection = nn.Linear(clip.text_width, clip.vision_width)
            deep = nn.Linear(clip.text_width, clip.vision_width)
            drawn = 0.02 * torch.randn(depth - 1, num_context, clip.text_width)
        if depth > 1:
            self.deep_context = nn.Parameter(drawn)
            self.deep_projections = nn.ModuleList(copy.deepcopy(deep) for _ in range(depth - 1))
        else:
            self.shared = ("context", "projection")
        self.depth = depth

    def make_class_prompts(self, split: str) -> ClassPrompts:
        """Return the prompts of these classes: the rest of the initial words, and the names."""
        return self.clip.class_prompts(self.names_of(split), self.num_context, self.name_template)

    def image_prompts(self) -> Tensor:
        """Return ONE client's prompts of the image tower, [depth, n, v]: what the maps make of those of the text."""
        mapped = [self.projection(self.prompt())]
        if self.depth > 1:
            mapped += [layer(prompt) for layer, prompt in zip(self.deep_projections, self.deep_context, strict=True)]
        return torch.stack(mapped)

    def text_features(self, split: str) -> Tensor:
        """Return ONE client's features of the classes of a split under all text prompts, [C, e]."""
        deep = [Prompts(self.deep_context, first_layer=1)] if self.depth > 1 else []
        return self.clip.text_features(self.class_prompts(split), self.prompt(), *deep)

    def encode_images(self, x: Tensor) -> Tensor:
        """Return ONE client's features [B, e] of images [B, 3, H, W] among all image prompts."""
        return self.clip.image_features(x, self.image_prompts())

    def forward(self, x: Tensor, split: str = "test") -> Tensor:
        """Classify images [B, 3, H, W] among the classes of a split, by default the own test set's: logits [B, C]."""
        return self.logits(self.encode_images(x), self.text_features(split))

    def image_features(self, batch: MiniBatch) -> Tensor:
        """Return ONE client's features of a mini-batch, [B, e]."""
        return self.encode_images(batch.x)
