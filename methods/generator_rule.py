"""pFedPG's server: it learns the generator of prompts from how clients change what they are sent."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round, Terms, Uploads, Values
from benchmark.ranges import Few, NonNegativeFloat
from benchmark.seeds import keyed_initialization
from benchmark.server import ServerRule
from methods.prompt_generators import AdaINGenerator, CrossAttentionGenerator, MLPGenerator

PROMPT = "prompt.tokens"

#: Server steps on the descriptor of a client that never trains (pFedBayesPT, Table 3, gives no number).
NEW_CLIENT_STEPS = 5


def generator_objective(generated: Sequence[Tensor], adapted: Sequence[Tensor], sign: float) -> Tensor:
    """Return ``-sign * sum_n <P_n(phi), Delta_n>`` with ``Delta_n = P~_n - P_n`` held constant.

    One SGD step on it is ``phi <- phi + sign * alpha * sum_n J_phi(P_n)^T Delta_n``.

    Args:
        generated: P_n(phi), [K, d] each, with gradient.
        adapted: P~_n, what the client uploaded, [K, d] each.
        sign: +1 moves P_n towards P~_n, -1 away.
    """
    terms = [(p * (after - p).detach()).sum() for p, after in zip(generated, adapted, strict=True)]
    return -sign * torch.stack(terms).sum()


class GeneratorRule(ServerRule):
    """pFedPG's server: broadcasts generated prompts, and learns the generator from how the clients changed them.

    Arguments as ``PFedPG``, where ``lr``, ``optimizer``, ``sign`` and ``reduction`` are called ``server_...``.
    """

    def __init__(
        self,
        generator: Literal["cross_attention", "mlp", "adain"] = "cross_attention",
        lr: NonNegativeFloat = 0.001,
        optimizer: Literal["sgd", "adam"] = "sgd",
        sign: Literal["toward", "as_printed"] = "toward",
        reduction: Literal["sum", "mean"] = "sum",
        descriptor_tokens: Few = 1,
        wo_init: Literal["xavier", "zero"] = "xavier",
        broadcast_base: bool = False,
    ) -> None:
        super().__init__()
        if broadcast_base and generator == "mlp":
            raise ConfigurationError(
                "PFedPG: broadcast_base sends P_base, and generator=mlp has none; use cross_attention or adain"
            )
        for name, given, usual in (("descriptor_tokens", descriptor_tokens, 1), ("wo_init", wo_init, "xavier")):
            if given != usual and generator != "cross_attention":
                raise ConfigurationError(
                    f"PFedPG: {name}={given} is of generator=cross_attention; leave it out with {generator}"
                )
        self.kind, self.lr, self.optimizer_name = generator, lr, optimizer
        self.sign = 1.0 if sign == "toward" else -1.0
        self.reduction, self.descriptor_tokens, self.broadcast_base = reduction, descriptor_tokens, broadcast_base
        self.wo_init: Literal["xavier", "zero"] = wo_init

    def start(self, initial: Values, terms: Terms) -> None:
        """Make the generator with keyed initial values."""
        super().start(initial, terms)
        prompt = initial[PROMPT].cpu().clone()
        if self.kind == "cross_attention" and self.descriptor_tokens not in (1, len(prompt)):
            raise ConfigurationError(
                f"PFedPG: descriptor_tokens={self.descriptor_tokens}, but a descriptor has one row, or one for each of "
                f"the {len(prompt)} prompts: give 1 or {len(prompt)}"
            )
        with keyed_initialization("generator"):
            bound = prompt.abs().max().item()
            rows = self.descriptor_tokens if self.kind == "cross_attention" else 1
            descriptors = torch.empty(terms.num_clients, rows, prompt.shape[1]).uniform_(-bound, bound)
            self.generator: nn.Module
            if self.kind == "cross_attention":
                self.generator = CrossAttentionGenerator(prompt, descriptors, self.wo_init)
            elif self.kind == "adain":
                self.generator = AdaINGenerator(prompt, descriptors)
            else:
                self.generator = MLPGenerator(len(prompt), descriptors)
            self.generator.to(prompt.dtype)
        self.optimizer = self._make_optimizer(self.generator.parameters())

    def _make_optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return (torch.optim.SGD if self.optimizer_name == "sgd" else torch.optim.Adam)(parameters, lr=self.lr)

    def generate(self, clients: Sequence[int]) -> list[Tensor]:
        """Return P_n of these clients, [K, d] each; one at a time, so that they do not depend on who else asks."""
        if self.broadcast_base:
            return [self.generator.get_parameter("base").clone() for _ in clients]
        return [self.generator(client) for client in clients]

    @torch.no_grad()
    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Send each client its own prompts, [K, num_prompts, d]."""
        return Broadcast(own={PROMPT: torch.stack(self.generate(clients))})

    @torch.enable_grad()
    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Take one step of the server's optimizer on ``generator_objective`` (pFedPG, Eq. 4 and 5)."""
        adapted = list(uploads.values[PROMPT].cpu())
        objective = generator_objective(self.generate(uploads.clients), adapted, self.sign)
        if self.reduction == "mean":
            objective = objective / len(adapted)
        self.optimizer.zero_grad()
        objective.backward()
        descriptors = self.generator.get_parameter("descriptors")
        rests = torch.ones(len(descriptors), dtype=torch.bool)
        rests[list(uploads.clients)] = False
        before = descriptors.detach()[rests]
        self.optimizer.step()
        with torch.no_grad():
            descriptors[rests] = before  # Adam's momentum would move them
        return {}

    @torch.enable_grad()
    def adapt(self, round: Round, clients: tuple[int, ...], phase: int, values: Values) -> Values:
        """Take a step of the server's optimizer on copies of these clients' descriptors, while the generator rests.

        Every client is alone in its step, so that ``reduction`` does not matter. The copies last from the first of
        these phases to the last.
        """
        if self.broadcast_base or phase >= NEW_CLIENT_STEPS:
            return {}
        if phase == 0:
            copies = self.generator.get_parameter("descriptors")[list(clients)].detach().clone().requires_grad_()
            self._adapting = copies, self._make_optimizer([copies])
        descriptors, optimizer = self._adapting
        generated = [self._generate_from(descriptors, row) for row in range(len(clients))]
        objective = generator_objective(generated, list(values[PROMPT].cpu()), self.sign)
        (descriptors.grad,) = torch.autograd.grad(objective, [descriptors])
        optimizer.step()
        if phase == NEW_CLIENT_STEPS - 1:
            del self._adapting
        return {PROMPT: torch.stack([self._generate_from(descriptors, row).detach() for row in range(len(clients))])}

    def _generate_from(self, descriptors: Tensor, row: int) -> Tensor:
        """Return P_n of one row of other descriptors."""
        return functional_call(self.generator, {"descriptors": descriptors}, (row,))

    def get_extra_state(self) -> dict[str, Any]:
        """Return the state of the generator's optimizer."""
        return self.optimizer.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state of the generator's optimizer."""
        self.optimizer.load_state_dict(state)
