"""pFedMMA: adapters in both towers of CLIP, of which the small matrix that the towers have in common is shared."""

from typing import Any, Literal

from torch import Tensor

from benchmark.backbones.parts import Tower, TowerPart
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import LocalTraining, MiniBatch, Phase
from benchmark.ranges import Few, PositiveFloat
from benchmark.seeds import keyed_initialization
from methods.bottlenecks import Bottleneck, Linears
from methods.text_prompt import TRAINING
from methods.zeroshotclip import ZeroShotCLIP


class PFedMMA(ZeroShotCLIP):
    """pFedMMA (Ghiasvand et al., "pFedMMA: Personalized Federated Fine-Tuning with Multi-Modal Adapter for
    Vision-Language Models", arXiv 2507.05394) after MMA (Yang et al., CVPR 2024).

    Beside each block from ``first_block`` on, in both towers, stands a bottleneck on the block's normed input,
    ``scale up(relu(middle(relu(down(x)))))``. The maps down and up belong to a tower and stay with their client; middle
    is one matrix for both towers, and it alone is sent and averaged with the weights n_k. Objective cross-entropy, with
    "a photo of a <name>." for the classes. Message: (r^2 + r) numbers a block each way. Evaluated with the new middle
    and the client's own maps.

    Readings: the code's scale of 0.001 comes with gradients as of scale 1, without which its rate would move nothing;
    ``true_gradient`` switches that off. The activation is the code's ReLU, of which notes on the paper speak as
    GELU-like. The code caches text features at its first evaluation, so that its numbers do not see the trained text
    adapters; here they do. Of towers of different depths, adapters stand beside as many blocks as
    the shallower one has. CLIP's image tower must be a ViT. Further arguments as ``ZeroShotCLIP``.

    Args:
        width: r.
        first_block: the first block with adapters, counted from 1.
        scale: see above.
        true_gradient: see above.
        share: ``middle`` as published; ``all`` is FedAvg of MMA, ``nothing`` is MMA of each client by itself.
        training: of all maps.

    Raises:
        ConfigurationError: an image tower that is no ViT, or no such block in one of the towers.
    """

    clip_class = PromptedCLIP
    paper_names = ()
    shared: tuple[str, ...] = ("middle",)
    personal: tuple[str, ...] = ("text_down", "text_up", "image_down", "image_up")
    inputs = ("images",)
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        width: Few = 32,
        first_block: Few = 5,
        scale: PositiveFloat = 0.001,
        true_gradient: bool = False,
        share: Literal["middle", "all", "nothing"] = "middle",
        training: LocalTraining = TRAINING,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.training_settings = training
        self.clip.need_image_tower("vit", needs="PFedMMA puts adapters beside the blocks of a ViT")
        towers: tuple[Tower, ...] = (self.clip.text_tower, self.clip.image_tower)
        layers = min(tower.layers_from(first_block, "PFedMMA: first_block") for tower in towers)
        with keyed_initialization("pFedMMA"):
            self.middle = Linears(layers, width, width)
            for tower in towers:
                self.add_module(f"{tower.name}_down", Linears(layers, tower.width, width))
                self.add_module(f"{tower.name}_up", Linears(layers, width, tower.width))
        self.first_layer, self.scale, self.true_gradient = first_block - 1, scale, true_gradient
        if share != "middle":
            every = (*self.shared, *self.personal)
            self.shared, self.personal = (every, ()) if share == "all" else ((), every)

    def bottleneck(self, tower: str) -> TowerPart:
        """Return what is put into ``text`` or ``image``."""
        down, up = getattr(self, f"{tower}_down"), getattr(self, f"{tower}_up")
        return Bottleneck(down, self.middle, up, self.first_layer, self.scale, self.true_gradient)

    def text_features(self, split: str) -> Tensor:
        """Return ONE client's features of the classes of a split, [C, e]."""
        return self.clip.text_features(self.class_prompts(split), None, self.bottleneck("text"))

    def image_features(self, batch: MiniBatch) -> Tensor:
        """Return features [B, e] from the client's tower."""
        return self.clip.image_features(batch.x, self.bottleneck("image"))

    def forward(self, x: Tensor, split: str = "test") -> Tensor:
        """Classify images [B, 3, H, W] among the classes of a split, by default the own test set's: logits [B, C]."""
        return self.logits(self.clip.image_features(x, self.bottleneck("image")), self.text_features(split))

    def local_phases(self) -> list[Phase]:
        """Train all maps at once."""
        return [self.training_settings.phase(*self.shared, *self.personal)]
