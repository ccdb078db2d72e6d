"""Vision transformers with prompt tokens: any plain timm ``VisionTransformer``, by its name."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from benchmark.backbones.changes import NO_CHANGE, Changes, Places, parts_of
from benchmark.backbones.parts import Tower, TowerPart
from benchmark.backbones.vit_layers import (
    after,
    class_token_after,
    embedded,
    hidden_width,
    is_usual,
    only_convolves,
    reads_the_class_token_alone,
    refuse_hooks,
)
from benchmark.backbones.weights import unfit_tensors
from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.ranges import Checked, Size
from benchmark.seeds import keyed_initialization

if TYPE_CHECKING:  # timm takes seconds to import, and reading the command line must not wait for it
    from timm.models.vision_transformer import VisionTransformer

log = logging.getLogger(__name__)

SHOWN_DIFFERENCES = 5


class PromptedViT(Checked, nn.Module):
    """A timm ``VisionTransformer`` that takes parts: prompt tokens (VPT, Jia et al., ECCV 2022), LoRA, adapters.

    It works under ``torch.func.functional_call`` and ``torch.func.vmap``, with the weights shared by all
    clients or stacked, one set for each. Forward hooks of its blocks and of their parts are called as timm calls them.

    Args:
        vit: the transformer, without a classifier.

    Attributes:
        num_features: width d of the features; ``embed_dim``, the width of the tokens, is equal to it.
        depth: number of layers.
        num_patches: number of patch tokens M of an image.
        num_prefix_tokens: tokens before the patches: the class token, and register or distillation tokens.
        patch_size: side of a patch, in pixels.
        image_size: (H, W) of an input, in pixels.
        tower: the sizes that parts are made for.
        mean: mean of the three channels that inputs are normalised with, for pixels in [0, 1].
        std: standard deviation of the three channels.
        pretrained: whether the weights were trained with these.
    """

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    pretrained: bool = False

    def __init__(self, vit: "VisionTransformer") -> None:
        super().__init__()
        self.vit = vit
        self.num_features: int = vit.embed_dim
        self.embed_dim: int = vit.embed_dim
        self.depth = len(vit.blocks)
        self.num_patches: int = vit.patch_embed.num_patches
        self.num_prefix_tokens: int = vit.num_prefix_tokens
        self.patch_size: int = vit.patch_embed.patch_size[0]
        self.image_size: tuple[int, int] = vit.patch_embed.img_size
        self.tower = Tower("vit", self.embed_dim, self.depth, hidden_width(vit))
        self._prompt_position = 1 if vit.has_class_token else 0
        self._fused: bool | None = None
        self._class_token_alone = reads_the_class_token_alone(vit)
        self._usual = all(map(is_usual, vit.blocks))
        self._only_convolves = only_convolves(vit.patch_embed)
        self._not_called = (("vit", vit), ("vit.blocks", vit.blocks), ("vit.head", vit.head))

    def forward(self, x: Tensor, *parts: TowerPart | Tensor) -> Tensor:
        """Features of a batch of images.

        With prompts the input of the first layer is ``[CLS, prompts, patches]``. Prompts have no position embedding.
        Before each further layer that has prompts of its own, these take the place of the outputs of the
        layer before; after the last such layer the outputs are carried on.

        Args:
            x: images, [B, 3, H, W], normalised.
            parts: what is put into the tower. Tensors are prompts: shallow ones [K, d], deep ones [L, K, d] with
                L <= depth, deep ones for every image [B, L, K, d]. Prompts of several parts stand side by side.

        Returns:
            [B, d]: the class token after the final norm. Models of another pooling (without a class token, or
            with a distillation token) give what timm gives as their ``pre_logits``; prompts are left out of
            that pooling.

        Raises:
            ConfigurationError: the images or the prompts do not have the shape that the model expects, or a part
                changes what this model has not.
        """
        return self.from_tokens(self._embed(x), *parts)

    def from_tokens(self, tokens: Tensor, *parts: TowerPart | Tensor, first_layer: int = 0) -> Tensor:
        """Compute the same features as ``forward``, from the tokens at a layer's input instead of from images.

        Args:
            tokens: one of ``token_features``, or ``tokens_before``, [B, num_prefix_tokens + M, d].
            parts: as for ``forward``; nothing of them stands before ``first_layer``.
            first_layer: the layer that takes the tokens, from 0.

        Returns:
            [B, d].

        Raises:
            ConfigurationError: as for ``forward``.
        """
        self._choose_attention(tokens)
        refuse_hooks(self._not_called, "hook its blocks, or parts of them")
        given = parts_of(parts, self.tower, tokens.shape[0])
        places = Places(given, self._prompt_position)
        for layer in range(first_layer, self.depth):
            tokens = self._layer(layer, places.fill(layer, tokens), Changes(given, layer))
        if not self._class_token_alone:
            tokens = places.without(tokens)
        normed = Changes(given, self.depth).norm("final", tokens, self.vit.norm)
        return self.vit.forward_head(normed, pre_logits=True)

    def tokens_before(self, x: Tensor, layer: int) -> Tensor:
        """The input of a layer, counted from 0, in a pass without parts, [B, num_prefix_tokens + M, d].

        Args:
            x: images, [B, 3, H, W], normalised.
            layer: at most depth - 1.

        Raises:
            ConfigurationError: the images are not of the size that the model expects.
        """
        refuse_hooks(self._not_called, "hook its blocks, or parts of them")
        tokens = self._embed(x)
        for block in self.vit.blocks[:layer]:
            tokens = self._through(block, tokens)
        return tokens

    def token_features(self, x: Tensor, layers: int | None = None) -> Tensor:
        """The input of every layer in a pass without prompts (the features f_1, f_2, ... of pFedBayesPT).

        Args:
            x: images, [B, 3, H, W], normalised.
            layers: of the first so many layers only; None for all.

        Returns:
            [B, layers, num_prefix_tokens + M, d]; the first layer's input holds the position embeddings.

        Raises:
            ConfigurationError: the images are not of the size that the model expects.
        """
        refuse_hooks(self._not_called, "hook its blocks, or parts of them")
        inputs = [self._embed(x)]
        for block in self.vit.blocks[: (layers or self.depth) - 1]:
            inputs.append(self._through(block, inputs[-1]))
        return torch.stack(inputs, dim=1)

    def grow(self, x: Tensor, inserted: Mapping[int, Tensor], layers: int | None = None) -> Tensor:
        """All tokens of a pass into which tokens are inserted that stay (SGPT, Deng et al., CVPR 2024).

        New tokens stand right after the class token, before those of earlier layers, and have no position embedding.

        Args:
            x: images, [B, 3, H, W], normalised.
            inserted: by layer, from 0, what is inserted before it: tokens [K, d], or [B, K, d] for every image.
            layers: pass through the first so many layers only; None for all.

        Returns:
            [B, num_prefix_tokens + M + all inserted, d], after the final norm.

        Raises:
            ConfigurationError: the images are not of the size that the model expects.
        """
        return self.grow_from(self._embed(x), inserted, layers=layers)

    def grow_from(
        self, tokens: Tensor, inserted: Mapping[int, Tensor], first_layer: int = 0, layers: int | None = None
    ) -> Tensor:
        """Compute the same tokens as ``grow``, from the tokens at a layer's input instead of from images.

        Args:
            tokens: those of ``tokens_before``, [B, num_prefix_tokens + M, d].
            inserted: as for ``grow``; nothing before ``first_layer``.
            first_layer: the layer that takes the tokens, from 0.
            layers: as for ``grow``.
        """
        refuse_hooks(self._not_called, "hook its blocks, or parts of them")
        self._choose_attention(tokens)
        at = self._prompt_position
        for layer in range(first_layer, self.depth if layers is None else layers):
            if layer in inserted:
                new = inserted[layer].expand(tokens.shape[0], -1, -1)
                tokens = torch.cat([tokens[:, :at], new, tokens[:, at:]], dim=1)
            tokens = self._through(self.vit.blocks[layer], tokens)
        return self.vit.norm(tokens)

    def _embed(self, x: Tensor) -> Tensor:
        """Images [B, 3, H, W] to the input of the first layer, [B, num_prefix_tokens + M, d]."""
        if x.ndim != 4 or tuple(x.shape[-2:]) != self.image_size:
            raise ConfigurationError(
                f"the backbone takes images [B, 3, {self.image_size[0]}, {self.image_size[1]}], got {list(x.shape)}; "
                "set the data's image size or the backbone's image_size"
            )
        self._choose_attention(x)
        patch_embed: Any = self.vit.patch_embed
        tokens = self.vit._pos_embed(embedded(patch_embed, x) if self._only_convolves else patch_embed(x))
        return self.vit.norm_pre(self.vit.patch_drop(tokens))

    def _choose_attention(self, x: Tensor) -> None:
        """Fused attention has a vmap rule for its CUDA kernels only; elsewhere vmap would warn and loop."""
        if self._fused is not x.is_cuda:
            self._fused = x.is_cuda
            for module in self.vit.modules():
                if hasattr(module, "fused_attn"):
                    module.fused_attn = x.is_cuda  # type: ignore[assignment]

    def _layer(self, layer: int, tokens: Tensor, changes: Changes) -> Tensor:
        """One layer, [B, T, d] to [B, T, d]; the last one to [B, 1 or more, d] where only the class token is read."""
        block = self.vit.blocks[layer]
        if layer < self.depth - 1 or not self._class_token_alone:
            return self._through(block, tokens, changes)
        return class_token_after(block, tokens, changes)

    def _through(self, block: nn.Module, tokens: Tensor, changes: Changes = NO_CHANGE) -> Tensor:
        """All tokens after a layer."""
        if self._usual:
            return after(block, tokens, changes)
        if changes:
            raise ConfigurationError(
                f"parts that change projections or norms, or stand beside blocks, need timm's usual blocks without "
                f"dropout, and this {type(self.vit).__name__} has {type(block).__name__} otherwise made; use another "
                "backbone, or prompts"
            )
        return cast(Tensor, block(tokens))


class TimmViT(PromptedViT):
    """A timm ``VisionTransformer`` by name, without its classifier.

    Args:
        name: timm's name, with or without a tag: ``vit_base_patch16_224.augreg_in21k``. Mean and standard
            deviation of the pixels are those of this name, also where the weights come from a file; so a file of other
            weights than timm's first ones is given with their tag, such as ``vit_base_patch16_224.mae``.
        weights: ``hub`` (timm's own, downloaded), ``file``, ``random`` (drawn for the run's seed), or
            ``embedded`` (the demo weights of ``micro_vit`` that come with this package).
        checkpoint_path: for ``file``: .safetensors, an official Google .npz, or a torch file with nothing but
            tensors. A classifier in it is dropped, half precision becomes float32, position embeddings are
            interpolated to ``image_size``; everything else must fit exactly.
        image_size: side of the square input in pixels; None is the model's own.

    Raises:
        ConfigurationError: no such model, a model that is no plain ViT, an image size that the patches do not
            divide, weights that cannot be downloaded or read, or a file that does not fit the model.
    """

    def __init__(
        self,
        name: str,
        weights: Literal["hub", "file", "random", "embedded"],
        checkpoint_path: str | None = None,
        image_size: Size | None = None,
    ) -> None:
        if (weights == "file") != (checkpoint_path is not None):
            raise ConfigurationError(
                f"weights={weights!r} with checkpoint_path={checkpoint_path!r}: a path is given with weights='file', "
                "and only then"
            )
        if weights == "embedded" and name != "micro_vit":
            raise ConfigurationError(
                f"embedded weights exist for micro_vit only, got name={name!r}; use weights='hub' (downloaded), 'file' "
                "with its checkpoint_path, or 'random'"
            )
        if name == "micro_vit":
            from benchmark.backbones.micro import micro_vit_path  # importing it makes the name known to timm

            if weights == "embedded":
                checkpoint_path = str(micro_vit_path())
        with keyed_initialization("backbone"):
            vit = _build(name, image_size)
            if weights == "hub":
                vit = _download(name, image_size)
        if checkpoint_path is not None:
            _load_file(vit, name, user_path(checkpoint_path))
        super().__init__(vit)
        pretrained: dict[str, Any] = vit.pretrained_cfg  # type: ignore[assignment]
        self.mean = tuple(pretrained["mean"])
        self.std = tuple(pretrained["std"])
        self.pretrained = weights != "random"
        if weights == "file":
            log.info(
                "%s: its weights get images of mean %s and standard deviation %s, those of %s",
                checkpoint_path,
                *(", ".join(map("{:.3f}".format, values)) for values in (self.mean, self.std)),
                ".".join(filter(None, (pretrained["architecture"], pretrained.get("tag")))),
            )


def _build(name: str, image_size: int | None) -> "VisionTransformer":
    """The model with random weights."""
    import timm
    from timm.layers import PatchEmbed
    from timm.models.vision_transformer import VisionTransformer

    if not timm.is_model(name):
        closest = ", ".join(get_close_matches(name, timm.list_models())) or "none is close"
        raise ConfigurationError(f"timm {timm.__version__} has no model {name!r}; the closest names: {closest}")
    try:
        vit = timm.create_model(name, num_classes=0, img_size=image_size)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # an unknown tag, a model of another kind
        raise ConfigurationError(
            f"timm cannot build {name!r} as a VisionTransformer with image_size={image_size}: {_reason(error)}"
        ) from error
    if not isinstance(vit, VisionTransformer) or not isinstance(vit.patch_embed, PatchEmbed):
        raise ConfigurationError(
            f"{name!r} is not a plain timm VisionTransformer, whose patches are cut by one convolution; it is a "
            f"{type(vit).__name__}"
        )
    for side, patch in zip(vit.patch_embed.img_size, vit.patch_embed.patch_size, strict=True):
        if side < patch or side % patch:
            raise ConfigurationError(f"image_size={side} is not a multiple of {patch}, the patch size of {name!r}")
    return vit


def _download(name: str, image_size: int | None) -> "VisionTransformer":
    """The model with timm's own weights."""
    import timm

    try:
        return cast("VisionTransformer", timm.create_model(name, pretrained=True, num_classes=0, img_size=image_size))
    except Exception as error:  # the hub's client and torch's downloader fail in many ways
        source = timm.get_pretrained_cfg(name)
        place = (source and (source.hf_hub_id or source.url)) or "no source that timm knows of"
        raise ConfigurationError(
            f"the weights of {name!r} ({place}) could not be had: {_reason(error)}. Get the file on a machine that "
            "can, and pass weights='file' with its checkpoint_path"
        ) from error


