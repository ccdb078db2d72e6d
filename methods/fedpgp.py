"""FedPGP: a shared text prompt, a low-rank change to it of each client's own, and a contrast of the two."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmark.contract import Client, MiniBatch, Stage
from benchmark.ranges import FewOrNone, NonNegativeFloat, PositiveFloat
from benchmark.seeds import keyed_initialization
from methods.losses import Contrast, Sign, cross_entropy, text_contrast
from methods.text_prompt import TextPromptMethod

Adaptation = Literal["low_rank", "full_rank"]
Anchor = Literal["photo", "placeholder"]


class FedPGP(TextPromptMethod):
    """FedPGP (Cui et al., "Harmonizing Generalization and Personalization in Federated Prompt Learning", ICML 2024).

    Client i's prompt is ``p_i = p_G + U_i V_i``, p_G shared, U_i and V_i its own. Objective ``CE_i(p_i) + mu L_con``,
    where L_con pulls the text features z_G of p_G towards those of hand-written prompts, z_C, and away from those of
    p_i, z_i (``text_contrast``). Gradients reach p_G through z_G and p_i, and U_i, V_i through p_i; z_C is constant.
    p_G, U_i and V_i are trained together; the server averages p_G weighted with n_k. Message: p_G alone, L x w numbers
    each way, as PromptFL's. Evaluated with the new p_G and the client's own U_i V_i, the initial ones if it was never
    selected.

    The prompts are written as tokens x width (the paper writes the transpose). Readings: tau is the code's; mu is the
    paper's, the code's commands have 0.5; z_C is the paper's "a photo of a <class>", the code has the
    placeholder string "X X ... X <class>". The change of full rank starts at 0, so that p_i starts at p_G. Batches of
    32 are the paper's, its code's few-shot runs take as many images as shots; an incomplete last batch is dropped
    beside a full one as there (``drop_last``, set by the data of this family). The momentum is fresh in every round,
    where the code hands one from client to client (``optimizer_state: shared``).

    U and V are drawn from N(0, 0.02^2). Further arguments as ``TextPromptMethod``, with ``training`` of p_G, U and V.

    Args:
        bottleneck: b, columns of U and rows of V; with 0 the client has no change of its own.
        mu: weight of L_con.
        temperature: tau.
        adaptation: ``low_rank``, U V; or ``full_rank``, L x w free numbers (an ablation).
        contrast: ``both``; ``no_positive``, ``no_negative`` or ``none`` are ablations.
        ablation_sign: of ``no_positive`` and ``no_negative``; see ``text_contrast``.
        zc: ``photo`` or ``placeholder``.

    Raises:
        ConfigurationError: an unknown choice, a negative ``bottleneck``, or a ``temperature`` not above 0.
    """

    per_example = True

    def __init__(
        self,
        *arguments: Any,
        bottleneck: FewOrNone = 8,
        mu: NonNegativeFloat = 1.0,
        temperature: PositiveFloat = 0.5,
        adaptation: Adaptation = "low_rank",
        contrast: Contrast = "both",
        ablation_sign: Sign = "intended",
        zc: Anchor = "photo",
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.contrast_weight = 0.0 if contrast == "none" else mu
        self.temperature = temperature
        self.adaptation, self.contrast, self.ablation_sign, self.zc = adaptation, contrast, ablation_sign, zc
        width = self.clip.text_width
        if adaptation == "full_rank":
            self.change = nn.Parameter(torch.zeros(self.num_context, width))
            self.personal = ("change",)
        else:
            with keyed_initialization("low-rank adaptation"):
                self.u = nn.Parameter(0.02 * torch.randn(self.num_context, bottleneck))
                self.v = nn.Parameter(0.02 * torch.randn(bottleneck, width))
            self.personal = ("u", "v")

    def set_label_spaces(self, label_spaces: dict[str, tuple[int, ...]]) -> None:
        """Make the hand-written prompts of the training label space too."""
        super().set_label_spaces(label_spaces)
        words = "a photo of a {}." if self.zc == "photo" else "X " * self.num_context + "{}."
        self.fix_prompts("anchor_prompts", lambda space: self.clip.class_prompts(self.names_of(space), 0, words))
        self._anchors: dict[str, Tensor] = {}

    def prompt(self) -> Tensor:
        """Return the client's own prompt p_i, [L, w]."""
        return self.context + (self.change if self.adaptation == "full_rank" else self.u @ self.v)

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Return, in training, the text features z_C of the hand-written prompts, as ``anchor`` [C, e]."""
        if stage is Stage.EVALUATE or not self.contrast_weight:
            return super().prepare(client, stage, split)
        if split not in self._anchors:  # the same in all rounds
            self._anchors[split] = self.clip.text_features(self.fixed_prompts("anchor_prompts", split))
        return {"anchor": self._anchors[split]}

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy under p_i plus the contrast."""
        if not self.contrast_weight:
            return super().client_loss(client, batch)
        # Both prompts in one pass of the text tower.
        both = torch.stack([self.prompt(), self.context])
        own, shared = self.clip.text_features(self.class_prompts(batch.split), both)
        loss = cross_entropy(self.logits(self.image_features(batch), own), batch.y, batch.mask)
        return loss + self.contrast_weight * self.text_contrast(client, own, shared)

    def text_contrast(self, client: Client, own: Tensor, shared: Tensor) -> Tensor:
        """Return the contrast of ONE client's text features, [C, e] each."""
        anchor = client.prepared["anchor"]
        return text_contrast(shared, anchor, own, self.temperature, self.contrast, self.ablation_sign)

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return the contrast, which reads no image."""
        if not self.contrast_weight:
            return None
        both = torch.stack([self.prompt(), self.context])
        own, shared = self.clip.text_features(self.class_prompts("train"), both)
        return self.contrast_weight * self.text_contrast(client, own, shared)
