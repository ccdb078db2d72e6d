"""FedSDG: shared and private low-rank factors in every layer, and a learned gate between them."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmark.backbones.parts import LowRank, Target, TowerPart
from benchmark.contract import Client, LocalTraining, MiniBatch, Phase
from benchmark.federation import Values
from benchmark.ranges import Few, NonNegativeFloat, PositiveFloat
from benchmark.seeds import keyed_initialization
from benchmark.server import ServerRule
from methods.alignment import AlignmentRule
from methods.fedlora import FedLoRA
from methods.losses import cross_entropy

#: The code's: Adam with 1e-3, and gradients clipped together to 1.
SDG_TRAINING = LocalTraining(lr=1e-3, weight_decay=1e-4, optimizer="adam", clip=1.0)


class GatedLowRank(LowRank):
    """Low-rank factors behind a gate ``sigmoid(g_l)`` of every layer and target.

    Attributes:
        gate: g of each target, [L].
    """

    def fit(self, tower: Any) -> "GatedLowRank":
        """Make the factors and gates; the gates start at sigmoid(-2)."""
        super().fit(tower)
        self.gate = nn.ParameterDict({name: torch.full(value.shape[:1], -2.0) for name, value in self.a.items()})
        return self

    def change(self, target: Target, layer: int, x: Tensor) -> Tensor:
        """Return ``sigmoid(g) (alpha / r) B A x`` of a target."""
        return self.gate[target][layer - self.first_layer].sigmoid() * super().change(target, layer, x)


class FedSDG(FedLoRA):
    """FedSDG ("Federated Structure-Decoupled Gating", 2026, a repository without a paper).

    ``y = W0 x + (alpha / r) B A x + m_l (alpha / r_p) B_p A_p x`` with the gate ``m_l = sigmoid(g_l)``: A, B and the
    head are shared, A_p, B_p and the gates stay with their client. Objective
    ``CE + l1 sum_l m_l + l2 (||A_p||^2 + ||B_p||^2)``. Evaluated with the new shared values and the own branch.

    Readings: A and A_p start from N(0, 1/r) as in the code (``init="fedsdg"``) or as LoRA's, B_p from N(0, 0.01^2), so
    that a gate has a gradient. Of the second penalty it is A_p's arbitrary start that weighs most;
    ``penalty="product"`` takes ``||B_p A_p||^2`` instead. The code sets a tenth of each client's images aside and never
    uses them, and weights clients equally: here neither. ``aggregation="alignment"`` is its README's. Further arguments
    as ``FedLoRA``.

    Args:
        rank: r, at least 1.
        own_rank: r_p.
        gate_lr: rate of the gates.
        gate_weight: l1.
        own_weight: l2.
        init: see above.
        penalty: see above.
        aggregation: the weighted mean, or ``AlignmentRule``.
        tau: of the latter.
        targets: the code's.
        head: whose it is.
        training: of all but the gates; the own branch has no weight decay.
    """

    shared = ("lora",)
    personal = ("own_lora", "head")
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        rank: Few = 8,
        own_rank: Few = 8,
        gate_lr: PositiveFloat = 0.1,
        gate_weight: NonNegativeFloat = 0.01,
        own_weight: NonNegativeFloat = 0.001,
        init: Literal["fedsdg", "kaiming"] = "fedsdg",
        penalty: Literal["factors", "product"] = "factors",
        aggregation: Literal["mean", "alignment"] = "mean",
        tau: PositiveFloat = 0.05,
        targets: list[Target] = ["proj", "fc2"],  # noqa: B006 (it is not changed)
        head: Literal["personal", "shared"] = "shared",
        training: LocalTraining = SDG_TRAINING,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, rank=rank, targets=targets, head=head, training=training, **settings)
        of = self.lora
        own = GatedLowRank(own_rank, of.alpha, of.targets, of.first_block, key="own")
        self.own_lora = own.fit(self.backbone.tower)
        with torch.no_grad(), keyed_initialization("FedSDG"):
            for target in of.targets:
                self.own_lora.b[target].normal_(0, 0.01)
                for part in (self.lora, self.own_lora) if init == "fedsdg" else ():
                    part.a[target].normal_(0, part.rank**-0.5)
        self.gate_lr, self.gate_weight, self.own_weight, self.penalty = gate_lr, gate_weight, own_weight, penalty
        self._new_rule = ServerRule if aggregation == "mean" else partial(AlignmentRule, tau)

    def parts(self) -> tuple[TowerPart, ...]:
        """Return the shared branch and the gated one."""
        return (self.lora, self.own_lora)

    def local_phases(self) -> list[Phase]:
        """Train everything at once, the gates at a rate of their own."""
        training = self.training_settings
        own = replace(training.group("own_lora.a", "own_lora.b"), weight_decay=0.0)
        gates = replace(training.group("own_lora.gate"), lr=self.gate_lr, weight_decay=0.0)
        return [training.phase_of(training.group("lora", "head"), own, gates)]

    def regulariser(self, client: Client, phase: int) -> Tensor:
        """Return the penalties of gates and own factors."""
        own = self.own_lora
        gates = torch.stack([gate.sigmoid().sum() for gate in own.gate.values()]).sum()
        sizes = []
        for target in own.targets:
            a, b = own.a[target], own.b[target]
            if self.penalty == "factors":
                sizes += [a.square().sum(), b.square().sum()]
            else:  # ||B A||^2 = <B^T B, A A^T>
                sizes.append(((b.mT @ b) * (a @ a.mT)).sum())
        return self.gate_weight * gates + self.own_weight * torch.stack(sizes).sum()

    def client_loss(self, client: Client, batch: MiniBatch) -> tuple[Tensor, Values]:
        """Return cross-entropy with the penalties; the gates' mean is recorded."""
        loss = cross_entropy(self.client_logits(client, batch), batch.y, batch.mask)
        gate = torch.cat([gate.sigmoid() for gate in self.own_lora.gate.values()]).mean()
        return loss + self.regulariser(client, batch.phase), {"cross_entropy": loss, "gate": gate}

    def make_server(self) -> ServerRule:
        """Return the weighted mean, or the mean by alignment."""
        return self._new_rule()
