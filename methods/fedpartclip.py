"""FedPart for CLIP: FedAvg of any part in the text tower, the image tower or both, classified by a fixed template."""

import copy
from typing import Any, Literal

from torch import Tensor

from benchmark.backbones.parts import Adapter, TowerPart
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Client, LocalTraining, MiniBatch, Phase, Stage
from benchmark.errors import ConfigurationError
from methods.fedpart import divided, fitted
from methods.losses import cross_entropy
from methods.text_prompt import TRAINING
from methods.zeroshotclip import ZeroShotCLIP


class FedPartCLIP(ZeroShotCLIP):
    """FedAvg of parts in CLIP's towers, of any class: adapters, low-rank factors, biases, norms, or a custom one.

    Objective cross-entropy; the classes are named by a fixed template. What a part declares as shared is averaged with
    the weights n_k, what it declares as personal stays with its client. With ``LowRank`` it is ``FedLoRACLIP``. Trained
    as FedPGP trains its contexts. Where the image tower's part begins at a later block, the tokens at its input are
    kept for every image, in half precision, and a step goes through the blocks from there on alone. Further arguments
    as ``ZeroShotCLIP``.

    Args:
        text: what is put into the text tower; None leaves it as it is.
        image: what is put into the image tower; None leaves it as it is, and images are encoded once.
        share: what of the parts is sent: as they declare, all of them, or nothing.
        training: of the parts.

    Raises:
        ConfigurationError: there is no part, or one without parameters; a tower has not the block that a part begins
            at; the image tower is no ViT and is given a part.
    """

    clip_class = PromptedCLIP
    paper_names = ()
    shared: tuple[str, ...] = ("text_part", "image_part")
    per_example = True
    #: ends the names of the modules: ``text_part``
    suffix = "part"
    #: says how the image tower stays frozen
    without_image = "or image: null"

    def __init__(
        self,
        *arguments: Any,
        text: TowerPart | None = Adapter(),  # noqa: B008 (it is copied)
        image: TowerPart | None = None,
        share: Literal["declared", "all", "nothing"] = "declared",
        training: LocalTraining = TRAINING,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.training_settings = training
        given = {name: part for name, part in (("text", text), ("image", image)) if part is not None}
        self.towers = tuple(given)
        if not self.towers:
            raise ConfigurationError(f"{type(self).__name__}: text and image are null; give a part for one of them")
        if image is not None:
            needs = f"{type(self).__name__} changes the blocks of a ViT"
            self.clip.need_image_tower("vit", needs=needs, otherwise=self.without_image)
        self.shared, self.personal = (), ()
        for name, asked in given.items():
            part = fitted(self, copy.deepcopy(asked), getattr(self.clip, f"{name}_tower"))
            setattr(self, f"{name}_{self.suffix}", part)
            shared, personal = divided(f"{name}_{self.suffix}", part, share)
            self.shared, self.personal = (*self.shared, *shared), (*self.personal, *personal)
        #: the first layer of the image tower, from 0, with a part in it
        self.first_layer = 0 if image is None else self.parts_of("image")[0].first_layer
        self.inputs = ("features",) if image is None or self.first_layer else ("images",)

    def parts_of(self, tower: str) -> tuple[TowerPart, ...]:
        """Return what is put into ``text`` or ``image``."""
        return (getattr(self, f"{tower}_{self.suffix}"),) if tower in self.towers else ()

    def text_features(self, split: str) -> Tensor:
        """Return ONE client's features of the classes of a split, [C, e]."""
        return self.clip.text_features(self.class_prompts(split), None, *self.parts_of("text"))

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """Return the tokens of images [B, 3, H, W] at the first block with parts, float16 [B, T, v], or features."""
        if self.first_layer:
            return {"tokens": self.clip.tokens_before(x, self.first_layer).half()}
        return super().frozen_features(x)

    def image_features(self, batch: MiniBatch) -> Tensor:
        """Return features [B, e] from the client's tower; kept ones, or of kept tokens, where it is frozen."""
        if self.first_layer:
            tokens = batch.features["tokens"].to(self.dtype)
            return self.clip.image_features_from(tokens, self.first_layer, *self.parts_of("image"))
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
        """Train the parts, shared or personal."""
        return [self.training_settings.phase(*self.shared, *self.personal)]
