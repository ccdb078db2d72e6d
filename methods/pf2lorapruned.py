"""PF2LoRA with pruned ranks: how many of its own each client keeps is learned."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmark.backbones.parts import LowRank, Target
from benchmark.contract import Client, Message
from benchmark.federation import Values
from benchmark.ranges import AboveZero, Few, PositiveInt
from methods.pf2lora import PF2LoRA


class MaskedLowRank(LowRank):
    """Low-rank factors some of whose ranks are switched off for good.

    Attributes:
        kept: of each target, 1 for ranks that are there and 0 for others, [L, r].
    """

    def fit(self, tower: Any) -> "MaskedLowRank":
        """Make the factors and their masks."""
        super().fit(tower)
        self.kept = nn.ParameterDict({name: torch.ones(value.shape[:2]) for name, value in self.a.items()})
        return self

    def change(self, target: Target, layer: int, x: Tensor) -> Tensor:
        """Return ``(alpha / r) B (m A) x`` of a target."""
        at = layer - self.first_layer
        return self.scale * ((x @ self.a[target][at].mT * self.kept[target][at]) @ self.b[target][at].mT)


def ranks_kept(a: Tensor, b: Tensor, kept: Tensor, rule: str, share: float) -> Tensor:
    """Return which ranks stay, of the size ``s_i = ||A[i, :]|| ||B[:, i]||`` of each, [..., r] of 0 and 1.

    Args:
        a: A, [..., r, in].
        b: B, [..., out, r].
        kept: which are there now, [..., r].
        rule: ``largest`` keeps ``share`` of the r ranks and at least one, ties to the lower one; ``threshold`` those of
            at least ``share`` of the largest.
        share: see above.
    """
    size = a.norm(dim=-1) * b.norm(dim=-2) * kept
    if rule == "threshold":
        stay = size >= share * size.amax(-1, keepdim=True)
    else:
        count = max(1, int(share * size.shape[-1]))
        order = size.argsort(dim=-1, descending=True, stable=True)
        stay = torch.zeros_like(size).scatter(-1, order[..., :count], 1.0).bool()
    return kept * stay.to(kept)


class PF2LoRAPruned(PF2LoRA):
    """PF2LoRA whose own ranks are pruned: after the round in which a client takes part for the ``prune_from``-th time,
    and every ``prune_every`` times after that, its small ranks are switched off for good.

    A rank's size is ``s_i = ||C[i, :]|| ||D[:, i]||``. ``threshold`` keeps those of at least ``prune_share`` of a
    layer's largest, so that ranks differ by client and layer. ``largest`` keeps that share of the r_p ranks,
    rounded down but at least one: as a published port does with a share of 0.5, it is the same number for all. The
    port counts rounds of the run instead, so that a client that is not in one of them is never pruned. A round
    counts for a client if it is not void and the client's upload leaves. Clients are not scored right after local
    training, as their ranks change once more. Further arguments as ``PF2LoRA``.

    Args:
        own_rank: r_p, at least 1.
        prune: see above.
        prune_share: see above.
        prune_from: the participation from which ranks are pruned.
        prune_every: participations between two prunings.
    """

    personal = ("own_lora", "pruning", "head")
    per_example = True
    factors = MaskedLowRank
    evaluate_local = False

    def __init__(
        self,
        *arguments: Any,
        own_rank: Few = 2,
        prune: Literal["threshold", "largest"] = "threshold",
        prune_share: AboveZero = 0.1,
        prune_from: PositiveInt = 10,
        prune_every: Few = 5,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, own_rank=own_rank, **settings)
        self.pruning = nn.ParameterDict({"rounds": torch.zeros(())})
        self.prune, self.prune_share = prune, prune_share
        self.prune_from, self.prune_every = prune_from, prune_every

    def message(self, client: Client, noise: Values) -> Message:
        """Send what is shared; keep which ranks stay for ``take``."""
        rounds = client.parameters["pruning.rounds"] + 1
        since = rounds - self.prune_from
        now = (since >= 0) & (since % self.prune_every == 0)
        kept = {"pruning.rounds": rounds}
        for target in self.own_lora.targets:
            a, b, before = (client.parameters[f"own_lora.{kind}.{target}"] for kind in ("a", "b", "kept"))
            after = ranks_kept(a, b, before, self.prune, self.prune_share)
            kept[f"own_lora.kept.{target}"] = torch.where(now, after, before)
        sent = super().message(client, noise)
        assert isinstance(sent, dict)
        return sent, kept

    def take(self, client: Client, kept: Values) -> Values:
        """Switch ranks off: their factors become 0, and stay so."""
        made = dict(kept)
        for target in self.own_lora.targets if kept else ():
            mask = kept[f"own_lora.kept.{target}"]
            made[f"own_lora.a.{target}"] = client.parameters[f"own_lora.a.{target}"] * mask.unsqueeze(-1)
            made[f"own_lora.b.{target}"] = client.parameters[f"own_lora.b.{target}"] * mask.unsqueeze(-2)
        return made
