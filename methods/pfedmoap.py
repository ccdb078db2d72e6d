"""pFedMoAP: PromptFL whose clients mix, by a gate of their own, their prompt with other clients' last ones."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmark.contract import Client, Group, MiniBatch, Phase, Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.ranges import Few, NonNegativeFloat, PositiveFloat
from benchmark.seeds import keyed_initialization
from benchmark.server import ServerRule
from methods.experts import ExpertAttention, ExpertRule
from methods.losses import cross_entropy, own_similarities
from methods.text_prompt import TextPromptMethod


class PFedMoAP(TextPromptMethod):
    """pFedMoAP (Luo et al., "Mixture of Experts Made Personalized: Federated Prompt Learning ...", ICLR 2025).

    A round's client trains the received context P_i and a gate of its own (``ExpertAttention``), which never leaves.
    From its second round on it also receives K = ``num_experts`` - 1 other clients' last prompts, those nearest to its
    own last one; they are constants. With features f and w_c(P), subsampled to d numbers by ``Pool(x) = x[::e/d]``:
    ``logit_c = s (lambda f . w_c(P_i) + Pool(f) . m_c)``, m_c the gate's mixture of ``Pool(w_c)`` under P_i and under
    the experts; without experts ``s f . w_c(P_i)``, and the gate rests. Objective: cross-entropy, over both together,
    the gate with a rate of its own. The server averages P_i weighted with n_k and keeps every client's last one.
    Message: L x w numbers up, (1 + K) times as many down. With ``num_experts=1`` it is PromptFL.

    Evaluated, point ``local``: with P_i and the gate as the client's last round left them, before the average. A client
    of the last round has the experts of that round, another the nearest of now (not counted as traffic), one that was
    never selected the average alone. Point ``server`` has the average instead of P_i, which the paper does not do.

    Readings: the experts are chosen as the paper says; its code takes the same random ones for nearly all clients. They
    are of earlier rounds; in the code clients see prompts of the same round that came before. No experts in a client's
    first round (the paper). The gate's product is no cosine (code; Eq. 10 writes one). All gates start equal; in
    the code a client goes on with the last trained client's gate. Rates are constant; the code's cosine runs on from
    client to client. The context trains as the other text methods' do; its own rate is 0.002, in 5 epochs.

    Further arguments as ``TextPromptMethod``.

    Args:
        num_experts: the client's own prompt among them.
        lam: lambda, weight of the client's own prompt outside of the mixture.
        scaling: of the gate's scores.
        heads: of the gate.
        gate_width: d, divides the width of CLIP's features.
        gate_lr: rate of the gate; momentum and weight decay are those of ``training``.

    Raises:
        ConfigurationError: ``gate_width`` does not divide the features' width, or ``heads`` not ``gate_width``.
    """

    personal: tuple[str, ...] = ("gate",)
    remembers = ("context",)
    per_example = True
    evaluate_local = True
    paper_point = "local"

    def __init__(
        self,
        *arguments: Any,
        num_experts: Few = 10,
        lam: NonNegativeFloat = 0.5,
        scaling: PositiveFloat = 10.0,
        heads: Few = 8,
        gate_width: Few = 128,
        gate_lr: NonNegativeFloat = 0.01,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        if self.clip.embed_dim % gate_width or gate_width % heads:
            raise ConfigurationError(
                f"gate_width must divide {self.clip.embed_dim} and be a multiple of heads={heads}, got {gate_width}"
            )
        self.num_experts, self.lam, self.gate_lr = num_experts, lam, gate_lr
        self.stride = self.clip.embed_dim // gate_width
        with keyed_initialization("gate"):
            self.gate = ExpertAttention(gate_width, heads, scaling)
        if num_experts == 1:
            self.personal = ()  # a client is its only expert, so that nothing uses the gate

    def local_phases(self) -> list[Phase]:
        """Train the context and, where there can be experts, the gate with its own rate."""
        own = self.training_settings.group("context")
        if self.num_experts == 1:
            return [self.training_settings.phase_of(own)]
        gate = Group(("gate",), self.gate_lr, own.momentum, own.weight_decay)
        return [replace(self.training_settings.phase_of(own, gate), transform=self.resting_gate)]

    def resting_gate(self, client: Client, update: Values) -> Values:
        """Leave ONE client's gate as it is, weight decay included, where there are no experts."""
        used = client.received["experts_mask"].any() if "experts" in client.received else False
        return {name: value * used for name, value in update.items() if name.startswith("gate.")}

    def prepare(self, client: Client, stage: Stage, split: str) -> Values:
        """Return the experts' text features, pooled, ``experts`` [E, C, d]; in an evaluation ``text`` [C, e] too."""
        made: Values = {}
        if "experts" in client.received:
            experts = self.clip.text_features(self.class_prompts(split), client.received["experts"])
            made["experts"] = experts[..., :: self.stride]
        if stage is Stage.EVALUATE:
            own = torch.where(client.participated, self.context, client.received["context"])
            made["text"] = self.clip.text_features(self.class_prompts(split), own)
        return made

    def mixed_logits(self, client: Client, batch: MiniBatch, classes: Tensor) -> Tensor:
        """Return ONE client's logits [B, C], with ``classes`` the text features [C, e] of its own prompt."""
        images = self.image_features(batch)
        local = self.logits(images, classes)
        if "experts" not in client.prepared:
            return local
        pooled, is_expert = images[:, :: self.stride], client.received["experts_mask"]
        experts = torch.cat([classes[None, :, :: self.stride], client.prepared["experts"]])
        mixture = self.gate(pooled, experts, torch.cat([is_expert.new_ones(1), is_expert]))
        moe = self.clip.logit_scale * own_similarities(pooled, mixture)
        return torch.where(is_expert.any(), self.lam * local + moe, local)

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy of the mixed logits."""
        logits = self.mixed_logits(client, batch, self.text_features(batch.split))
        return cross_entropy(logits, batch.y, batch.mask)

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return the mixed logits with the text features that were prepared."""
        return self.mixed_logits(client, batch, client.prepared["text"])

    def make_server(self) -> ServerRule:
        """Return the server with the pool of prompts."""
        return ExpertRule(self.num_experts - 1)
