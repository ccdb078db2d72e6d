"""Whole rounds, from the end of one to the end of the next: what nothing that a round costs can escape."""

import time
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback


class Laps(Callback):
    """Times rounds with selection, plan, local training and aggregation, evaluations taken out.

    Attributes:
        started: when the first round began, as ``time.perf_counter`` counts; what came before is set-up.
        rounds: seconds of every round.
        steps: optimizer steps of all clients in every round.
        losses: mean over the round's clients of their mean training loss, of every round.
    """

    def __init__(self) -> None:
        self.started = 0.0
        self.rounds: list[float] = []
        self.steps: list[int] = []
        self.losses: list[float] = []
        self._clients: set[int] = set()
        self._steps = 0
        self._began = 0.0
        self._evaluated = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """The first round begins."""
        self.started = self._began = _moment(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the steps of a block."""
        self._clients.update(batch.cohort)
        self._steps += sum(len(step.clients) for step in batch.steps)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """An evaluation begins."""
        self._evaluated -= _moment(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """An evaluation ends."""
        self._evaluated += _moment(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """A round ends, and the next begins."""
        self.rounds.append(_moment(pl_module) - self._began - self._evaluated)
        self.steps.append(self._steps)
        self.losses.append(pl_module.reports["loss"][sorted(self._clients)].mean().item())
        self._clients, self._steps, self._evaluated, self._began = set(), 0, 0.0, time.perf_counter()

    @property
    def best(self) -> float:
        """Seconds of the fastest round after the first."""
        return min(self.rounds[1:])

    @property
    def mean(self) -> float:
        """Mean seconds of the rounds after the first."""
        return sum(self.rounds[1:]) / len(self.rounds[1:])


def _moment(method: Any) -> float:
    # Asks the method for its device: to ask torch whether there is a GPU takes a millisecond where there is none.
    if method.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
