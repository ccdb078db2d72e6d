"""FedPR: FedVPT whose local prompt updates stay in the null space of the prompts that the server sent."""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from benchmark.contract import Client, LocalTraining, Phase, Stage
from benchmark.ranges import AboveZero, Few
from benchmark.seeds import numpy_generator
from methods.fedvpt import FedVPT

PROMPT = "prompt.tokens"


def leading_directions(prompts: Tensor, filling: Tensor) -> Tensor:
    """Right-singular vectors of ``P^T P`` by falling singular value, as orthonormal rows [..., K + m, d].

    They are those of P itself, whose singular values are the roots. Beyond the K-th the singular values are zero, and
    the order of the null directions is not determined: the first m of them are made from ``filling``.

    Args:
        prompts: P, [..., K, d].
        filling: [..., m, d], m at most d - K; any rows that are linearly independent together with P's.
    """
    own = torch.linalg.svd(prompts, full_matrices=False).Vh
    return torch.linalg.qr(torch.cat([own, filling], dim=-2).mT).Q.mT


def project(update: Tensor, dropped: Tensor) -> Tensor:
    """``u T`` with ``T = I - D^T D``, the projector on what is orthogonal to the rows of D.

    Args:
        update: u, [..., K, d].
        dropped: D, [..., c, d], orthonormal rows.
    """
    with torch.autocast(update.device.type, enabled=False):
        # u D^T as the transpose of D u^T: D, which is the same for a whole cohort, keeps its layout, so that all cohort
        # widths do the same arithmetic.
        return update - (dropped @ update.mT).mT @ dropped


class FedPR(FedVPT):
    """FedPR (Feng et al., "Learning Federated Visual Prompt in Null Space for MRI Reconstruction", CVPR 2023) for
    classification, as the baseline of pFedBayesPT: FedVPT or FedVPT-D with projected prompt updates and own heads.

    From the received prompt P_l of each layer, ``A_l = P_l^T P_l = U S V^T``; T_l projects on the right-singular
    vectors of the smallest ``ratio`` of the d singular values. Every update u of the local optimizer (with learning
    rate, momentum and weight decay) becomes ``u T_l``, so that with K <= (1 - ratio) d it is orthogonal to all global
    tokens of its layer. The head is not projected. Clients compute T_l themselves: messages are FedVPT's. In the first
    round no prompt has been aggregated yet, and nothing is projected; that it is the first, a client knows from the
    round's number. Evaluated as FedVPT.

    Deviations and readings:
    * T_l is fresh for every participant. In the authors' code a client that missed a round keeps an older one.
    * ``null_scale="frobenius"`` divides T_l by its norm as the code does, which makes the steps about 25 times smaller
      at d = 768; the paper's formula is the projection.
    * ``floor((1 - ratio) d)`` directions are dropped, 153 of ViT-B's 768. The code takes 1 - 0.8 for a little less than
      a fifth, and drops one fewer where d is a multiple of 5.
    * P_l has rank K, usually less than the number of dropped directions. Which of the null directions are dropped
      besides the K is then left to rounding errors in the code; here they are drawn for (seed, round), the same for all
      clients.
    * AdamSVD, the code's Adam, adds eps to the root before the bias correction; torch's Adam, taken here where
      ``training.optimizer`` is adam, after it.
    * The code uses Adam with rate 0.1 and prompts from U(0, 1); pFedBayesPT's setting, which this follows, has SGD and
      rate 0.01, and VPT's initial values are taken.

    Further arguments as ``FedVPT``.

    Args:
        num_prompts: K, prompt tokens of a layer, at least 1.
        training: of prompt and head together; momentum and weight decay are not given and are those of SGPT's code.
        depth: ``shallow`` as FedVPT or ``deep`` as FedVPT-D.
        ratio: share of the singular values that is kept, the smallest ones; above 0, at most 1 (no projection).
        null_scale: see above.

    Raises:
        ConfigurationError: there are no prompts, or ``ratio`` is out of range.
    """

    per_example = True

    def __init__(
        self,
        *arguments: Any,
        num_prompts: Few = 10,
        training: LocalTraining = LocalTraining(lr=0.01, momentum=0.9, weight_decay=1e-5),
        depth: Literal["shallow", "deep"] = "shallow",
        ratio: AboveZero = 0.8,
        null_scale: Literal["none", "frobenius"] = "none",
        **settings: Any,
    ) -> None:
        self.deep = depth == "deep"
        super().__init__(*arguments, num_prompts=num_prompts, training=training, **settings)
        width = self.backbone.embed_dim
        # Rounded first: (1 - 0.8) * 10 is a little less than 2.
        self.num_dropped = math.floor(round((1 - ratio) * width, 6))
        self.scale = 1.0 if null_scale == "none" else (width - self.num_dropped) ** -0.5

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Return the directions that T_l drops, [c, d] or [L, c, d]; nothing before the first aggregation."""
        if stage is not Stage.TRAIN or client.round.number == 1:
            return {}
        # Once a cohort and round, in double precision on the CPU: the same on every device.
        prompts = client.received[PROMPT].cpu().double()
        *layers, tokens, width = prompts.shape
        rng = numpy_generator(client.round.seed, "null space", client.round.number)
        filling = rng.standard_normal((*layers, max(self.num_dropped - tokens, 0), width))
        dropped = leading_directions(prompts, torch.from_numpy(filling))[..., : self.num_dropped, :]
        return {"dropped": dropped.to(client.received[PROMPT]).contiguous()}

    def local_phases(self) -> list[Phase]:
        """Train as FedVPT does, with projected updates."""
        return [replace(phase, transform=self.projected) for phase in super().local_phases()]

    def projected(self, client: Client, update: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``u T_l`` for the prompt, from the second round on."""
        if PROMPT not in update or "dropped" not in client.prepared:
            return {}
        return {PROMPT: self.scale * project(update[PROMPT], client.prepared["dropped"])}
