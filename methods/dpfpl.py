"""DP-FPL: a shared context plus a personal one, whose steps stay in a subspace of low rank, so that noise does too."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.contract import Client, Phase
from benchmark.errors import ConfigurationError
from benchmark.federation import Terms, Values
from benchmark.ranges import FewOrNone, NonNegativeFloat
from benchmark.seeds import keyed_initialization, torch_generator
from methods.text_prompt import TextPromptMethod


def orthonormal(columns: Tensor) -> Tensor:
    """Return what Gram-Schmidt's process makes of the columns of a matrix [n, k] with k <= n, [n, k]; finite always."""
    q, r = torch.linalg.qr(columns)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def factors(own: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return U [L, k] and V [k, w] of one power iteration: ``U = orth(p_L Omega)``, ``V = orth(p_L^T U)^T``.

    Args:
        own: p_L, [L, w].
        start: Omega, [w, k] with k <= L.
    """
    u = orthonormal(own @ start)
    return u, orthonormal(own.mT @ u).mT


def mapped_back(change: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Return ``g_U V + U g_V - U U^T g_U V`` with ``g_U = G V^T``, ``g_V = U^T G``: what factors can follow of G.

    Args:
        change: G, [L, w].
        u: orthonormal columns, [L, k].
        v: orthonormal rows, [k, w].
    """
    rows, columns = change @ v.mT @ v, u @ (u.mT @ change)
    return rows + columns - u @ (u.mT @ rows)


class DPFPL(TextPromptMethod):
    """DP-FPL (Tran et al., "Privacy-Preserving Personalized Federated Prompt Learning for Multimodal Large Language
    Models", ICLR 2025).

    A client's context is ``p_G + p_L``, p_G shared and p_L its own. Before each step p_L is written as ``U V + R`` of
    rank k (``factors``); a step moves p_L only as far as steps of U and V could (``mapped_back``), so that of noise on
    the gradient, too, no more than rank 2k is left. R, which counts as a constant, keeps all of p_L. Objective:
    cross-entropy. The server averages p_G weighted with n_k; p_L never leaves. Evaluated with the new p_G and the
    client's own p_L. Message: p_G alone, L x w numbers each way. With ``rank=0`` p_L rests, with ``rank=num_context``
    it is free: FedPGP's change of full rank, without contrast.

    Privacy is the run's own, with its account: ``data.record_privacy`` clips and noises each image's gradient, of both
    contexts together, before anything is made of it. The paper clips the mean of a mini-batch, whose sensitivity to one
    image is up to twice the norm, and accounts for a B-th of it, so that its printed epsilon is not what holds; its
    noise on p_G's mean adds nothing here. A user-level server protects p_G alone.

    Readings: the sum is the paper's definition, its Algorithm 1 writes two prompts. Omega is drawn once for each
    client; the paper draws it in every step. The whole step is mapped back, momentum and weight decay included; with
    plain SGD, the paper's, that is its Eq. 4. The release adds the last term of that equation instead of subtracting
    it, and has one optimizer for all clients. All clients start with the same p_L, drawn independently of p_G.

    Further arguments as ``TextPromptMethod``.

    Args:
        rank: k, at most L.
        own_lr: rate of p_L; None for that of ``training``.

    Raises:
        ConfigurationError: ``rank`` above ``num_context``.
    """

    personal = ("own_context",)
    per_example = True

    def __init__(
        self, *arguments: Any, rank: FewOrNone = 8, own_lr: NonNegativeFloat | None = None, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        if rank > self.num_context:
            raise ConfigurationError(f"DPFPL: rank={rank} is above num_context={self.num_context}; give at most that")
        self.rank, self.own_lr = rank, own_lr
        with keyed_initialization("own context"):
            self.own_context = nn.Parameter(0.02 * torch.randn(self.context.shape))

    def prompt(self) -> Tensor:
        """Return ``p_G + p_L``, [L, w]."""
        return self.context + self.own_context

    def client_constants(self, number: int, terms: Terms) -> Values:
        """Return Omega, where a client's power iteration starts, as ``start`` [w, k]."""
        generator = torch_generator(terms.seed, "DP-FPL", number)
        return {"start": torch.randn(self.clip.text_width, self.rank, generator=generator)}

    def local_phases(self) -> list[Phase]:
        """Train both contexts, the own one with its rate and in its subspace."""
        shared, own = (self.training_settings.group(name) for name in ("context", "own_context"))
        own = own if self.own_lr is None else replace(own, lr=self.own_lr)
        return [replace(self.training_settings.phase_of(shared, own), transform=self.in_subspace)]

    def in_subspace(self, client: Client, update: Values) -> Values:
        """Return ONE client's step of p_L, mapped back from the factors."""
        own = client.parameters["own_context"]
        u, v = factors(own, client.constants["start"].to(own))
        return {"own_context": mapped_back(update["own_context"], u, v)}
