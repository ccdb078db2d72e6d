"""LoRA-FAIR: FedAvg-LoRA whose server corrects the mean of B towards the mean of the products."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmark.federation import Round, Uploads, Values
from benchmark.ranges import NonNegativeFloat
from benchmark.server import ServerRule
from methods.fedlora import FedLoRA


def corrected(a: Tensor, b: Tensor, weights: Tensor, rho: float, mu: float | None = None) -> Tensor:
    """Return ``B' = B + argmin_D ||D A - R||^2 + mu ||D||^2`` with ``R = sum_k w_k B_k A_k - B A``, B and A the means.

    In closed form ``D = R A^T (A A^T + mu I)^-1``, of which ``R A^T`` takes products of r x r matrices alone.

    Args:
        a: A_k, [S, ..., r, in].
        b: B_k, [S, ..., out, r].
        weights: w_k, [S], which sum up to 1.
        rho: mu is rho times the mean eigenvalue of A A^T.
        mu: itself, instead of rho.

    Returns:
        float64 [..., out, r].
    """
    a, b, weights = a.double().cpu(), b.double().cpu(), weights.double().cpu()
    mean_a, mean_b = torch.einsum("s,s...->...", weights, a), torch.einsum("s,s...->...", weights, b)
    gram = mean_a @ mean_a.mT
    residual = torch.einsum("s,s...->...", weights, b @ (a @ mean_a.mT)) - mean_b @ gram
    rank = gram.shape[-1]
    scale = rho * gram.diagonal(dim1=-2, dim2=-1).mean(-1) if mu is None else torch.full(gram.shape[:-2], mu).double()
    regular = gram + scale[..., None, None] * torch.eye(rank, dtype=torch.float64)
    return mean_b + torch.cholesky_solve(residual.mT, torch.linalg.cholesky(regular)).mT


class FairRule(ServerRule):
    """LoRA-FAIR's server: everything is averaged with n_k, and B is corrected in host memory and double precision.

    Args:
        rho: see ``corrected``; ``inf`` leaves the mean as it is.
        mu: instead of rho.
    """

    def __init__(self, rho: float = 0.01, mu: NonNegativeFloat | None = None) -> None:
        super().__init__()
        self.rho, self.mu = rho, mu

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Take the means, and correct each B."""
        made = super().aggregate(round, shared, uploads)
        if self.rho == float("inf") and self.mu is None:
            return made
        weights = uploads.weights / uploads.weights.sum()
        for name in [name for name in made if name.startswith("lora.b.") and made[name].numel()]:
            a, b = uploads.values[name.replace("lora.b.", "lora.a.")], uploads.values[name]
            made[name] = corrected(a, b, weights, self.rho, self.mu).to(made[name])
        return made


class LoRAFAIR(FedLoRA):
    """LoRA-FAIR (Bian et al., "LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement",
    ICCV 2025).

    Clients and messages are FedAvg-LoRA's. The server keeps the mean of A, which the next round starts from, and
    corrects the mean of B so that the product comes near the mean of the products.

    Readings, as the paper could not be read and the formulas are those of a published port: the correction is the
    port's closed form, ridge regression, where notes on the paper have SGD on a cosine; its weight is relative to the
    size of A A^T, since the port's 0.1 fits A's that are 70 times as large as the usual ones; the head is shared by
    default, as there; weights are n_k, where the port has equal ones. The correction sees the row space of A alone.
    Further arguments as ``FedLoRA``.

    Args:
        head: whose it is.
        residual_rho: weight of the correction's size, as a share of the mean eigenvalue of A A^T.
        residual_mu: the same as a number of its own, instead of ``residual_rho``.
    """

    def __init__(
        self,
        *arguments: Any,
        residual_rho: NonNegativeFloat = 0.01,
        residual_mu: NonNegativeFloat | None = None,
        head: Literal["personal", "shared"] = "shared",
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, head=head, **settings)
        self._new_rule = partial(FairRule, residual_rho, residual_mu)

    def make_server(self) -> ServerRule:
        """Return the server that corrects B."""
        return self._new_rule()
