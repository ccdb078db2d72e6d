"""Say what methods that learn text prompts ask of a model, and check what all such models are given."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.backbones.class_prompts import ClassPrompts
from benchmark.backbones.parts import Tower, TowerPart
from benchmark.errors import ConfigurationError
from benchmark.ranges import Checked
from benchmark.seeds import keyed_initialization

#: What errors call an image tower, by its ``visual_kind``.
IMAGE_TOWERS = {
    "vit": "a ViT",
    "resnet": "a ResNet",
    "whole": "called as a whole, without parts and positions",
    "named": "a classifier",
}


class TwoTowers(Checked, nn.Module):
    """An image tower and a text tower with one space of features; all frozen unless a method trains it.

    All methods are for ONE client and work under ``torch.func.functional_call`` and ``torch.func.vmap``.

    Attributes:
        visual_kind: ``vit`` or ``resnet`` of a CLIP, whose image tower gives features of positions and, a ViT, takes
            parts; ``whole`` of another image tower of open_clip's (and of ``BertCLIP``), which is called as it is for
            frozen features alone; ``named`` of ``NamedViT``.
        tokenizer: with ``encode``, from a text to ids.
        context_length: largest number of positions of a text.
        embed_dim: width e of the features of both towers.
        text_width: width w of a context's tokens.
        text_depth: layers of the text tower.
        text_tower: the sizes that parts of the text tower are made for.
        takes_lengths: whether ``text_features`` takes a ``length``.
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
    takes_lengths: bool = False
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

    @property
    def word_embeddings(self) -> Tensor:
        """Return the text tower's embeddings of its tokens, [V, w]."""
        raise NotImplementedError

    def prompts_of(self, texts: Sequence[str], num_context: int) -> ClassPrompts:
        """Return prompts of a context followed by these texts, a class each.

        Raises:
            ConfigurationError: no text, or one that is too long with the context.
        """
        raise NotImplementedError

    def class_prompts(
        self, class_names: Sequence[str], num_context: int, template: str | Sequence[str] = "{}."
    ) -> ClassPrompts:
        """Prompts with a learnable context in front, as in CoOp (Zhou et al., IJCV 2022): class token at the end.

        Args:
            class_names: in the order of the labels; underscores become spaces.
            num_context: positions L of the context, 0 for fixed words alone.
            template: what follows the context, with ``{}`` for the name; of all classes, or of each. MaPLe's context of
                2 tokens has ``"of a {}."``; fixed words are ``"a photo of a {}."`` with ``num_context=0``.

        Raises:
            ConfigurationError: names that are no list or that have the same tokens, a template without its one ``{}``,
                or a prompt longer than the text tower.
        """
        if isinstance(class_names, str) or not isinstance(class_names, Sequence):
            raise ConfigurationError(
                f"class_names is a list in the order of the labels, got a {type(class_names).__name__}; a set has no "
                "order, and prompts would go to the wrong classes"
            )
        templates = [template] * len(class_names) if isinstance(template, str) else template
        if wrong := [each for each in templates if each.count("{}") != 1]:
            raise ConfigurationError(f"template has one {{}} for the class name, got {wrong[0]!r}")
        if num_context < 0:
            raise ConfigurationError(f"num_context must be 0 or more, got {num_context}")
        named = zip(templates, class_names, strict=True)
        prompts = self.prompts_of([of.replace("{}", name.replace("_", " ")) for of, name in named], num_context)
        seen: dict[tuple[int, ...], str] = {}
        for name, ids in zip(class_names, map(tuple, prompts.own_tokens.tolist()), strict=True):
            if ids in seen:
                raise ConfigurationError(
                    f"the classes {seen[ids]!r} and {name!r} have the same tokens, and could not be told apart: give "
                    "one of them another name, or make them one class"
                )
            seen[ids] = name
        return prompts

    def initial_context(self, num_context: int, init_words: str | None = None) -> Tensor:
        """Initial values of a context, [L, w]: every entry from N(0, 0.02^2), or the embeddings of words.

        Args:
            num_context: tokens L.
            init_words: words such as ``"a photo of a"``; the first L of their tokens are taken.

        Raises:
            ConfigurationError: the words have fewer tokens than L.
        """
        if init_words is None:
            with keyed_initialization("context"):
                return 0.02 * torch.randn(num_context, self.text_width)
        ids = self.tokenizer.encode(init_words.replace("_", " "))
        if len(ids) < num_context:
            raise ConfigurationError(
                f"init_words={init_words!r} has {len(ids)} tokens, num_context is {num_context}; give as many words, "
                "or none for a random context"
            )
        table = self.word_embeddings
        return table[torch.tensor(ids[:num_context], dtype=torch.long, device=table.device)].detach().clone()

    def context_for(self, prompts: ClassPrompts, context: Tensor | None) -> Tensor:
        """Return a context with its axis of classes, [1, L, w], [B, 1, L, w] or [B, C, L, w].

        Args:
            prompts: of ``class_prompts``.
            context: [L, w], the same for all classes; [B, L, w], one for each image; [B, C, L, w]; None where L is 0.

        Raises:
            ConfigurationError: it has another shape.
        """
        L, C, w = prompts.num_context, prompts.num_classes, self.text_width
        if context is None:
            context = self.word_embeddings.new_zeros(0, w)
        shape = context.shape
        if not 2 <= context.ndim <= 4 or shape[-2:] != (L, w) or (len(shape) == 4 and shape[1] != C):
            raise ConfigurationError(
                f"the context has shape {list(shape)}; these prompts take [{L}, {w}], [B, {L}, {w}] or [B, {C}, {L}, "
                f"{w}]"
            )
        return context if context.ndim == 4 else context.unsqueeze(-3)

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

    @torch.no_grad()
    def text_features_of(self, texts: Sequence[str]) -> Tensor:
        """Features of whole texts, such as ``"a photo of a cat."``, without gradient.

        Returns:
            [len(texts), e], L2-normalised.

        Raises:
            ConfigurationError: a text longer than the text tower.
        """
        return self.text_features(self.prompts_of(texts, 0).to(self.word_embeddings.device))

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

    def features_and_tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features of images, [B, e], and their tokens, that of the class first, [B, 1 + M, v]."""
        raise self._lacks("tokens of an image")

    def tokens_before(self, x: Tensor, layer: int) -> Tensor:
        """Return the input of a block, counted from 0, in a pass of images without parts, [B, 1 + M, v]."""
        raise self._lacks("blocks in its image tower")

    def image_features_from(self, tokens: Tensor, first_layer: int, *parts: TowerPart | Tensor) -> Tensor:
        """Return features [B, e] of the tokens at a block's input, with parts from there on."""
        raise self._lacks("blocks in its image tower")

    def need_image_tower(self, *kinds: str, needs: str, otherwise: str = "or another method") -> None:
        """Refuse an image tower that has not what a method needs, when the method is made.

        Args:
            kinds: the values of ``visual_kind`` that have it.
            needs: what the method does, such as ``"FedMaPLe puts prompts between the patches of a ViT"``.
            otherwise: what to choose in place of another model.

        Raises:
            ConfigurationError: the image tower is of another kind.
        """
        if self.visual_kind not in kinds:
            kind = IMAGE_TOWERS.get(self.visual_kind, f"of another kind, {self.visual_kind!r}")
            raise ConfigurationError(
                f"{needs}, and this CLIP's image tower is {kind}; use one such as ViT-B-16, {otherwise}"
            )

    def _lacks(self, what: str) -> ConfigurationError:
        """Return the error of a method that asks for what this model has not."""
        return ConfigurationError(
            f"{type(self).__name__} has no {what}, which this method needs; take a CLIP (PromptedCLIP), or another "
            "method"
        )
