"""What methods that learn text prompts ask of a model with an image tower and a text tower."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from benchmark.backbones.class_prompts import ClassPrompts
from benchmark.backbones.parts import Tower, TowerPart
from benchmark.errors import ConfigurationError
from benchmark.ranges import Checked


class TwoTowers(Checked, nn.Module):
    """An image tower and a text tower with one space of features; all frozen unless a method trains it.

    All methods are for ONE client and work under ``torch.func.functional_call`` and ``torch.func.vmap``.

    Attributes:
        visual_kind: ``vit`` or ``resnet`` of a CLIP, whose image tower takes parts and gives features of positions;
            ``named`` of a model that has neither.
        tokenizer: with ``encode``, from a text to ids.
        context_length: largest number of positions of a text.
        embed_dim: width e of the features of both towers.
        text_width: width w of a context's tokens.
        text_depth: layers of the text tower.
        text_tower: the sizes that parts of the text tower are made for.
        vision_width: width v of the image tower's tokens.
        vision_depth: layers of the image tower that can have prompts.
        image_tower: the sizes that parts of the image tower are made for.
        image_size: (H, W) of an input, in pixels.
        mean: mean of the three channels that the weights were trained with, for pixels in [0, 1].
        std: standard deviation of the three channels.
        pretrained: whether the weights were trained with these.
    """

    visual_kind: str
    tokenizer: Any
    context_length: int
    embed_dim: int
    text_width: int
    text_depth: int
    text_tower: Tower
    vision_width: int
    vision_depth: int
    image_tower: Tower
    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pretrained: bool

    @property
    def logit_scale(self) -> Tensor:
        """Return the factor from cosines to logits, a scalar."""
        raise NotImplementedError

    def class_prompts(self, class_names: Sequence[str], num_context: int, template: str = "{}.") -> ClassPrompts:
        """Return prompts of classes with a learnable context in front."""
        raise NotImplementedError

    def initial_context(self, num_context: int, init_words: str | None = None) -> Tensor:
        """Return initial values of a context, [L, w]: random ones, or the embeddings of words."""
        raise NotImplementedError

    def text_features(
        self,
        prompts: ClassPrompts,
        context: Tensor | None = None,
        *parts: TowerPart,
        length: Tensor | None = None,
        normalize: bool = True,
    ) -> Tensor:
        """Return features of all classes under a context, [C, e]."""
        raise NotImplementedError

    def text_features_of(self, texts: Sequence[str]) -> Tensor:
        """Return features of whole texts, without gradient, [len(texts), e], L2-normalised."""
        raise NotImplementedError

    def image_features(self, x: Tensor, *parts: TowerPart | Tensor, normalize: bool = True) -> Tensor:
        """Return features of images [B, 3, H, W], [B, e]."""
        raise NotImplementedError

    @property
    def num_patches(self) -> int:
        """Return M, the patches of an image."""
        raise self._lacks("patches")

    def patch_embeddings(self, x: Tensor) -> Tensor:
        """Return embeddings of patches with their positions, [B, M, v]."""
        raise self._lacks("patches")

    def spatial_features(self, x: Tensor, *parts: TowerPart | Tensor) -> tuple[Tensor, Tensor]:
        """Return features of images, [B, e], and of the positions in them, [B, M, e]."""
        raise self._lacks("features of the positions in an image")

    def _lacks(self, what: str) -> ConfigurationError:
        """Return the error of a method that asks for what this model has not."""
        return ConfigurationError(
            f"{type(self).__name__} has no {what}, which this method needs; take a CLIP (PromptedCLIP), or another "
            "method"
        )
