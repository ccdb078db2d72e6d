"""Twelve scored images of three clients, whose metrics are known from elsewhere."""

import torch

from benchmark.engine.scores import ClientScores
from benchmark.masked import IGNORE
from benchmark.metrics import Metric

LOGITS = [
    *[(2.0, 0.5, -1.0), (0.2, 1.1, 0.3), (0.0, 0.4, 1.6), (1.2, 0.9, 0.1), (0.3, 0.2, 0.8), (1.5, -0.5, 0.0)],
    *[(0.6, 0.8, -0.2), (-0.4, 2.2, 0.5), (0.1, 0.3, 0.9), (0.2, -0.3, 1.4), (1.0, 0.4, 0.7), (-0.6, 0.1, 2.5)],
]
LABELS = [0, 1, 2, 1, 0, 0, 0, 1, 1, 2, 2, 2]
HELD = [(0, 5), (5, 9), (9, 12)]


def scored(
    order: tuple[int, ...] = (0, 1, 2), at_once: int = 6, chosen: str | tuple[Metric, ...] = "clinical"
) -> ClientScores:
    """The twelve images of three clients, so many at a time."""
    scores = ClientScores(3, 3, chosen)
    for client in order:
        begin, end = HELD[client]
        for start in range(begin, end, at_once):
            rows = slice(start, min(end, start + at_once))
            logits, y = torch.zeros(1, at_once, 3), torch.full((1, at_once), IGNORE)
            logits[0, : rows.stop - rows.start] = torch.tensor(LOGITS[rows])
            y[0, : rows.stop - rows.start] = torch.tensor(LABELS[rows])
            scores.update(logits, y, (client,))
    return scores
