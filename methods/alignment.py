"""Weigh clients by how well their updates agree with those of the others (FedSDG)."""

import torch
from torch import Tensor

from benchmark.federation import Round, Uploads, Values
from benchmark.ranges import PositiveFloat
from benchmark.server import ServerRule, weighted_mean


def alignment_weights(updates: Tensor, tau: float) -> Tensor:
    """Return the softmax over clients of ``c_k / tau``, c_k the cosine of client k's update with the others' mean.

    Args:
        updates: [S, P]; one that is 0 has a cosine of 0.
        tau: temperature.

    Returns:
        float64 [S]; (1,) of one client.
    """
    updates = updates.double()
    count = len(updates)
    if count == 1:
        return torch.ones(1, dtype=torch.float64)
    others = (updates.sum(0) - updates) / (count - 1)
    norms = updates.norm(dim=1).clamp(min=1e-8) * others.norm(dim=1).clamp(min=1e-8)
    return ((updates * others).sum(1) / norms / tau).softmax(0)


class AlignmentRule(ServerRule):
    """FedSDG's second server: weights by how well a client's factors moved with those of the others.

    Args:
        tau: temperature; 0.05, the code's, puts nearly all weight on one client.
    """

    def __init__(self, tau: PositiveFloat = 0.05) -> None:
        super().__init__()
        self.tau = tau

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Take the mean with these weights, of factors and head."""
        names = sorted(name for name in shared if name.startswith("lora."))
        moved = [(uploads.values[name] - shared[name]).flatten(1).double().cpu() for name in names]
        return weighted_mean(uploads.only(shared).values, alignment_weights(torch.cat(moved, dim=1), self.tau))
