"""Move features within a ball to where a loss is greater (FOCoOp's robust objective)."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def moved_uphill(loss: Callable[..., Tensor], features: Sequence[Tensor], rho: float, steps: int) -> list[Tensor]:
    """Return features of several groups, each row moved by at most rho and L2-normalised again.

    So many ``steps`` ``d <- Proj(d + (rho / 2) g / ||g||)`` on every row of the first group, then of the next: g is the
    gradient of the loss at ``normalise(W + d)``, Proj the projection onto the ball of radius rho. d itself has no
    gradient.

    Args:
        loss: of all groups, a scalar.
        features: W, L2-normalised rows [n, e] of each group.
        rho: radius of the ball.
        steps: of each group.
    """
    fixed = [rows.detach() for rows in features]

    def loss_at(*away: Tensor) -> Tensor:
        return loss(*(F.normalize(row + d, dim=-1) for row, d in zip(fixed, away, strict=True)))

    away = [torch.zeros_like(rows) for rows in fixed]
    for place in range(len(fixed)):
        for _ in range(steps):
            gradient = torch.func.grad(loss_at, place)(*away)
            step = gradient / gradient.norm(dim=-1, keepdim=True).clamp(min=1e-12)
            d = away[place] + rho / 2 * step
            away[place] = d * (rho / d.norm(dim=-1, keepdim=True).clamp(min=rho))
    return [F.normalize(rows + d.detach(), dim=-1) for rows, d in zip(features, away, strict=True)]
