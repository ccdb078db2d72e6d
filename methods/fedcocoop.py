"""FedCoCoOp: FedAvg of a text context and of the small network that adapts it to each image."""

from typing import Any

from torch import Tensor, nn

from benchmark.contract import Client, MiniBatch, Stage
from benchmark.seeds import keyed_initialization
from methods.losses import cross_entropy, own_similarities
from methods.text_prompt import TextPromptMethod


class FedCoCoOp(TextPromptMethod):
    """FedAvg of CoCoOp (Zhou et al., "Conditional Prompt Learning for Vision-Language Models", CVPR 2022).

    An image with features f has its own context ``p + meta(f)``: the meta-net is Linear e to e/16, ReLU, Linear e/16 to
    w, and what it gives is added to each of the L tokens. So every image has its own text features [C, e], and its
    logits are ``s f^T w_c(p + meta(f))``. All that is trained is shared: p and the meta-net. Evaluated with the global
    values. Message: L x w numbers and those of the meta-net. With a meta-net of zeros it is PromptFL; with one client
    it is CoCoOp.

    Readings: FedPGP lists results without a description; its setting of 16 random tokens is taken, where CoCoOp has
    "a photo of a". The text tower runs B x C times a step: mini-batches and ``data.eval_batch_size`` should be small.
    Arguments as ``TextPromptMethod``, with ``training`` of context and meta-net.
    """

    shared: tuple[str, ...] = ("context", "meta_net")
    per_example = True

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        width, hidden = self.clip.embed_dim, self.clip.embed_dim // 16
        with keyed_initialization("meta-net"):
            self.meta_net = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, self.clip.text_width))

    def logits_per_image(self, images: Tensor, split: str) -> Tensor:
        """Return logits [B, C] of image features [B, e], each among text features of its own."""
        contexts = self.prompt() + self.meta_net(images).unsqueeze(1)
        classes = self.clip.text_features(self.class_prompts(split), contexts)
        return self.clip.logit_scale * own_similarities(images, classes)

    def forward(self, x: Tensor, split: str = "test") -> Tensor:
        """Classify images [B, 3, H, W] among the classes of a split, by default the own test set's: logits [B, C]."""
        return self.logits_per_image(self.clip.image_features(x), split)

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy."""
        return cross_entropy(self.client_logits(client, batch), batch.y, batch.mask)

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Return nothing: no text features are common to all images."""
        return {}

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return logits [B, C], each image among text features of its own."""
        return self.logits_per_image(self.image_features(batch), batch.split)
