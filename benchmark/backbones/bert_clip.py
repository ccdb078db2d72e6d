"""CLIPs with a BERT as text tower and an image tower of timm's, such as BiomedCLIP, from the files of open_clip."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from benchmark.backbones.bert import Bert, BertTowers, mean_of_tokens
from benchmark.backbones.weights import unfit_tensors
from benchmark.backbones.wordpiece import WordPiece
from benchmark.errors import ConfigurationError
from benchmark.files import read_regular, reason
from benchmark.paths import user_path
from benchmark.ranges import Size

CONFIG, VOCABULARY = "open_clip_config.json", "vocab.txt"
WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
MOST_BYTES = 2**16  # of the configuration
#: Width of an attention head of BERT's own sizes, and these, tiny to large; the files do not say how many heads.
HEAD, WIDTHS = 64, (128, 256, 512, 768, 1024)
POOLERS = {"cls_last_hidden_state_pooler": "start", "mean_pooler": "mean"}


class BertCLIP(BertTowers):
    """A CLIP whose text tower is a BERT: BiomedCLIP (Zhang et al., "A Multimodal Biomedical Foundation Model Trained
    from Fifteen Million Image-Text Pairs", NEJM AI 2025) and others that open_clip saves in the same form.

    A text's feature is the start token, or the mean of all, of BERT's last layer, projected; an image's is that of
    timm's model, projected. Both equal open_clip's own, which needs the package ``transformers`` for it; here it is not
    needed. The image tower is called as a whole, in evaluation mode, and the text tower takes contexts, no parts.

    Args:
        folder: of ``open_clip_config.json``, ``vocab.txt`` and ``open_clip_model.safetensors`` or
            ``open_clip_pytorch_model.bin``, as the repositories of such models on Hugging Face's hub have them.
        repository: on Hugging Face's hub, such as ``microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224``, whose
            files are loaded into the hub's cache; instead of a folder.
        image_size: side of the square input in pixels; None is the model's own.

    Raises:
        ConfigurationError: neither or both are given; files that are missing or damaged; a model of another form.
    """

    visual_kind = "whole"
    vision_width = vision_depth = 0

    def __init__(
        self, folder: str | None = None, repository: str | None = None, image_size: Size | None = None
    ) -> None:
        super().__init__()
        if (folder is None) == (repository is None):
            raise ConfigurationError("BertCLIP is read from a folder or from a repository; give one of the two")
        place = user_path(folder) if folder is not None else _download(str(repository))
        config = _read_config(place / CONFIG)
        of_text, size = config["text_cfg"], config["embed_dim"]
        self.pooling = POOLERS[of_text["hf_pooler_type"]]
        weights = _read_weights(place)
        with torch.random.fork_rng(devices=[]):  # modules draw initial values, which are replaced
            self.text = Bert(_below(weights, "text.transformer."), HEAD)
            kind, width = of_text.get("hf_proj_type"), self.text.width
            if width not in WIDTHS:
                raise ConfigurationError(
                    f"{place}: the text tower has a width of {width}, and its files do not say how many attention "
                    f"heads; expected is one of BERT's own sizes, of width {', '.join(map(str, WIDTHS))} with heads of "
                    f"{HEAD}: take another model"
                )
            self.projection = _projection(_below(weights, "text.proj."), kind, width, size)
            self.visual = _image_tower(config["vision_cfg"], size, _below(weights, "visual."), image_size)
        self.scale = nn.Parameter(weights["logit_scale"].clone())
        self.tokenizer = WordPiece.read(place / VOCABULARY)
        if len(self.tokenizer.ids) != len(self.text.words):
            raise ConfigurationError(
                f"{place / VOCABULARY} has {len(self.tokenizer.ids)} pieces, and the weights embed "
                f"{len(self.text.words)}; it is another model's"
            )
        self.embed_dim, self.text_width, self.text_depth = size, width, len(self.text.layers)
        self.context_length = min(of_text.get("context_length", 77), len(self.text.positions))
        self.image_size = (self.visual.image_size[0], self.visual.image_size[1])
        pixels = config["preprocess_cfg"]
        self.mean, self.std = tuple(pixels["mean"]), tuple(pixels["std"])
        self.pretrained = True
        self.requires_grad_(False).eval()

    @property
    def logit_scale(self) -> Tensor:
        """Return the factor from cosines to logits, a scalar."""
        return self.scale.exp()

    def train(self, mode: bool = True) -> Self:
        """Switch what may be trained as usual; the image tower stays in evaluation mode."""
        super().train(mode)
        self.visual.eval()
        return self

    def pooled(self, tokens: Tensor, there: Tensor) -> Tensor:
        """Return the projected start token, or mean of all tokens."""
        read = tokens[..., 0, :] if self.pooling == "start" else mean_of_tokens(tokens, there)
        features: Tensor = self.projection(read)
        return features

    def encoded(self, x: Tensor) -> Tensor:
        """Return features of images of the tower's size, projected."""
        if x.shape[1:] != (3, *self.image_size):
            height, width = self.image_size
            raise ConfigurationError(
                f"images have shape {list(x.shape)}, expected [B, 3, {height}, {width}]: set the data's image size or "
                "the backbone's image_size"
            )
        features: Tensor = self.visual(x)
        return features


def _download(repository: str) -> Path:
    """Load the files of a repository into the hub's cache.

    Raises:
        ConfigurationError: it can't be reached.
    """
    from open_clip.pretrained import download_pretrained_from_hf

    try:  # in place of the last name, .safetensors are taken where there are some
        places = [download_pretrained_from_hf(repository, filename=name) for name in (CONFIG, VOCABULARY, WEIGHTS[1])]
        return Path(places[0]).parent
    except Exception as error:  # the hub's client fails in many ways
        said = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise ConfigurationError(
            f"the repository {repository!r} could not be loaded ({said}): load {CONFIG}, {VOCABULARY} and {WEIGHTS[0]} "
            f"or {WEIGHTS[1]} on a machine that can, and give their folder as `folder`"
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    """Read what open_clip says of the model: its two towers' sizes and its pixels.

    Raises:
        ConfigurationError: it can't be read, or the towers are of another kind.
    """
    try:
        found = json.loads(read_regular(path, MOST_BYTES, links=True))
        config = {**found["model_cfg"], "preprocess_cfg": found["preprocess_cfg"]}
        vision, text = config["vision_cfg"], config["text_cfg"]
        known = (vision["timm_model_name"], text["hf_model_name"], text["hf_pooler_type"], config["embed_dim"])
        pixels = [len(config["preprocess_cfg"][name]) for name in ("mean", "std")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is not the configuration of a CLIP with an image tower of timm's and a text tower of Hugging "
            f"Face's: {reason(error)}"
        ) from error
    if known[2] not in POOLERS or text.get("hf_proj_type") not in (None, "linear", "mlp") or pixels != [3, 3]:
        raise ConfigurationError(
            f"{path}: a text feature pooled by {known[2]!r} and projected by {text.get('hf_proj_type')!r} is not made "
            f"here; expected are {' or '.join(POOLERS)}, and mlp or linear"
        )
    return config


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the model's tensors.

    Raises:
        ConfigurationError: there are none, or the file holds others than numbers.
    """
    from open_clip.factory import load_state_dict

    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise ConfigurationError(f"{folder} has neither {WEIGHTS[0]} nor {WEIGHTS[1]}")
    try:
        state = load_state_dict(str(path), device="cpu", weights_only=True)
        if not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError("it holds more than tensors")
        state = {name: value.float() for name, value in state.items() if value.is_floating_point()}
        if "logit_scale" not in state:
            raise ValueError("it has no logit_scale")
    except Exception as error:  # readers of damaged or foreign files fail in many ways
        raise ConfigurationError(
            f"{path}: cannot be read as weights of a CLIP ({type(error).__name__}: {reason(error)})"
        ) from error
    if unfit := unfit_tensors(state, []):
        raise ConfigurationError(f"{path}: not weights of a CLIP: {textwrap.shorten('; '.join(unfit), 400)}")
    return state


def _below(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _projection(
    weights: Mapping[str, Tensor], kind: Literal["linear", "mlp"] | None, width: int, size: int
) -> nn.Module:
    """Return the projection of a text's feature, [..., w] to [..., e]."""
    middle = (width + size) // 2
    made: nn.Module = nn.Identity()
    if kind == "linear" or (kind is None and width != size):
        made = nn.Linear(width, size, bias=False)
    elif kind == "mlp":
        made = nn.Sequential(nn.Linear(width, middle, bias=False), nn.GELU(), nn.Linear(middle, size, bias=False))
    return _filled(made, weights, "the text tower's projection")


def _image_tower(config: Mapping[str, Any], size: int, weights: Mapping[str, Tensor], image_size: int | None) -> Any:
    """Return open_clip's module of timm's image tower, with its weights."""
    from open_clip.timm_model import TimmModel

    name = config["timm_model_name"]
    own = config.get("image_size", 224)
    try:
        pool, proj = config.get("timm_pool", "avg"), config.get("timm_proj", "linear")
        bias = config.get("timm_proj_bias", False)
        made = TimmModel(name, size, image_size=own, pool=pool, proj=proj, proj_bias=bias)
    except Exception as error:  # timm fails in many ways
        raise ConfigurationError(f"timm makes no image tower {name!r}: {reason(error)}") from error
    _filled(made, weights, f"the image tower {name!r}")
    if image_size is not None:
        try:
            made.set_input_size(image_size)
            with torch.no_grad():
                made.eval()(torch.zeros(1, 3, image_size, image_size))
        except Exception as error:  # each architecture fails in its own way
            raise ConfigurationError(
                f"the image tower {name!r} cannot take images of {image_size} pixels: {reason(error)}; leave "
                "image_size out, or give a multiple of its patches"
            ) from error
    return made


def _filled(module: nn.Module, weights: Mapping[str, Tensor], what: str) -> nn.Module:
    try:
        module.load_state_dict(dict(weights), strict=True)
    except RuntimeError as error:
        raise ConfigurationError(f"the weights do not fit {what}: {textwrap.shorten(str(error), 400)}") from error
    return module
