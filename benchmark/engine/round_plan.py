"""The stacked steps of local training, or of the fitting of copies."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmark.contract import Phase, Stage
from benchmark.engine.plan import Step, cohorts, steps_per_epoch
from benchmark.seeds import numpy_generator


class RoundPlan:
    """Steps of all cohorts of a round; item i is the i-th with its rows and masks.

    Args:
        clients: the clients of this round.
        indices: per client, its rows of the pool, int64 [n_k].
        phases: in order.
        stage: what the steps are for.
        batch_size: B, mini-batch size of every client.
        drop_last: drop a client's incomplete last batch where it has at least one full one.
        width: K, clients stepped together.
        seed: seed of the run.
        round: number of the round, from 1.
        augment_numbers: uniform numbers drawn for each image (0: none).
    """

    def __init__(
        self,
        clients: Sequence[int],
        indices: Mapping[int, np.ndarray],
        phases: Sequence[Phase],
        stage: Stage,
        batch_size: int,
        drop_last: bool,
        width: int,
        seed: int,
        round: int,
        augment_numbers: int = 0,
    ) -> None:
        self.indices = indices
        self.phases = phases
        self.stage = stage
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self.round = round
        self.augment_numbers = augment_numbers
        self.cohorts = cohorts(clients, {client: len(indices[client]) for client in clients}, width)
        # One row length for the whole round, whatever the cohort width, so that widths do the same arithmetic.
        self.row = min(batch_size, max(len(indices[client]) for client in clients))
        self.steps = [step for cohort in self.cohorts for step in self._lay_out(cohort)]
        self._made: tuple[tuple[tuple[int, ...], int], tuple[Tensor, Tensor]] | None = None

    def _own_steps(self, client: int, phase: int) -> int:
        planned = self.phases[phase]
        count = planned.epochs * steps_per_epoch(len(self.indices[client]), self.batch_size, self.drop_last)
        return count if planned.steps is None else min(count, planned.steps)

    def _lay_out(self, cohort: tuple[int, ...]) -> list[Step]:
        steps = []
        for phase in range(len(self.phases)):
            own = [self._own_steps(client, phase) for client in cohort]
            for number in range(max(own)):
                clients = tuple(c for c, count in zip(cohort, own, strict=True) if count > number)
                steps.append(
                    Step(
                        cohort,
                        clients,
                        self.stage,
                        self.round,
                        phase,
                        number,
                        phase_start=number == 0,
                        own_end=tuple(count == number + 1 for count in own[: len(clients)]),
                        phase_end=number == max(own) - 1,
                    )
                )
        steps = steps or [Step(cohort)]
        steps[0] = replace(steps[0], first=True)
        steps[-1] = replace(steps[-1], end=True)
        return steps

    def _make_batches(self, cohort: tuple[int, ...], phase: int) -> tuple[Tensor, Tensor]:
        """Draw rows and masks of a phase, [steps, K, B] each."""
        own_steps = [self._own_steps(client, phase) for client in cohort]
        index = np.zeros((max(own_steps), len(cohort), self.row), dtype=np.int64)
        mask = np.zeros(index.shape, dtype=bool)
        for k, (client, count) in enumerate(zip(cohort, own_steps, strict=True)):
            own = np.asarray(self.indices[client])
            per_epoch = steps_per_epoch(len(own), self.batch_size, self.drop_last)
            used = min(len(own), per_epoch * self.row)
            laid_out = np.zeros((per_epoch, self.row), dtype=np.int64)
            filled = np.arange(laid_out.size).reshape(laid_out.shape) < used
            for epoch in range(self.phases[phase].epochs):
                rng = numpy_generator(self.seed, f"{self.stage} order", self.round, client, phase, epoch)
                laid_out.reshape(-1)[:used] = own[rng.permutation(len(own))][:used]
                steps = slice(epoch * per_epoch, min((epoch + 1) * per_epoch, count))
                index[steps, k] = laid_out[: max(0, steps.stop - steps.start)]
                mask[steps, k] = filled[: max(0, steps.stop - steps.start)]
        return torch.from_numpy(index), torch.from_numpy(mask)

    def _batches(self, step: Step) -> tuple[Tensor, Tensor]:
        """As ``_make_batches``, remembering the last answer: steps are asked for in order."""
        key = (step.cohort, step.phase)
        if self._made is None or self._made[0] != key:
            self._made = (key, self._make_batches(*key))
        index, mask = self._made[1]
        return index[step.number, : len(step.clients)], mask[step.number, : len(step.clients)]

    def __getitem__(self, item: int) -> Step:
        step = self.steps[item]
        if not step.clients:
            return step
        index, mask = self._batches(step)
        return replace(step, index=index, mask=mask, uniform=self._uniform(step))

    def _uniform(self, step: Step) -> Tensor | None:
        if not self.augment_numbers or step.stage is not Stage.TRAIN:
            return None
        shape = (self.row, self.augment_numbers)
        draws = [
            numpy_generator(self.seed, "augment", self.round, client, step.phase, step.number).random(shape, np.float32)
            for client in step.clients
        ]
        return torch.from_numpy(np.stack(draws))
