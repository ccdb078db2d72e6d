"""FedCLIP: a shared gate on the features that a frozen CLIP makes of an image."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.contract import Client, LocalTraining, MiniBatch, Phase, Stage
from benchmark.masked import at_least_float32, masked_mean
from benchmark.seeds import keyed_initialization
from methods.losses import cross_entropy
from methods.zeroshotclip import ZeroShotCLIP

#: The code's, but for its decay of 0.2 and its second beta of 0.98, which this suite's Adam has not.
GATE_TRAINING = LocalTraining(lr=5e-5, epochs=1, optimizer="adam")


def contrast(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return ``(CE(S, diag) + CE(S^T, diag)) / 2`` with ``S[i, j]`` the logit of image i for the class of image j.

    Two images of one class count as each other's negatives. Masked rows are left out as images and as classes; a batch
    of one image gives 0.

    Args:
        logits: [B, C].
        y: [B].
        mask: [B].
    """
    square = at_least_float32(logits)[:, y.clamp(min=0)]  # [B, B]
    # Padded columns take no part; padded rows are left out of the mean below.
    square, other = (s.masked_fill(~mask, -torch.inf).masked_fill(~mask.unsqueeze(1), 0.0) for s in (square, square.T))
    diagonal = torch.arange(len(y), device=y.device)
    rows, columns = (F.cross_entropy(of, diagonal, reduction="none") for of in (square, other))
    return masked_mean((rows + columns) / 2, mask)


class FedCLIP(ZeroShotCLIP):
    """FedCLIP (Lu et al., "FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning", arXiv
    2302.13485).

    A gate ``a = softmax(W2 tanh(W1 f + b1) + b2)`` says which dimensions of an image's feature f (unnormalised) count;
    ``a f`` is normalised and compared with the text features of "a picture of a <name>". The gate alone is trained,
    sent and averaged. Message: 2 (e^2 + e) numbers each way, 525,312 at e = 512. Images are encoded once.

    Objective: cross-entropy over the classes; ``loss="contrastive"`` is the code's, over the images of a mini-batch,
    which takes two images of one class for each other's negatives. Evaluated with the new gate.

    Deviations: the code weights clients equally, here n_k; its Adam has a second beta of 0.98 and a decay of 0.2.
    Further arguments as ``ZeroShotCLIP``.

    Args:
        loss: see above.
        template: of the class names.
        training: of the gate.
    """

    paper_names = ()
    shared = ("gate",)

    def __init__(
        self,
        *arguments: Any,
        loss: Literal["ce", "contrastive"] = "ce",
        template: str = "a picture of a {}",
        training: LocalTraining = GATE_TRAINING,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, template=template, **settings)
        self.training_settings, self.loss = training, loss
        width = self.clip.embed_dim
        with keyed_initialization("FedCLIP"):
            self.gate = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    @property
    def per_example(self) -> bool:  # type: ignore[override]
        """Return whether no other image takes part in an image's loss."""
        return self.loss == "ce"

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """Return features of images [B, 3, H, W], as ``image`` [B, e], not normalised."""
        return {"image": self.clip.image_features(x, normalize=False)}

    def gated(self, features: Tensor) -> Tensor:
        """Return the gated features, [B, e] of [B, e], L2-normalised."""
        return F.normalize(self.gate(features).softmax(dim=-1) * features, dim=-1)

    def image_features(self, batch: MiniBatch) -> Tensor:
        """Return gated features of a mini-batch, [B, e]."""
        return self.gated(batch.features["image"])

    def forward(self, x: Tensor, split: str = "test") -> Tensor:
        """Classify images [B, 3, H, W] among the classes of a split, by default the own test set's: logits [B, C]."""
        return self.logits(self.gated(self.frozen_features(x)["image"]), self.text_features(split))

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Return the text features of the split's classes, as ``text`` [C, e]: nothing changes them."""
        return {"text": self.text_features(split)}

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy over the classes, or over the mini-batch."""
        logits = self.logits(self.image_features(batch), client.prepared["text"])
        return (cross_entropy if self.loss == "ce" else contrast)(logits, batch.y, batch.mask)

    def local_phases(self) -> list[Phase]:
        """Train the gate."""
        return [self.training_settings.phase("gate")]