def _load_file(vit: "VisionTransformer", name: str, path: Path) -> None:
    """Load a file of weights into the model; whatever the classifier holds is dropped."""
    if not path.is_file():
        raise ConfigurationError(
            f"{path}: no such file; the weights of {name!r} are expected there: give their file as the backbone's "
            "checkpoint_path, or weights=hub, which downloads them"
        )
    try:
        load = _load_google if path.suffix.lower() == ".npz" else _load_state
        differences = load(vit, path)
    except Exception as error:  # readers of damaged or foreign files fail in many ways
        raise ConfigurationError(
            f"{path}: cannot be read as weights of {name!r} ({_reason(error)}); a .safetensors file, an official "
            "Google .npz or a torch file with nothing but tensors is expected"
        ) from error
    if differences:
        more = len(differences) - SHOWN_DIFFERENCES
        raise ConfigurationError(
            f"{path}: not weights of {name!r}: {'; '.join(differences[:SHOWN_DIFFERENCES])}"
            + (f"; and {more} more" if more > 0 else "")
        )


def _load_google(vit: "VisionTransformer", path: Path) -> list[str]:
    """Load an official .npz file (arrays only, no pickle). Returns what does not fit."""
    import numpy as np

    # timm copies what it looks for; a file with more layers, or patches of another size, would pass unseen.
    expected = list(vit.patch_embed.proj.weight.permute(2, 3, 1, 0).shape)
    with np.load(path, allow_pickle=False) as arrays:
        kernels = [list(arrays[key].shape) for key in arrays.files if key.endswith("embedding/kernel")]
        stacked = [len(arrays[key]) for key in arrays.files if key.endswith("/encoderblock/LayerNorm_0/scale")]
        named = {key.split("encoderblock_")[1].split("/")[0] for key in arrays.files if "encoderblock_" in key}
        differences = unfit_tensors({key: torch.from_numpy(arrays[key]) for key in arrays.files})
    differences += [f"embedding/kernel is {kernel}, the model's {expected}" for kernel in kernels if kernel != expected]
    layers = stacked[0] if stacked else len(named)
    if layers != len(vit.blocks):
        differences.append(f"it has {layers} layers, the model {len(vit.blocks)}")
    if not differences:
        vit.load_pretrained(str(path))
    return differences


