"""Towers of open_clip that take a learnable text context, and parts: deep prompts, LoRA, adapters.

CLIP's text tower is causal, so the first positions of a prompt (start token, context, words that all classes have in
common) do not depend on the class name that follows. They are computed once and not once per class, and nothing is
computed after the end-of-text token. Both change results by rounding only. ``text_tower`` has the pass of towers that
are not causal, or that are read elsewhere.
"""

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.backbones.changes import NO_CHANGE, Changes, Places, parts_of
from benchmark.backbones.class_prompts import CausalPrompts, ClassPrompts, PaddedPrompts
from benchmark.backbones.clip import MICRO, load_clip
from benchmark.backbones.clip_attention import attend, attend_after, finish, query_key_value, split_heads
from benchmark.backbones.fixed_batch_norm import fix_batch_norms
from benchmark.backbones.parts import Tower, TowerPart
from benchmark.backbones.text_tower import (
    class_token_of,
    differing_text,
    padded_features,
    project_text,
    text_of,
    text_prompts,
)
from benchmark.backbones.two_towers import TwoTowers
from benchmark.backbones.vit_layers import refuse_hooks, rows_kept
from benchmark.errors import ConfigurationError
from benchmark.ranges import Size

#: CoCa's mask goes by the place of every token.
NO_LENGTHS = "CoCa's text tower takes no contexts of other lengths; use a CLIP such as ViT-B-16, or another method"


