"""Prompt+AMP: every client has a prompt of its own, pulled towards a mean of the prompts most like it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmark.client_store import ClientStore
from benchmark.contract import Client, MiniBatch
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round, Terms, Uploads, Values
from benchmark.ranges import NonNegativeFloat, PositiveFloat
from benchmark.server import ServerRule
from methods.text_prompt import TextPromptMethod

CLOUD = "cloud_context"


def attentive_mean(own: Tensor, prompts: Tensor, alpha_k: float, sigma: float) -> Tensor:
    """FedAMP's cloud prompt ``u_i = (1 - sum_{j != i} xi_ij) p_i + sum_{j != i} xi_ij p_j``.

    ``xi_ij = alpha_K exp(-||p_i - p_j||^2 / sigma) / sigma``, alpha_K times the derivative of ``1 - e^{-x / sigma}`` at
    the squared distance.

    Args:
        own: p_i, [L, w].
        prompts: those of all clients, p_i among them, [N, L, w].
        alpha_k: step size of the server.
        sigma: how fast the attention falls with the distance.

    Returns:
        u_i, [L, w]; exactly p_i where all prompts are equal.
    """
    # Around p_i: the weights sum to one, and p_i's own term is zero.
    away = prompts - own
    xi = alpha_k / sigma * torch.exp(-away.flatten(1).square().sum(1) / sigma)
    return own + torch.tensordot(xi, away, dims=1)


class AttentiveRule(ServerRule):
    """Keep the last prompt that each client has uploaded, and send every client its cloud prompt, ``attentive_mean``.

    Clients that were never selected are in the mean with the initial prompt.

    Args:
        alpha_k: as in ``attentive_mean``.
        sigma: as in ``attentive_mean``.
    """

    def __init__(self, alpha_k: float, sigma: float) -> None:
        super().__init__()
        self.alpha_k = alpha_k
        self.sigma = sigma

    def start(self, initial: Values, terms: Terms) -> None:
        """Give all clients the initial prompt."""
        super().start(initial, terms)
        self.prompts = ClientStore({"context": initial["context"]}, terms.num_clients)

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Send the cloud prompts, [K, L, w]."""
        prompts = self.prompts.all_rows("context")
        clouds = [attentive_mean(prompts[client], prompts, self.alpha_k, self.sigma) for client in clients]
        return Broadcast(own={CLOUD: torch.stack(clouds)})

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Replace the old prompts by the uploaded ones."""
        self.prompts.write("context", uploads.clients, uploads.values["context"])
        return {}


class PromptAMP(TextPromptMethod):
    """Prompt+AMP, baseline of FedPGP (Cui et al., ICML 2024) after FedAMP (Huang et al., AAAI 2021).

    Objective of client i: ``CE_i(p) + (lambda / (2 alpha_K)) ||p - u_i||^2``, from its own p_i and not from u_i, the
    cloud prompt that the server makes of all clients' prompts (``attentive_mean``). Evaluated with the client's own
    prompt. Messages: L x w numbers each way, u_i down and p_i up. With ``lam=0`` it is CoOp.

    FedAMP's formulas; a published implementation takes the norm without its square and of detached values, so that the
    term has no gradient. Where the prompts are close every xi is near alpha_K / sigma, and all others together have a
    weight of at most 1 only if ``(N - 1) alpha_K <= sigma``. So 1 for all three constants, which is in use, is refused.

    Further arguments as ``TextPromptMethod``.

    Args:
        lam: lambda, weight of the pull.
        alpha_k: alpha_K, step size of the server.
        sigma: how fast the attention falls with the distance.

    Raises:
        ConfigurationError: ``alpha_k`` or ``sigma`` not above 0, or ``(N - 1) alpha_k > sigma``.
    """

    shared = ()
    personal = ("context",)
    uploads = ("context",)
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        lam: NonNegativeFloat = 1.0,
        alpha_k: PositiveFloat = 0.1,
        sigma: PositiveFloat = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        if (self.num_clients - 1) * alpha_k > sigma:
            raise ConfigurationError(
                f"alpha_k={alpha_k} with sigma={sigma} and {self.num_clients} clients can give a client's own prompt a "
                f"negative weight; alpha_k must be at most sigma / (N - 1) = {sigma / (self.num_clients - 1):.4g}"
            )
        self.pull = lam / alpha_k
        self._new_rule = partial(AttentiveRule, alpha_k, sigma)

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy plus the pull towards the cloud prompt."""
        loss, pull = super().client_loss(client, batch), self.regulariser(client, batch.phase)
        return loss if pull is None else loss + pull

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return the pull towards the cloud prompt."""
        return self.pull / 2 * (self.context - client.received[CLOUD]).square().sum() if self.pull else None

    def make_server(self) -> ServerRule:
        """Return the server with the attention."""
        return self._new_rule()
