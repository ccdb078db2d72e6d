"""FOCoOp's server: an optimal transport from the clients' contexts of foreign images to the contexts of classes."""

from typing import Literal

import torch
from torch import Tensor

from benchmark.federation import Round, Uploads, Values
from benchmark.ranges import PositiveFloat, UnitInterval
from benchmark.server import ServerRule

Mix = Literal["barycenter", "official"]
Select = Literal["slot", "official", "mean"]


def unbalanced_plan(cost: Tensor, reg: float, most: int = 1000, tolerance: float = 1e-10) -> Tensor:
    """Return the plan Pi that minimises ``<Pi, M> + reg KL(Pi 1, a) + reg KL(Pi^T 1, b)`` for uniform a and b.

    Majorisation-minimisation (Chapel et al., NeurIPS 2021), as ``mm_unbalanced`` of POT: from ``Pi = a b^T``, repeat
    ``Pi <- sqrt(a b^T) exp(-M / (2 reg)) Pi / sqrt(row sums x column sums)``.

    Args:
        cost: M, float64 [n, C].
        reg: weight of the marginals.
        most: so many steps at most.
        tolerance: it ends where a step changes the plan by less, in the Frobenius norm.

    Returns:
        [n, C], not negative.
    """
    together = torch.full_like(cost, 1 / cost.numel())
    kernel, plan = together.sqrt() * (-cost / (2 * reg)).exp(), together
    for _ in range(most):
        before = plan
        plan = kernel * plan / (plan.sum(1, keepdim=True) * plan.sum(0, keepdim=True)).sqrt()
        if torch.linalg.norm(plan - before) < tolerance:
            break
    return plan


def upper_cluster(masses: Tensor, most: int = 100) -> Tensor:
    """Return which of the masses [n] are in the upper of two clusters, bool [n]; none where all are equal.

    2-means from the least and the greatest mass, at most ``most`` steps. A mass in the middle is of the lower one.
    """
    low, high = masses.min(), masses.max()
    upper = torch.zeros_like(masses, dtype=torch.bool)
    for _ in range(most if low < high else 0):
        before, upper = upper, (masses - high).abs() < (masses - low).abs()
        if torch.equal(upper, before):
            break
        low, high = masses[~upper].mean(), masses[upper].mean()
    return upper


def mixed(classes: Tensor, contexts: Tensor, plan: Tensor, ema: float, mix: Mix) -> Tensor:
    """Return class contexts, [C, d], moved towards what the plan brings them: ``ema`` of the old and the rest new.

    What it brings class c is ``sum_i Pi_ic x_i / sum_i Pi_ic``, or, as the code has it, without the division. A class
    without any mass stays.

    Args:
        classes: [C, d].
        contexts: x, those that were matched, [h, d].
        plan: their rows of the plan, [h, C].
        ema: share of the old.
        mix: ``barycenter`` divides, ``official`` does not.
    """
    mass = plan.sum(0).unsqueeze(1)
    brought = plan.T @ contexts
    if mix == "barycenter":
        brought = brought / mass
    return torch.where(mass > 0, ema * classes + (1 - ema) * brought, classes)


class ContextMatching(ServerRule):
    """FOCoOp's server, in float64.

    Class contexts G become their mean weighted with n_k. All clients' foreign contexts X are then brought to G by an
    unbalanced transport (``unbalanced_plan``), of which the cost is the squared distance over its largest value. The X
    with most mass (``upper_cluster``) look like clients' classes, and are mixed into G (``mixed``). One context for
    all classes is one column of the plan.

    Args:
        reg: weight of the transport's marginals.
        ema: share of G that stays.
        mix: see ``mixed``.
        select: the new foreign contexts. ``slot``: of each row that of the client where it has least mass, the first
            one where several do. ``official``: the K contexts of least mass among those not in the upper cluster, by
            mass, again from the first one where they are fewer. ``mean``: the mean weighted with n_k.
    """

    def __init__(self, reg: PositiveFloat, ema: UnitInterval, mix: Mix, select: Select) -> None:
        super().__init__()
        self.reg, self.ema, self.mix, self.select_rows = reg, ema, mix, select

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Average, match, mix, and choose the new foreign contexts."""
        made = super().aggregate(round, shared, uploads)
        uploaded, mean = uploads.values["ood_context"], made["context"]  # [S, K, L, w] and [C, L, w] or [L, w]
        contexts = uploaded.detach().cpu().double().flatten(2).flatten(0, 1)
        classes = mean.detach().cpu().double().reshape(-1, contexts.shape[1])
        # Without a matrix product, so that equal contexts have equal costs.
        cost = torch.cdist(contexts, classes, compute_mode="donot_use_mm_for_euclid_dist").square()
        plan = unbalanced_plan(cost / cost.max().clamp(min=torch.finfo(cost.dtype).tiny), self.reg)
        masses = plan.sum(1)
        matched = upper_cluster(masses)
        made["context"] = (
            mixed(classes, contexts[matched], plan[matched], self.ema, self.mix).reshape(mean.shape).to(mean)
        )
        if self.select_rows != "mean":
            made["ood_context"] = uploaded.flatten(0, 1)[self.chosen(masses, matched, uploaded.shape[1])]
        return made

    def chosen(self, masses: Tensor, matched: Tensor, count: int) -> Tensor:
        """Return the places of the new foreign contexts among all uploaded ones, client after client: [K]."""
        rows = torch.arange(count)
        if self.select_rows == "slot":
            # NumPy takes the first of equal ones; torch does not say which.
            return torch.from_numpy(masses.reshape(-1, count).numpy().argmin(0)) * count + rows
        unmatched = (~matched).nonzero().flatten()
        order = unmatched[masses[unmatched].argsort(stable=True)]
        return order[rows % len(order)]
