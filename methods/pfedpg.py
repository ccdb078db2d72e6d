"""pFedPG: a generator on the server makes every client's prompts."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from benchmark.contract import Phase
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round, Terms, Uploads, Values
from benchmark.ranges import Few, NonNegativeFloat
from benchmark.seeds import keyed_initialization
from benchmark.server import ServerRule
from methods.fedvpt import FedVPT

PROMPT = "prompt.tokens"

#: Server steps on the descriptor of a client that never trains (pFedBayesPT, Table 3, gives no number).
NEW_CLIENT_STEPS = 5


class CrossAttentionGenerator(nn.Module):
    """``P_n = P_base + softmax((d_n W_Q)(P_base W_K)^T / sqrt(l_k)) (P_base W_V) W_O`` (pFedPG, Eq. 3).

    Read literally, a descriptor is one row, so all K rows of a client are shifted by one vector
    (``descriptor_tokens=1``); with ``descriptor_tokens=K`` every row has a shift of its own.
    One head, l_k = l_v = d, no biases; the paper gives neither these sizes nor the initial values: P_base and d_n start
    as VPT's prompts, the matrices Xavier-uniform.

    Args:
        prompt: P_base at the start, [K, d].
        descriptors: d_n at the start, [N, descriptor_tokens, d].
        wo_init: ``zero`` makes P_n = P_base at the start, and lets only W_O learn in the first step.
    """

    def __init__(self, prompt: Tensor, descriptors: Tensor, wo_init: Literal["xavier", "zero"]) -> None:
        super().__init__()
        width = prompt.shape[1]
        self.base = nn.Parameter(prompt)
        self.descriptors = nn.Parameter(descriptors)
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Parameter(torch.empty(width, width)) for _ in range(4))
        for matrix in (self.w_q, self.w_k, self.w_v, self.w_o):
            nn.init.xavier_uniform_(matrix)
        if wo_init == "zero":
            nn.init.zeros_(self.w_o)

    def forward(self, client: int) -> Tensor:
        """Return the prompts of one client, [K, d]."""
        query, key = self.descriptors[client] @ self.w_q, self.base @ self.w_k
        weights = F.softmax(query @ key.T / key.shape[1] ** 0.5, dim=-1)
        return self.base + weights @ (self.base @ self.w_v) @ self.w_o


class AdaINGenerator(nn.Module):
    """``P_n = s(d_n) (P_base - m(P_base)) / s(P_base) + m(d_n)``, the AdaIN ablation of pFedPG's Table 4.

    Mean m and standard deviation s are taken over the d features of each row, since one style vector has no statistics
    per channel; the descriptor is one row. Arguments as ``CrossAttentionGenerator``.
    """

    def __init__(self, prompt: Tensor, descriptors: Tensor) -> None:
        super().__init__()
        self.base = nn.Parameter(prompt)
        self.descriptors = nn.Parameter(descriptors)

    def forward(self, client: int) -> Tensor:
        """Return the prompts of one client, [K, d]."""
        style = self.descriptors[client]
        mean, std = style.mean(-1, keepdim=True), style.std(-1, keepdim=True, correction=0)
        return std * F.layer_norm(self.base, self.base.shape[-1:], eps=1e-5) + mean


class MLPGenerator(nn.Module):
    """``d_n -> MLP -> K linear layers, one a prompt token``, the MLP ablation of pFedPG's Table 4.

    It has no P_base. As in pFedHN (Shamsian et al., ICML 2021) the MLP has one input and three hidden layers of 100
    with ReLU.

    Args:
        num_prompts: K.
        descriptors: d_n at the start, [N, 1, d].
        hidden: width of the hidden layers.
    """

    def __init__(self, num_prompts: int, descriptors: Tensor, hidden: int = 100) -> None:
        super().__init__()
        width = descriptors.shape[-1]
        self.descriptors = nn.Parameter(descriptors)
        layers: list[nn.Module] = [nn.Linear(width, hidden), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Linear(hidden, hidden), nn.ReLU()]
        self.mlp = nn.Sequential(*layers)
        self.tokens = nn.ModuleList(nn.Linear(hidden, width) for _ in range(num_prompts))

    def forward(self, client: int) -> Tensor:
        """Return the prompts of one client, [K, d]."""
        hidden = self.mlp(self.descriptors[client])
        return torch.cat([token(hidden) for token in self.tokens])


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


class PFedPG(FedVPT):
    """pFedPG (Yang, Wang, Wang, "Efficient Model Personalization in Federated Learning via Client-Specific Prompt
    Generation", ICCV 2023).

    Down go the generated prompts P_n, up come the adapted ones P~_n (the same count as Delta_n = P~_n - P_n); the
    generator and the descriptors stay on the server, the heads with the clients. The client's objective and training
    are FedVPT's. The paper's result is the adapted prompt with the client's head (point ``local``); point ``server`` is
    the generated one.

    A client that never trains receives the prompts of its initial descriptor. Five times it trains them with its head,
    and the server takes a step on a copy of its descriptor and sends the prompts of that; then it fits its head.

    Deviations and readings:
    * Eq. 5 as printed moves P_n away from P~_n, since Delta_n is a descent direction and not a gradient; the default is
      ``toward``, as pFedHN's code does, and ``as_printed`` is the ablation.
    * Algorithm 1 shows one mini-batch, section 4.1.3 five epochs: five epochs.
    * Eq. 5 is per client: contributions are summed (``sum``); ``mean`` divides by the number of clients.
    * Descriptors of clients that are not in a round rest, with Adam too.

    Further arguments as ``FedVPT``.

    Args:
        num_prompts: K, at least 1.
        generator: ``cross_attention`` is the paper's; ``mlp`` and ``adain`` are the ablations of its Table 4.
        server_lr: alpha, learning rate of the generator; the paper's 0.001 hardly moves it with plain SGD.
        server_optimizer: of the generator.
        server_sign: see above.
        server_reduction: see above.
        descriptor_tokens: rows of a client's descriptor d_n, 1 or K.
        wo_init: start of W_O.
        broadcast_base: send every client P_base instead of P_n (the ``P_base`` ablation of Table 4).

    Raises:
        ConfigurationError: ``descriptor_tokens`` is neither 1 nor K, or ``broadcast_base`` with ``mlp``, which has no
            base.
    """

    paper_point = "local"

    def __init__(
        self,
        *arguments: Any,
        num_prompts: Few = 10,
        generator: Literal["cross_attention", "mlp", "adain"] = "cross_attention",
        server_lr: NonNegativeFloat = 0.001,
        server_optimizer: Literal["sgd", "adam"] = "sgd",
        server_sign: Literal["toward", "as_printed"] = "toward",
        server_reduction: Literal["sum", "mean"] = "sum",
        descriptor_tokens: Few = 1,
        wo_init: Literal["xavier", "zero"] = "xavier",
        broadcast_base: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, num_prompts=num_prompts, **settings)
        self.broadcast_base = broadcast_base
        self._new_rule = partial(
            GeneratorRule,
            generator,
            server_lr,
            server_optimizer,
            server_sign,
            server_reduction,
            descriptor_tokens,
            wo_init,
            broadcast_base,
        )

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Train a client that never trains as ``local_phases``, once for each step on the descriptor; then its head."""
        if not new:
            return []
        rounds = replace(self.training_settings, schedule="constant").phase("prompt", "head")
        steps = 0 if self.broadcast_base else NEW_CLIENT_STEPS
        return [rounds] * steps + super().finetune_phases(new)

    def make_server(self) -> ServerRule:
        """Return the server with the generator."""
        return self._new_rule()