class PromptedCLIP(TwoTowers):
    """A CLIP, or another model of open_clip, whose towers take prompts. All is frozen unless a method trains it.

    All methods are for ONE client and work under ``torch.func.functional_call`` and ``torch.func.vmap``, with the
    weights shared by all clients or stacked, one set for each. Parameters are named as in open_clip, under ``model``:
    ``model.visual`` is the image encoder. Features are those of open_clip, L2-normalised; they differ by
    rounding, since attention is computed here without ``nn.MultiheadAttention``, which has no rule for ``vmap``. So
    blocks and their attention are not called: forward hooks of them are refused, those of their parts (norms, ``mlp``,
    ``attn.out_proj``) are called, with as many of the tokens as are computed.

    Text towers are those of open_clip's own: CLIP's, those that are not causal (MobileCLIP-S2, SigLIP, CLIPA), CoCa's.
    Image towers other than CLIP's ViT and ResNet (of timm, CoCa's, CLIPA's) are called as a whole: they make frozen
    features outside of ``vmap``, always in evaluation mode, take no parts and give no positions. SigLIP adds a learned
    bias to all logits; the softmax over classes is the same without it, and it is left out here.

    Args:
        name: open_clip's name of the architecture, such as ``ViT-B-16``, ``RN50`` or ``EVA02-B-16``, or ``micro_clip``.
        weights: ``hub``, ``file``, ``random``, or ``embedded``; see ``load_clip``.
        pretrained_tag: open_clip's name of the weights; a ``file`` needs it too.
        checkpoint_path: for ``file``.
        image_size: side of the square input in pixels; None is the model's own.

    Attributes:
        model: the open_clip model.
        visual_kind: ``vit``, ``resnet``, or ``whole`` for an image tower that is called as it is.
        embed_dim: width e of the features of both towers.
        text_width: width w of the text tower's tokens.
        text_depth: layers of the text tower.
        vision_width: width v of the image tower's tokens (of the attention pool for a ResNet); 0 where it is ``whole``.
        vision_depth: layers of the image tower that can have prompts; 0 for a ResNet, or where it is ``whole``.
        text_tower: the sizes that parts of the text tower are made for.
        image_tower: those of the image tower.
        context_length: largest number of positions of a text.
        image_size: (H, W) of an input, in pixels.
        mean: mean of the three channels that the weights were trained with, for pixels in [0, 1].
        std: standard deviation of the three channels.
        pretrained: whether the weights were trained with these.

    Raises:
        ConfigurationError: as ``load_clip``, or the text tower is of a kind that is not stepped here.
    """

    def __init__(
        self,
        name: str = MICRO,
        weights: Literal["hub", "file", "random", "embedded"] = "embedded",
        pretrained_tag: str | None = None,
        checkpoint_path: str | None = None,
        image_size: Size | None = None,
    ) -> None:
        super().__init__()
        from open_clip.modified_resnet import AttentionPool2d, ModifiedResNet
        from open_clip.transformer import ResidualAttentionBlock, Transformer

        self.model, self.tokenizer = load_clip(name, weights, pretrained_tag, checkpoint_path, image_size)
        visual, text = self.model.visual, self._text
        if differing := differing_text(text, self.tokenizer):
            raise ConfigurationError(f"{name!r} cannot be used: {differing}; use one such as ViT-B-16 or RN50")
        resnet, vit = isinstance(visual, ModifiedResNet), _is_vit_of_clip(visual)
        self.visual_kind: Literal["vit", "resnet", "whole"] = "resnet" if resnet else "vit" if vit else "whole"
        of_blocks = (Transformer, ResidualAttentionBlock, nn.MultiheadAttention, AttentionPool2d)
        stepped = (type(self.model), type(visual), type(text), *of_blocks)
        found = [of for of in self.model.named_modules(prefix="model") if isinstance(of[1], stepped)]
        calls_visual = self.visual_kind == "whole"
        self._not_called = [of for of in found if not (calls_visual and of[0].startswith("model.visual"))]
        if resnet:
            fix_batch_norms(visual)

        self.context_length: int = text.context_length
        self.text_width: int = text.token_embedding.embedding_dim
        with torch.no_grad():
            self.embed_dim: int = project_text(text, text.positional_embedding[:1]).shape[-1]
        self.text_depth = len(text.transformer.resblocks)
        self.text_tower = Tower("text", self.text_width, self.text_depth, _hidden_width(text.transformer))
        self.takes_lengths = class_token_of(text) is None
        pooled = visual.attnpool if resnet else visual
        self.vision_width: int = pooled.positional_embedding.shape[1] if resnet or vit else 0
        self.vision_depth = len(visual.transformer.resblocks) if vit else 0
        hidden = _hidden_width(visual.transformer) if vit else 0
        self.image_tower = Tower("image", self.vision_width, self.vision_depth, hidden)
        size = visual.image_size
        self.image_size: tuple[int, int] = (size, size) if isinstance(size, int) else tuple(size)
        self.mean: tuple[float, ...] = tuple(visual.image_mean)
        self.std: tuple[float, ...] = tuple(visual.image_std)
        self.pretrained = weights != "random"

    @property
    def logit_scale(self) -> Tensor:
        """Return the factor from cosines to logits, a scalar: 100 for OpenAI's weights."""
        return self.model.logit_scale.exp()

    @property
    def _text(self) -> Any:
        """Return the module that holds the text tower."""
        return text_of(self.model)

    def train(self, mode: bool = True) -> Self:
        """Switch what may be trained as usual; an image tower that is called as a whole stays in evaluation mode."""
        super().train(mode)
        if self.visual_kind == "whole":
            self.model.visual.eval()
        return self

    # ------------------------------------------------------------------ text

    @property
    def word_embeddings(self) -> Tensor:
        """Return the text tower's embeddings of its tokens, [V, w]."""
        weight: Tensor = self._text.token_embedding.weight
        return weight

    def text_features(
        self,
        prompts: ClassPrompts,
        context: Tensor | None = None,
        *parts: TowerPart,
        length: Tensor | None = None,
        normalize: bool = True,
    ) -> Tensor:
        """Features of all classes under a context.

        Args:
            prompts: of ``class_prompts``.
            context: [L, w], the same for all classes; [B, L, w], one for each image; or [B, C, L, w], one for each
                class too (with B = 1: for each class alone). None only where L is 0.
            parts: what is put into the text tower. Prompts of layers after the first, [L, w] each, take the place of
                the context there (MaPLe, Khattak et al., CVPR 2023); later layers carry on. At most one part has some.
            length: int64 scalar: only so many of the L tokens, the first, are there. What follows stands where it would
                without the others, and nothing attends to these. None: all are there.
            normalize: whether features have length 1.

        Returns:
            [C, e]; [B, C, e] for a context for each image.

        Raises:
            ConfigurationError: a context or deeper prompts of another shape; a ``length`` without ``takes_lengths``.
        """
        self._refuse_hooks()
        if length is not None and not self.takes_lengths:
            raise ConfigurationError(NO_LENGTHS)
        given = parts_of(parts, self.text_tower)
        prompted = self._prompted(given, prompts.num_context)
        if isinstance(prompts, PaddedPrompts):
            context = self.context_for(prompts, context)
            features = padded_features(self._text, prompts, context, given, prompted, length)
        else:
            assert isinstance(prompts, CausalPrompts)
            features = self._causal_features(prompts, context, given, prompted, length)
        return F.normalize(features, dim=-1) if normalize else features

    def _causal_features(
        self,
        prompts: CausalPrompts,
        context: Tensor | None,
        given: Sequence[TowerPart],
        prompted: Sequence[TowerPart],
        length: Tensor | None,
    ) -> Tensor:
        """Return features of all classes under a context, not normalised, of a causal tower that is read at the end."""
        text = self._text
        places = Places(prompted, 1, [prompts.num_context])
        absent = None if length is None else prompts.num_context - length
        shared = self._embed_shared(prompts, context, absent)
        places_of_own = prompts.own_positions if absent is None else prompts.own_positions - absent
        positions = F.embedding(places_of_own, text.positional_embedding)
        own = text.token_embedding(prompts.own_tokens) + positions
        # vmap folds clients that share an operand into one product, whose rounding on a CPU depends on how many
        # they are. With this zero, which each client has its own of, they have none.
        own = own + shared.new_zeros(())
        mask = text.attn_mask[: shared.shape[-2], : shared.shape[-2]]
        unseen = None
        if length is not None:
            place = torch.arange(shared.shape[-2], device=mask.device)
            hidden = (place > length) & (place <= prompts.num_context)
            unseen = torch.zeros_like(mask[0]).masked_fill(hidden, float("-inf"))
            mask = mask + unseen
        kept = -rows_kept(prompts.num_classes)
        for layer, block in enumerate(text.transformer.resblocks):
            last = layer == self.text_depth - 1
            changes = Changes(given, layer)
            shared = places.fill(layer, shared)
            q, k, v = query_key_value(block, shared, changes)
            own_q, own_k, own_v = query_key_value(block, own, changes)
            own_mask = prompts.own_mask
            if last:  # nothing else is read from the last layer than the end-of-text position
                own, own_q, own_mask = own[..., kept:, :], own_q[..., kept:, :], own_mask[..., kept:, :]
            own = finish(block, own, attend_after(own_q, k, v, own_k, own_v, own_mask, unseen), changes)
            if not last:
                shared = finish(block, shared, attend(q, k, v, mask), changes)
        normed = Changes(given, self.text_depth).norm("final", own, text.ln_final)
        return project_text(text, normed)[..., -1, :]

    def prompts_of(self, texts: Sequence[str], num_context: int) -> CausalPrompts | PaddedPrompts:
        """Return prompts of a context followed by these texts."""
        return text_prompts(self._text, self.tokenizer, texts, num_context)

    def _embed_shared(self, prompts: CausalPrompts, context: Tensor | None, absent: Tensor | None) -> Tensor:
        """Input of the first layer at the shared positions, [1 or C, P, w] or [B, 1 or C, P, w].

        ``absent``: of the context's tokens, the last so many are not there.
        """
        words = self._text.token_embedding(prompts.shared_tokens)
        L, context = prompts.num_context, self.context_for(prompts, context)
        words = words.expand(*context.shape[:-2], -1, -1)
        embedded = torch.cat([words[..., :1, :], context, words[..., 1 + L :, :]], dim=-2)
        positions = self._text.positional_embedding[: embedded.shape[-2]]
        if absent is not None:
            place = torch.arange(embedded.shape[-2], device=words.device)
            positions = F.embedding(place - absent * (place > L), self._text.positional_embedding)
        return embedded + positions

    # ------------------------------------------------------------------ images

    def image_features(self, x: Tensor, *parts: TowerPart | Tensor, normalize: bool = True) -> Tensor:
        """Features of a batch of images.

        With prompts, the input of the first layer is ``[CLS, patches, prompts]`` (MaPLe, Khattak et al., CVPR 2023).
        Prompts have no position embedding; those of the first layer go through the tower's first norm like the patches.
        Those of later layers take the place of the outputs of the layer before.

        Args:
            x: images, [B, 3, H, W], normalised with ``mean`` and ``std``.
            parts: what is put into the image tower, which must be a ViT then. Tensors are prompts: [n, v], or [L, n, v]
                with L <= vision_depth; prompts of several parts stand side by side.
            normalize: whether features have length 1.

        Returns:
            [B, e].

        Raises:
            ConfigurationError: images or prompts of another shape, or parts for another image tower than a ViT.
        """
        if self.visual_kind == "whole":
            return self._whole_features(x, parts, normalize)
        rows = slice(0, rows_kept(x.shape[0]))
        features = self._encode_image(x, parts, rows)[:, 0]
        return F.normalize(features, dim=-1) if normalize else features

    def tokens_before(self, x: Tensor, layer: int) -> Tensor:
        """The input of a block of a ViT, counted from 0, in a pass without parts, [B, 1 + M, v].

        Args:
            x: images, [B, 3, H, W], normalised with ``mean`` and ``std``.
            layer: at most vision_depth - 1; that of the first comes after the tower's first norm.

        Raises:
            ConfigurationError: images of another shape, or another image tower than a ViT.
        """
        self.need_image_tower("vit", needs="tokens at the input of a block are those of a ViT")
        self._check_images(x)
        tokens: Tensor = self.model.visual._embeds(x)
        for block in self.model.visual.transformer.resblocks[:layer]:
            q, k, v = query_key_value(block, tokens, NO_CHANGE)
            tokens = finish(block, tokens, attend(q, k, v), NO_CHANGE)
        return tokens

    def image_features_from(self, tokens: Tensor, first_layer: int, *parts: TowerPart | Tensor) -> Tensor:
        """Compute the same features as ``image_features``, from the tokens at a block's input instead of from images.

        Args:
            tokens: of ``tokens_before``, [B, 1 + M, v].
            first_layer: the block that takes them, from 0.
            parts: as for ``image_features``; nothing of them stands before ``first_layer``.

        Returns:
            [B, e], L2-normalised.

        Raises:
            ConfigurationError: another image tower than a ViT.
        """
        self.need_image_tower("vit", needs="tokens at the input of a block are those of a ViT")
        self._refuse_hooks()
        given = parts_of(parts, self.image_tower, tokens.shape[0])
        made = self._through_blocks(tokens, given, slice(0, rows_kept(tokens.shape[0])), first_layer)
        return F.normalize(self._project(made, Changes(given, self.vision_depth))[:, 0], dim=-1)

    @property
    def num_patches(self) -> int:
        """Return M, the patches of an image for a ViT."""
        if self.visual_kind == "whole":
            return super().num_patches
        return self.model.visual.positional_embedding.shape[0] - 1

    def patch_embeddings(self, x: Tensor) -> Tensor:
        """Return a ViT's embeddings of patches with their positions, before the tower's first norm, [B, M, v]."""
        if self.visual_kind == "whole":
            return super().patch_embeddings(x)
        visual = self.model.visual
        return visual.conv1(x).flatten(2).mT + visual.positional_embedding[1:]

    def spatial_features(self, x: Tensor, *parts: TowerPart | Tensor) -> tuple[Tensor, Tensor]:
        """Features of a batch of images, and of the positions in them (CALIP, Guo et al., AAAI 2023).

        The positions of a ViT are its patches, normed and projected like the class token; those of a ResNet are the
        outputs of the attention pool at each position.

        Args:
            x: images, [B, 3, H, W], normalised with ``mean`` and ``std``.
            parts: as in ``image_features``.

        Returns:
            [B, e] as ``image_features``, and [B, M, e] of the M positions, row by row. Both are L2-normalised.

        Raises:
            ConfigurationError: as ``image_features``.
        """
        if self.visual_kind == "whole":
            return super().spatial_features(x, *parts)
        features = F.normalize(self._encode_image(x, parts, slice(None)), dim=-1)
        return features[:, 0], features[:, 1:]

    def features_and_tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features of a batch of images, and the tokens that a ViT's last block makes of them.

        Args:
            x: images, [B, 3, H, W], normalised with ``mean`` and ``std``.

        Returns:
            [B, e] as ``image_features``; and [B, 1 + M, v], the class token and the M patches before the last norm.

        Raises:
            ConfigurationError: images of another shape.
        """
        if self.visual_kind == "whole":
            return super().features_and_tokens(x)
        self._check_images(x)
        tokens = self._vit_tokens(x, (), slice(None))
        return F.normalize(self._project(tokens[:, 0]), dim=-1), tokens

    def _lacks(self, what: str) -> ConfigurationError:
        """Return the error of a method that asks a tower that is called as a whole for what it has not."""
        return ConfigurationError(
            f"this model's image tower ({type(self.model.visual).__name__}) is called as a whole and has no {what}, "
            "which this method needs; use a CLIP such as ViT-B-16, or another method"
        )

    def _whole_features(self, x: Tensor, parts: Sequence[TowerPart | Tensor], normalize: bool) -> Tensor:
        """Return features [B, e] of an image tower that is called as it is."""
        if parts:
            raise self._lacks("prompts or other parts in its image tower")
        self._check_images(x)
        made = self.model.visual(x)
        features = made[0] if isinstance(made, tuple) else made  # CoCa's has the tokens of its decoder beside
        return F.normalize(features, dim=-1) if normalize else features

    def _encode_image(self, x: Tensor, parts: Sequence[TowerPart | Tensor], rows: slice) -> Tensor:
        """Projected outputs [B, len(rows), e] of the positions ``rows`` among ``[global, positions]``."""
        self._check_images(x)
        if self.visual_kind == "vit":
            given = parts_of(parts, self.image_tower, x.shape[0])
            return self._project(self._vit_tokens(x, given, rows), Changes(given, self.vision_depth))
        if parts:
            raise ConfigurationError(
                "a CLIP ResNet takes no prompt tokens, and no other parts; use a ViT such as ViT-B-16, or a method "
                "without them"
            )
        return self._encode_resnet(x, rows)

    def _check_images(self, x: Tensor) -> None:
        self._refuse_hooks()
        if x.ndim != 4 or tuple(x.shape[-2:]) != self.image_size:
            raise ConfigurationError(
                f"this CLIP takes images [B, 3, {self.image_size[0]}, {self.image_size[1]}], got {list(x.shape)}; set "
                "the data's image size or the backbone's image_size"
            )

    def _vit_tokens(self, x: Tensor, parts: Sequence[TowerPart], rows: slice) -> Tensor:
        """Return what the last block makes of the positions ``rows``, [B, len(rows), v]."""
        return self._through_blocks(self.model.visual._embeds(x), parts, rows)

    def _through_blocks(self, tokens: Tensor, parts: Sequence[TowerPart], rows: slice, first_layer: int = 0) -> Tensor:
        """Return what the last block makes of the positions ``rows``, of the tokens at a block's input."""
        visual = self.model.visual
        count = tokens.shape[1]
        places = Places(parts, count)
        for layer in range(first_layer, self.vision_depth):
            block, changes = visual.transformer.resblocks[layer], Changes(parts, layer)
            tokens = places.fill(layer, tokens, visual.ln_pre if layer == 0 else None)
            q, k, v = query_key_value(block, tokens, changes)
            if layer == self.vision_depth - 1:  # of the last layer, only what is asked for
                tokens, q = tokens[:, :count][:, rows], q[:, :, :count][:, :, rows]
            tokens = finish(block, tokens, attend(q, k, v), changes)
        return tokens

    def _project(self, tokens: Tensor, changes: Changes = NO_CHANGE) -> Tensor:
        """Return features of a ViT's tokens, [..., v] to [..., e], as parts change its last norm."""
        visual = self.model.visual
        return changes.norm("final", tokens, visual.ln_post) @ visual.proj

    def _encode_resnet(self, x: Tensor, rows: slice) -> Tensor:
        visual = self.model.visual
        x = visual.stem(x)
        for layer in (visual.layer1, visual.layer2, visual.layer3, visual.layer4):
            x = layer(x)
        pool = visual.attnpool
        positions = x.flatten(2).transpose(1, 2)
        tokens = torch.cat([positions.mean(dim=1, keepdim=True), positions], dim=1) + pool.positional_embedding
        projected = (pool.q_proj(tokens[:, rows]), pool.k_proj(tokens), pool.v_proj(tokens))
        q, k, v = (split_heads(value, pool.num_heads) for value in projected)
        return pool.c_proj(attend(q, k, v))

    def _refuse_hooks(self) -> None:
        refuse_hooks(self._not_called, "hook its mlp, ln_1, ln_2 or attn.out_proj, whose tokens are changed one by one")

    def _prompted(self, parts: Sequence[TowerPart], num_context: int) -> Sequence[TowerPart]:
        """Return the part of the text tower whose prompts take the context's place in deeper layers.

        Raises:
            ConfigurationError: there are two, or its prompts do not fit into that place.
        """
        by_part = [{layer: part.prompts(layer) for layer in range(self.text_depth)} for part in parts]
        made = [{layer: new for layer, new in of.items() if new is not None} for of in by_part]
        for of in made:
            for layer, new in of.items():
                if not layer or new.shape != (num_context, self.text_width) or len(list(filter(None, made))) > 1:
                    raise ConfigurationError(
                        f"text prompts of layer {layer + 1} have shape {list(new.shape)}; from layer 2 on those of one "
                        f"part take the place of the context, [{num_context}, {self.text_width}]"
                    )
        return [part for part, of in zip(parts, made, strict=True) if of] or [TowerPart()]


def _hidden_width(transformer: nn.Module) -> int:
    """The width between the two projections of a tower's MLPs."""
    width: int = transformer.resblocks[0].mlp.c_fc.out_features  # type: ignore[union-attr, index]
    return width


def _is_vit_of_clip(visual: nn.Module) -> bool:
    """Return whether an image tower is a ViT as CLIP's, whose blocks are stepped here."""
    from open_clip.transformer import ResidualAttentionBlock, VisionTransformer

    return (
        isinstance(visual, VisionTransformer)
        and visual.attn_pool is None
        and visual.pool_type == "tok"
        and not (visual.final_ln_after_pool or visual.output_tokens)
        and all(type(block) is ResidualAttentionBlock for block in visual.transformer.resblocks)
    )
