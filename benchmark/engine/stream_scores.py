"""Scores by which clients' own test images are held against a stream of foreign ones."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmark.formulas import Separation, in_distribution_scores, separation
from benchmark.masked import IGNORE
from benchmark.metrics import OOD_SCORES, ood_name
from benchmark.placing import placed


class ScoredRows(NamedTuple):
    """Scores of some images, of clients' own and of foreign ones.

    Attributes:
        client: whose model has scored the image, int64 [n].
        foreign: bool [n]: it is of the stream.
        scores: float64 [n, S], a column for each of :data:`benchmark.metrics.OOD_SCORES`.
    """

    client: Tensor
    foreign: Tensor
    scores: Tensor

    def at(self, rows: Tensor) -> "ScoredRows":
        """Return some of them: positions, or a mask [n]."""
        return ScoredRows(*(column[rows] for column in self))


class StreamScores:
    """Collects the scores of own and foreign images at one point on one split; 25 bytes an image and client."""

    def __init__(self) -> None:
        nothing = torch.zeros(0, dtype=torch.int64)
        self._parts = [ScoredRows(nothing, nothing.bool(), torch.zeros(0, len(OOD_SCORES), dtype=torch.float64))]

    def update(self, logits: Tensor, y: Tensor, clients: Sequence[int], foreign: bool) -> None:
        """Score one stacked batch.

        Args:
            logits: [K, B, C].
            y: [K, B], -100 where there is no image.
            clients: client ids, K of them.
            foreign: the images are of the stream.
        """
        made = in_distribution_scores(logits.detach())
        there, whose = y != IGNORE, placed(torch.tensor(clients), y.device).unsqueeze(1).expand_as(y)
        rows = ScoredRows(whose, torch.full_like(there, foreign), torch.stack([made[name] for name in OOD_SCORES], -1))
        self._parts.append(rows.at(there))

    def add(self, rows: ScoredRows) -> None:
        """Take what was scored elsewhere."""
        self._parts.append(rows)

    @property
    def rows(self) -> ScoredRows:
        """Return all that was scored, in host memory, by client."""
        if len(self._parts) > 1:
            whole = ScoredRows(*(torch.cat([column.cpu() for column in of]) for of in zip(*self._parts, strict=True)))
            self._parts = [whole.at(whole.client.argsort(stable=True))]
        return self._parts[0]

    def of(self, clients: Sequence[int]) -> ScoredRows:
        """Return what was scored by the models of some clients."""
        return self.rows.at(torch.isin(self.rows.client, torch.tensor(clients, dtype=torch.int64)))

    def columns(self, prefix: str) -> dict[str, Tensor]:
        """Return the columns by name, with a prefix."""
        return {prefix + name: column for name, column in self.rows._asdict().items()}

    @staticmethod
    def read(columns: Mapping[str, Tensor], prefix: str) -> ScoredRows:
        """Return what :meth:`columns` returned, on the CPU."""
        return ScoredRows(*(columns[prefix + name].cpu() for name in ScoredRows._fields))

    def compute(self, num_clients: int) -> dict[str, Tensor]:
        """Return each metric by name, float64 [N]; NaN for a client without images of either kind."""
        names = [ood_name(metric, score) for score in OOD_SCORES for metric in Separation._fields]
        made = {name: torch.full((num_clients,), torch.nan, dtype=torch.float64) for name in names}
        clients, counts = self.rows.client.unique_consecutive(return_counts=True)
        parts = zip(*(column.split(counts.tolist()) for column in self.rows), strict=True)
        for client, own in zip(clients.tolist(), parts, strict=True):
            for name, value in _named(ScoredRows(*own)).items():
                made[name][client] = value
        return made

    def pooled(self) -> dict[str, float]:
        """Return each metric of all clients' images together, those of the stream once for each client's model."""
        return _named(self.rows)


def _named(rows: ScoredRows) -> dict[str, float]:
    """Return the metrics of some images by name."""
    made: dict[str, float] = {}
    for score, values in zip(OOD_SCORES, rows.scores.unbind(1), strict=True):
        found = separation(values[~rows.foreign], values[rows.foreign])
        made |= {ood_name(metric, score): value for metric, value in found._asdict().items()}
    return made
