"""FedAvg-LoRA in CLIP: low-rank factors in the text tower, the image tower or both, classified by a fixed template."""

from typing import Any, Literal

from torch import Tensor

from benchmark.backbones.parts import LowRank, Target, TowerPart
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Client, LocalTraining, MiniBatch, Phase, Stage
from benchmark.ranges import Few, PositiveFloat
from methods.losses import cross_entropy
from methods.text_prompt import TRAINING
from methods.zeroshotclip import ZeroShotCLIP


class FedLoRACLIP(ZeroShotCLIP):
    """Federated LoRA in CLIP's towers: FedAvg-LoRA, FFA-LoRA, FedSA-LoRA or local LoRA, by what is shared.

    ``W = W0 + (alpha / r) B A`` in every block of the chosen towers; the classes are named by a fixed template.
    Objective cross-entropy; what is shared is averaged with the weights n_k. ``share="both"`` is FedAvg-LoRA (FedIT),
    ``"B"`` FFA-LoRA (Sun et al., ICLR 2024: A rests at its common start), ``"A"`` FedSA-LoRA (Guo et al., ICLR 2025: B
    stays with its client), ``"none"`` each client by itself. Message at r = 8, both towers of ViT-B/16: 491,520
    numbers, or half of them. Stacking (``FLoRA``) is for ViTs alone.

    All of these were published for language models; queries and values are adapted, without dropout, and trained as
    FedPGP trains its contexts. Further arguments as ``ZeroShotCLIP``.

    Args:
        towers: which are adapted; images are encoded once where the image tower is not.
        share: see above.
        rank: r.
        alpha: of the scale alpha / r.
        targets: adapted projections.
        first_block: the first adapted block of both, counted from 1.
        training: of the factors.

    Raises:
        ConfigurationError: the image tower is no ViT and to be adapted, or there is no such block.
    """

    clip_class = PromptedCLIP
    paper_names = ()
    shared: tuple[str, ...] = ("text_lora", "image_lora")
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        towers: Literal["text", "image", "both"] = "both",
        share: Literal["both", "A", "B", "none"] = "both",
        rank: Few = 8,
        alpha: PositiveFloat = 16.0,
        targets: list[Target] = ["q", "v"],  # noqa: B006 (it is not changed)
        first_block: Few = 1,
        training: LocalTraining = TRAINING,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.training_settings = training
        if towers != "text":
            needs = "FedLoRACLIP adapts the blocks of a ViT"
            self.clip.need_image_tower("vit", needs=needs, otherwise="or towers=text")
        names = {"text": ("text",), "image": ("image",), "both": ("text", "image")}[towers]
        self.towers = names
        for name in names:
            part = LowRank(rank, alpha, targets, first_block)
            self.add_module(f"{name}_lora", part.fit(getattr(self.clip, f"{name}_tower")))
        factors = {kind: tuple(f"{name}_lora.{kind}" for name in names) for kind in "ab"}
        whole = tuple(f"{name}_lora" for name in names)
        self.shared = {"both": whole, "A": factors["a"], "B": factors["b"], "none": ()}[share]
        self.personal = {"both": (), "A": factors["b"], "B": (), "none": whole}[share]
        self.inputs = ("features",) if towers == "text" else ("images",)

    def parts_of(self, tower: str) -> tuple[TowerPart, ...]:
        """Return what is put into ``text`` or ``image``."""
        part = getattr(self, f"{tower}_lora", None)
        return () if part is None else (part,)

    def text_features(self, split: str) -> Tensor:
        """Return ONE client's features of the classes of a split, [C, e]."""
        return self.clip.text_features(self.class_prompts(split), None, *self.parts_of("text"))

    def image_features(self, batch: MiniBatch) -> Tensor:
        """Return features [B, e] from the client's tower; kept ones where it is frozen."""
        if self.inputs == ("features",):
            return super().image_features(batch)
        return self.clip.image_features(batch.x, *self.parts_of("image"))

    def forward(self, x: Tensor, split: str = "test") -> Tensor:
        """Classify images [B, 3, H, W] among the classes of a split, by default the own test set's: logits [B, C]."""
        return self.logits(self.clip.image_features(x, *self.parts_of("image")), self.text_features(split))

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Return the text features of the split's classes, [C, e], in an evaluation or where they never change."""
        frozen = "text" not in self.towers
        return {"text": self.text_features(split)} if frozen or stage is Stage.EVALUATE else {}

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy."""
        classes = client.prepared.get("text")
        classes = self.text_features(batch.split) if classes is None else classes
        return cross_entropy(self.logits(self.image_features(batch), classes), batch.y, batch.mask)

    def local_phases(self) -> list[Phase]:
        """Train the factors that are shared or personal."""
        return [self.training_settings.phase(*self.shared, *self.personal)]
