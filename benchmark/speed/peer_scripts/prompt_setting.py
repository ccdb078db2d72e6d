"""The prompt learning that every program of the comparison does: its numbers, its images and its networks.

FedVPT in a ViT of DeiT-Tiny's size and PromptFL in open_clip's ``ViT-S-32-alt``, with random weights that all programs
read from one file. The networks are those that a user of timm and open_clip writes; a test holds them against the
engine's. This file needs NumPy, torch, timm and open_clip alone, so that it can be imported in any of the environments.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CLASSES, BATCH, PROMPTS, CONTEXT = 10, 16, 10, 16
VIT, VIT_SIZE = "deit_tiny_patch16_224", 112
CLIP, CLIP_SIZE = "ViT-S-32-alt", 224
NAMES = [f"class {number}" for number in range(CLASSES)]
#: Of SGD without momentum and weight decay; random weights learn at such rates.
RATES = {"vit": 0.05, "clip": 0.5}


@dataclass(frozen=True)
class PromptSetting:
    """The size of the workload.

    Attributes:
        weights: the file of the initial values: those of the frozen model, and what is trained.
        model: ``vit`` (FedVPT) or ``clip`` (PromptFL).
        first_block: the ViT's block, from 1, before which the prompts stand.
        clients: N; all train in every round.
        images: training images of each client.
        rounds: rounds in all; the first one is not counted.
    """

    weights: str = ""
    model: str = "vit"
    first_block: int = 1
    clients: int = 10
    images: int = 64
    rounds: int = 3

    @property
    def steps(self) -> int:
        """Optimizer steps of all clients in a round."""
        return self.clients * -(-self.images // BATCH)

    @property
    def size(self) -> int:
        """Side of the images in pixels."""
        return CLIP_SIZE if self.model == "clip" else VIT_SIZE

    def arguments(self) -> list[str]:
        """The setting as command line arguments, which ``read_prompt_setting`` reads."""
        return [f"--{name}={value}" for name, value in vars(self).items()]


def read_prompt_setting(arguments: Sequence[str] | None = None) -> tuple[PromptSetting, int]:
    """The setting and the number of processor cores to use, from the command line."""
    parser = argparse.ArgumentParser()
    for name, value in vars(PromptSetting()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--cores", type=int, default=1)
    given = vars(parser.parse_args(arguments))
    cores = given.pop("cores")
    return PromptSetting(**given), cores


def make_prompt_images(setting: PromptSetting) -> tuple[Tensor, Tensor]:
    """Noise that is the brighter the higher the class, so that a falling loss shows that a program learns.

    Returns:
        uint8 images [clients * images, 3, H, W] and int64 labels, which cycle through the classes.
    """
    n = setting.clients * setting.images
    labels = np.arange(n) % CLASSES
    images = np.random.default_rng(0).integers(0, 128, (n, 3, setting.size, setting.size), dtype=np.uint8)
    images += (12 * labels).astype(np.uint8)[:, None, None, None]
    return torch.from_numpy(images), torch.from_numpy(labels)


class PromptedViT(nn.Module):
    """Prompt tokens behind the class token before one block of a frozen ViT of timm, and a linear head."""

    shared = ("prompt",)

    def __init__(self, weights: dict[str, Any], first_block: int) -> None:
        super().__init__()
        import timm

        self.vit = timm.create_model(VIT, num_classes=0, img_size=VIT_SIZE)
        self.vit.load_state_dict(weights["frozen"])
        self.vit.requires_grad_(False).eval()
        self.first_layer = first_block - 1
        self.prompt = nn.Parameter(weights["prompt"].clone())
        self.head = nn.Linear(self.prompt.shape[-1], CLASSES)
        self.head.load_state_dict(weights["head"])

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, 10] of images [B, 3, 112, 112]."""
        vit: Any = self.vit
        tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(x)))
        for layer, block in enumerate(vit.blocks):
            if layer == self.first_layer:
                prompt = self.prompt.expand(len(x), -1, -1)
                tokens = torch.cat([tokens[:, :1], prompt, tokens[:, 1:]], dim=1)
            tokens = block(tokens)
        logits: Tensor = self.head(vit.norm(tokens)[:, 0])
        return logits


class PromptedCLIP(nn.Module):
    """A text context before the class names in a frozen CLIP, as in CoOp's code; images are encoded in every pass."""

    shared = ("context",)

    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        import open_clip

        self.clip: Any = open_clip.create_model(CLIP, load_weights=False)
        self.clip.load_state_dict(weights["frozen"])
        self.clip.requires_grad_(False).eval()
        self.context = nn.Parameter(weights["context"].clone())
        words = " ".join(["X"] * CONTEXT)
        self.tokens = open_clip.get_tokenizer(CLIP)([f"{words} {name}." for name in NAMES])
        embedded = self.clip.token_embedding(self.tokens)
        self.start, self.rest = embedded[:, :1], embedded[:, 1 + CONTEXT :]

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, 10] of images [B, 3, 224, 224]."""
        clip = self.clip
        with torch.no_grad():
            images = clip.encode_image(x, normalize=True)
        text = torch.cat([self.start, self.context.expand(CLASSES, -1, -1), self.rest], dim=1)
        text = clip.transformer(text + clip.positional_embedding, attn_mask=clip.attn_mask)
        ends = clip.ln_final(text)[torch.arange(CLASSES), self.tokens.argmax(dim=-1)] @ clip.text_projection
        classes = nn.functional.normalize(ends, dim=-1)
        logits: Tensor = clip.logit_scale.exp() * images @ classes.T
        return logits


def network(setting: PromptSetting) -> PromptedViT | PromptedCLIP:
    """The network with the initial values that the file has."""
    weights = torch.load(Path(setting.weights), weights_only=True)
    return PromptedCLIP(weights) if setting.model == "clip" else PromptedViT(weights, setting.first_block)


def trained(model: nn.Module) -> int:
    """Count the numbers that are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def tick() -> float:
    """Seconds on a clock that only runs forward."""
    return time.perf_counter()


@dataclass
class PromptMeasured:
    """The measurements that a program reports, as one line of JSON.

    Attributes:
        rounds: seconds of every round.
        losses: mean training loss of the steps of every round.
        steps: optimizer steps of the last round.
        parameters: trained in a client.
        building: seconds of a round in which clients build their models, over all clients; 0 where they do not.
        processes: that trained at the same time.
        threads: of torch in each of them.
        versions: of the packages.
    """

    rounds: list[float]
    losses: list[float]
    steps: int
    parameters: int
    building: float
    processes: int
    threads: int
    versions: dict[str, str]

    @property
    def best(self) -> float:
        """Seconds of the fastest round after the first."""
        return min(self.rounds[1:])
