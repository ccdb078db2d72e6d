"""FLoRA: the server stacks the clients' factors, so that their products are averaged exactly."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmark.backbones.parts import AtTargets, LowRank, Target, Tower, TowerPart
from benchmark.contract import Client, Phase
from benchmark.federation import Round, Terms, Uploads, Values
from benchmark.seeds import torch_generator
from benchmark.server import ServerRule
from methods.fedlora import FedLoRA


class Merged(AtTargets, nn.Module):
    """The sum of earlier rounds' products, added to frozen projections: ``W0 x + M x``.

    Args:
        like: the factors whose products are added.
        tower: the tower's sizes.

    Attributes:
        weights: M of each target, [L, out, in], from 0 on.
    """

    def __init__(self, like: LowRank, tower: Tower) -> None:
        super().__init__()
        self.aim(like.targets)
        self.projections, self.first_layer = like.projections, like.first_layer
        sizes = {target: tower.sizes(target) for target in like.targets}
        layers = tower.depth - like.first_layer
        self.weights = nn.ParameterDict({t: torch.zeros(layers, out, into) for t, (into, out) in sizes.items()})

    def change(self, target: Target, layer: int, x: Tensor) -> Tensor:
        """Return ``M x`` of a target."""
        return x @ self.weights[target][layer - self.first_layer].mT


class StackingRule(ServerRule):
    """FLoRA's server: ``M <- M + (alpha / r) sum_k w_k B_k A_k``, A drawn anew, B = 0; all else is averaged.

    Stacked factors give that sum exactly: ``[B_1 ... B_m] [w_1 A_1; ...; w_m A_m]``.

    Args:
        scale: alpha / r.
    """

    takes_stale = False

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def start(self, initial: Values, terms: Terms) -> None:
        """Remember which factors there are."""
        super().start(initial, terms)
        self.factors = [name for name in initial if name.startswith("lora.a.")]

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Add the products, and begin the factors anew."""
        averaged = {name: value for name, value in shared.items() if not name.startswith(("lora.", "merged."))}
        made = super().aggregate(round, averaged, uploads)
        weights = uploads.weights / uploads.weights.sum()
        for name in self.factors:
            target = name.removeprefix("lora.a.")
            a, b = uploads.values[name].double().cpu(), uploads.values[f"lora.b.{target}"].double().cpu()
            stacked_a = (weights.to(a)[:, None, None, None] * a).movedim(0, 1).flatten(1, 2)  # [L, S r, in]
            stacked_b = b.permute(1, 2, 0, 3).flatten(2)  # [L, out, S r]
            merged = shared[f"merged.weights.{target}"]
            made[f"merged.weights.{target}"] = merged + (self.scale * stacked_b @ stacked_a).to(merged)
            generator = torch_generator(round.seed, "stacked factors", round.number, target)
            bound = shared[name].shape[-1] ** -0.5
            drawn = torch.empty(shared[name].shape).uniform_(-bound, bound, generator=generator)
            made[name] = drawn.to(shared[name])
            made[f"lora.b.{target}"] = torch.zeros_like(shared[f"lora.b.{target}"])
        return made


class FLoRA(FedLoRA):
    """FLoRA (Wang et al., "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
    Adaptations", NeurIPS 2024) on a ViT.

    Clients train A and B as in FedAvg-LoRA and send them. The server adds the weighted sum of their products to what
    all clients add to the frozen weights from then on, and every round begins with a new A and B = 0. So nothing is
    lost in the aggregation, but a round's first gradient of A is 0.

    Deviations: the server sends the sum itself, in x out numbers a projection, and not m times the factors, so that
    clients that missed rounds have what they need; it is what counts as sent. All clients have the same rank. The head
    stays with its client by default. Arguments as ``FedLoRA``.
    """

    shared = ("lora", "merged")
    per_example = True

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.merged = Merged(self.lora, self.backbone.tower)

    def parts(self) -> tuple[TowerPart, ...]:
        """Return what earlier rounds added, and the factors."""
        return (self.merged, self.lora)

    def local_phases(self) -> list[Phase]:
        """Train factors and head; what was merged rests."""
        trained = [name for name in (*self.shared, *self.personal) if name != "merged"]
        return [self.training_settings.phase(*trained)]

    def message(self, client: Client, noise: Values) -> Values:
        """Return the factors, and the head where it is shared; what was merged does not go back."""
        sent = super().message(client, noise)
        assert isinstance(sent, dict)
        return {name: value for name, value in sent.items() if not name.startswith("merged.")}

    def make_server(self) -> ServerRule:
        """Return the server that stacks."""
        return StackingRule(self.lora.scale)
