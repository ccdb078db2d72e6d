"""Robust aggregation as a rule around another: hostile updates move what is learned as little as may be."""

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from benchmark.errors import ConfigurationError
from benchmark.federation import Facts, Round, Terms, Uploads, Values
from benchmark.ranges import FewOrNone
from benchmark.robust.byzfl import Aggregator, PreAggregator, aggregator, byzfl, pre_aggregator, rows_after
from benchmark.seeds import derived_seed
from benchmark.server import Declared, ServerRule, WrappedRule


class RobustAggregation(WrappedRule):
    """An aggregator of ByzFL (Gonzalez et al., 2025) instead of the mean, for every rule that looks at the mean alone.

    Its rows are the clients' updates of all shared tensors, end less received, ascending by client; all weigh the same.
    What it makes of them is the inner rule's only upload, so that a server's optimizer takes its step from there.
    Updates that are not finite are left out first. Where the rows that are aggregated, half as many after bucketing,
    are not more than twice as many as hostile ones are tolerated, the round is void.

    Args:
        tolerated: f, the hostile clients of a round that are borne.
        inner: the rule that is given the result; None for the method's own.
        aggregator: of the rows.
        pre: what changes the rows before, in this order; ``[nnm]`` with ``trmean`` is what ByzFL's authors advise.
        scope: aggregate all tensors as one vector, or each by itself.
    """

    def __init__(
        self,
        tolerated: FewOrNone,
        inner: ServerRule | None = None,
        aggregator: Aggregator = "geometric_median",
        pre: Sequence[PreAggregator] = (),
        scope: Literal["joint", "per_tensor"] = "joint",
    ) -> None:
        super().__init__(inner)
        self.tolerated, self.aggregator, self.pre, self.scope = tolerated, aggregator, tuple(pre), scope
        self.momentum: Tensor
        self._refused, self._void = 0, False
        #: what these two are of; a round in which nothing arrives is not aggregated
        self._of_round = 0

    def accept(self, method: Declared) -> str | None:
        """Refuse methods whose server looks at single uploads."""
        if not (method.shared or method.sends_of_its_own):
            return "it shares nothing that could be aggregated"
        if self.wrapped.reads_rows:
            return f"its server, {self.wrapped.title}, looks at single clients' uploads, not at an aggregate of them"
        if method.sends_of_its_own:
            return f"{type(method).__name__}.message sends what is no update"
        return self.wrapped.accept(method)

    def start(self, initial: Values, terms: Terms) -> None:
        """See that ByzFL is there, and begin centered clipping at zero.

        Raises:
            ConfigurationError: a round has too few clients for so many hostile ones.
        """
        super().start(initial, terms)
        rows = rows_after(self.pre, terms.participants)
        if 2 * self.tolerated >= rows:
            left = f", of which bucketing makes {rows} rows" if rows < terms.participants else ""
            raise ConfigurationError(
                f"RobustAggregation: tolerated={self.tolerated} hostile clients need more than {2 * self.tolerated} in "
                f"a round, and it has {terms.participants}{left}; tolerate fewer, or take more clients a round"
            )
        byzfl()
        floats = sum(value.numel() for value in initial.values()) if self.aggregator == "centered_clipping" else 0
        self.register_buffer("momentum", torch.zeros(floats))

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Aggregate the updates, and have the inner rule make what it makes of that; nothing in a void round."""
        names = sorted(shared)
        rows = uploads.only(names).matrix(names).float().cpu()
        finite = rows.isfinite().all(1)
        rows, self._refused = rows[finite], int((~finite).sum())
        left = rows_after(self.pre, len(rows))
        self._void, self._of_round = 2 * self.tolerated >= left, round.number
        if self._void:
            buckets = f" in {left} buckets" if left < len(rows) else ""
            warnings.warn(
                f"round {round.number} is void: {self.tolerated} hostile clients cannot be borne among {len(rows)} "
                f"valid uploads{buckets}; the server's values stay as they were",
                stacklevel=1,
            )
            return {}
        parts = uploads.only(names).from_vector(
            names, self._aggregated(round, rows, [shared[n].numel() for n in names])
        )
        values = {name: (value + parts[name].to(value)).unsqueeze(0) for name, value in shared.items()}
        client = uploads.clients[int(finite.nonzero()[0])]
        return self.wrapped.aggregate(round, shared, Uploads.alone(client, values, shared, round.number))

    def _aggregated(self, round: Round, rows: Tensor, sizes: list[int]) -> Tensor:
        """Return the aggregate [d] of rows [n, d], of all columns together or of each tensor's."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(self.terms.seed, "robust", round.number))
            columns = [rows.shape[1]] if self.scope == "joint" else sizes
            before = self.momentum.split(columns) if len(self.momentum) else [None] * len(columns)
            made = [self._of(part, m) for part, m in zip(rows.split(columns, dim=1), before, strict=True)]
        result = torch.cat(made)
        if len(self.momentum):
            self.momentum.copy_(result)
        return result

    def _of(self, rows: Tensor, momentum: Tensor | None) -> Tensor:
        rows = rows.clone()  # some pre-aggregators write into what they are given
        for name in self.pre:
            rows = pre_aggregator(name, self.tolerated)(rows)
        made = aggregator(self.aggregator, self.tolerated)
        if momentum is not None:
            made.m = momentum.clone()
        return torch.as_tensor(made(rows))

    def report(self, round: Round) -> Facts:
        """Report how many updates were left out, and that the round was void."""
        mine = self._of_round == round.number
        found = super().report(round) | {"left_out": float(self._refused) if mine else 0.0}
        return found | ({"void": 1.0} if mine and self._void else {})