def _load_state(vit: "VisionTransformer", path: Path) -> list[str]:
    """Load a .safetensors or torch file. Returns what does not fit."""
    from timm.models import load_state_dict
    from timm.models.vision_transformer import checkpoint_filter_fn

    read = load_state_dict(str(path), device="cpu", weights_only=True)
    if not all(isinstance(value, Tensor) for value in read.values()):
        raise ValueError("it holds more than tensors")
    read = {key: value for key, value in read.items() if not key.startswith(("head.", "head_dist."))}
    if unfit := unfit_tensors(read):
        return unfit
    state = {key: value.float() for key, value in read.items()}
    key = "patch_embed.proj.weight"
    # timm would resample patches of another size; here that is another model.
    if key in state and state[key].shape != vit.patch_embed.proj.weight.shape:
        return [_shapes(key, state[key], vit.patch_embed.proj.weight)]
    # Position embeddings that cannot be interpolated belong to another model; the comparison says what differs.
    with suppress(RuntimeError, AssertionError):
        state = checkpoint_filter_fn(state, vit, adapt_layer_scale=True)
    expected = vit.state_dict()
    differences = [f"{key} is missing" for key in expected if key not in state]
    differences += [f"{key} is not expected" for key in state if key not in expected]
    differences += [
        _shapes(key, state[key], value)
        for key, value in expected.items()
        if key in state and state[key].shape != value.shape
    ]
    if not differences:
        vit.load_state_dict(state)
    return differences


def _reason(error: Exception) -> str:
    """The kind of an error and the first sentence of its text, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()).split('. ')[0].rstrip('.')}"


def _shapes(key: str, found: Tensor, expected: Tensor) -> str:
    return f"{key} is {list(found.shape)}, the model's {list(expected.shape)}"
