"""FedMVP: FedAvg of a network that makes an image's prompts of its patches and of descriptions of the classes."""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmark.backbones.class_prompts import ClassPrompts
from benchmark.backbones.parts import Prompts
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Client, LocalTraining, MiniBatch, Phase, Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.masked import masked_mean
from benchmark.ranges import Few, NonNegativeFloat, PositiveInt
from benchmark.seeds import keyed_initialization
from methods.losses import cosines, cross_entropy
from methods.prompt_networks import PromptFormer
from methods.text_prompt import TRAINING
from methods.zeroshotclip import ZeroShotCLIP


def sentence(prefix: str, name: str, suffix: str, descriptor: str) -> str:
    """Return ``<prefix> <name>, <suffix><link> <descriptor>``; the link depends on how the descriptor begins."""
    first = re.split(r"\W", descriptor.strip().lower(), maxsplit=1)[0]
    if first in ("a", "an", "used"):
        link = "which is"
    else:
        link = "which" if first in ("has", "often", "typically", "may", "can") else "which has"
    return f"{prefix} {name.replace('_', ' ')}, {suffix}{link} {descriptor.strip()}"


class FedMVP(ZeroShotCLIP):
    """FedMVP (Singha et al., "FedMVP: Federated Multimodal Visual Prompt Tuning for Vision-Language Models", ICCV
    2025).

    A network, all of it shared, lets the patches of an image attend to descriptions of the classes, and makes n visual
    prompts of them (``PromptFormer``), which stand behind the patches at the tower's input. A class is scored by the
    mean over its descriptions' features v of ``s f . v``. Objective: cross-entropy plus ``alpha (1 - cos(f, f0))``, f0
    the frozen feature of the image or, for half of the images, of its mirror. The server averages weighted with n_k;
    the global network is evaluated. Message: the network, 9,845,760 numbers each way for ViT-B/16.

    After ``network_rounds`` the second phase begins: what goes into query, key and value becomes ``x + x A B``, and
    these low-rank maps and the linear map of the descriptions are trained, while the rest of the network rests. The
    maps are part of the message, of 9,882,624 numbers then, in all rounds.

    In training the patches attend to the classes that a client holds; in an evaluation to all of the split. So the
    gradient of an image depends on which other classes there are, and record-level privacy is refused. Without
    ``attributes`` a class has one description, that of the template.

    Readings: of the paper notes could be read, formulas are the code's. A flip is drawn for each image, where the code
    throws one coin for a mini-batch; every mini-batch is stepped on, where the code steps on the last of a round. The
    server's weights are n_k, the code's are equal. The second phase is off by default: without it the paper's numbers
    are within 0.6 points. All clients enter it in the same round, which is chosen; in the code each does for itself
    once its last mini-batch's loss is below 0.5, unknown to the server, which averages clients of both phases and
    evaluates without the maps. Here they are evaluated. B starts at 0, so that nothing jumps; in the code as A does.

    CLIP's image tower must be a ViT. Further arguments as ``ZeroShotCLIP``.

    Args:
        attributes: of every class by its name as many descriptors, such as ``a long neck``; None for the template.
        prefix: before a name, with attributes.
        suffix: behind it, such as ``a type of flower, ``.
        num_prompts: n; divides the number of patches.
        heads: of the attention; divides the tower's width.
        alpha: weight of the distance to the frozen feature.
        network_rounds: rounds of the first phase; None for all.
        rank: r of the second phase's maps; None for 8.
        training: of the network, in both phases.

    Raises:
        ConfigurationError: an image tower that is no ViT, ``num_prompts`` or ``heads`` that do not divide, or
            attributes that name other classes or of one class more than of another.
    """

    clip_class = PromptedCLIP
    paper_names = ()
    shared: tuple[str, ...] = ("former",)
    inputs = ("images", "features")
    per_example = False

    def __init__(
        self,
        *arguments: Any,
        attributes: dict[str, list[str]] | None = None,
        prefix: str = "a photo of a",
        suffix: str = "",
        num_prompts: Few = 4,
        heads: Few = 4,
        alpha: NonNegativeFloat = 10.0,
        network_rounds: PositiveInt | None = None,
        rank: Few | None = None,
        training: LocalTraining = TRAINING,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.training_settings, self.alpha = training, alpha
        clip = self.clip
        clip.need_image_tower("vit", needs="FedMVP puts prompts between the patches of a ViT")
        if clip.num_patches % num_prompts or clip.vision_width % heads:
            raise ConfigurationError(
                f"FedMVP: num_prompts={num_prompts} must divide the {clip.num_patches} patches of an image, and "
                f"heads={heads} the width {clip.vision_width}"
            )
        if attributes is not None:
            self.check_attributes(attributes)
        self.attributes, self.prefix, self.suffix = attributes, prefix, suffix
        self.network_rounds = network_rounds
        if rank is not None and network_rounds is None:
            raise ConfigurationError(
                f"FedMVP: rank={rank} is of the second phase, which begins after network_rounds; give that, too"
            )
        maps = (rank or 8) if network_rounds else 0
        with keyed_initialization("PromptFormer"):
            self.former = PromptFormer(clip.embed_dim, clip.vision_width, heads, num_prompts, maps)

    def check_attributes(self, attributes: dict[str, list[str]]) -> None:
        """Refuse attributes without a class, or with more of one class than of another."""
        if missing := sorted(set(self.class_names) - set(attributes)):
            raise ConfigurationError(
                f"FedMVP: attributes has no {missing[0]!r}; name the classes {self.class_names[:8]}"
            )
        counts = {name: len(attributes[name]) for name in self.class_names}
        if len(set(counts.values())) > 1 or 0 in counts.values():
            raise ConfigurationError(f"FedMVP: attributes has {counts}; give every class as many, at least one")

    def make_class_prompts(self, split: str) -> ClassPrompts:
        """Return the descriptions of these classes, class after class."""
        if self.attributes is None:
            return super().make_class_prompts(split)
        described = [(name, descriptor) for name in self.names_of(split) for descriptor in self.attributes[name]]
        sentences = [sentence(self.prefix, name, self.suffix, descriptor) for name, descriptor in described]
        return self.clip.class_prompts(sentences, 0, "{}")

    # ------------------------------------------------------------------ the contract

    def set_label_spaces(self, label_spaces: dict[str, tuple[int, ...]]) -> None:
        """Forget the descriptions of other classes."""
        super().set_label_spaces(label_spaces)
        self._kept: dict[str, Tensor] = {}

    def descriptions(self, split: str) -> Tensor:
        """Return the features of the descriptions of a split's classes, [C, D, e]."""
        features = self.clip.text_features(self.class_prompts(split))
        return features.unflatten(0, (len(self.names_of(split)), -1))

    def frozen_features(self, x: Tensor) -> Values:
        """Return features of images [B, 3, H, W] and of their mirrors, as ``image`` and ``mirrored``, [B, e]."""
        return {"image": self.clip.image_features(x), "mirrored": self.clip.image_features(x.flip(-1))}

    def draw_noise(self, generator: torch.Generator, batch_size: int, stage: Stage) -> Values:
        """Draw which images are compared with their mirrors."""
        if stage is Stage.EVALUATE:
            return {}
        return {"mirror": torch.rand(batch_size, generator=generator, device=generator.device) < 0.5}

    def prepare(self, client: Client, stage: Stage, split: str) -> Values:
        """Return the descriptions, as ``descriptions`` [C, D, e], and those that patches attend to, ``held`` [C]."""
        if split not in self._kept:  # the same in all rounds
            self._kept[split] = self.descriptions(split)
        features = self._kept[split]
        if stage is Stage.EVALUATE:
            return {"descriptions": features, "held": features.new_ones(len(features), dtype=torch.bool)}
        return {"descriptions": features, "held": client.class_counts[list(self.classes_of(split))] > 0}

    def prompted_features(self, x: Tensor, descriptions: Tensor, held: Tensor) -> Tensor:
        """Return features [B, e] of images [B, 3, H, W] among the prompts made for them."""
        is_there = held.repeat_interleave(descriptions.shape[1])
        prompts = self.former(self.clip.patch_embeddings(x), descriptions.flatten(0, 1), is_there)
        return self.clip.image_features(x, Prompts(prompts.unsqueeze(1)))

    def forward(self, x: Tensor, split: str = "test") -> Tensor:
        """Classify images [B, 3, H, W] among the classes of a split, by default the own test set's: logits [B, C]."""
        features = self.descriptions(split)
        held = features.new_ones(len(features), dtype=torch.bool)
        return self.logits(self.prompted_features(x, features, held), features.mean(1))

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return the mean over descriptions."""
        features = client.prepared["descriptions"]
        return self.logits(self.prompted_features(batch.x, features, client.prepared["held"]), features.mean(1))

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy, and the distance to the frozen features of images or their mirrors."""
        features = client.prepared["descriptions"]
        images = self.prompted_features(batch.x, features, client.prepared["held"])
        mirror = batch.noise["mirror"].unsqueeze(1)
        frozen = torch.where(mirror, batch.features["mirrored"], batch.features["image"])
        loss = cross_entropy(self.logits(images, features.mean(1)), batch.y, batch.mask)
        return loss + self.alpha * masked_mean(1 - cosines(images, frozen), batch.mask)

    def local_phases(self) -> list[Phase]:
        """Train the network; in the second phase the low-rank maps and that of the descriptions."""
        training = self.training_settings
        if self.network_rounds is None:
            return [training.phase(*self.shared)]
        network = [f"former.{name}" for name, _ in self.former.named_children() if name != "low_rank"]
        second = training.phase("former.text_map", "former.low_rank")
        return [
            replace(training.phase(*network), last_round=self.network_rounds),
            replace(second, first_round=self.network_rounds + 1),
        ]
