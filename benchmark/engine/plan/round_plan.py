"""The stacked steps of local training, or of the fitting of copies."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmark.contract import Phase, Stage
from benchmark.engine.plan.work import Part, Step, cohorts, steps_per_epoch
from benchmark.federation import Terms
from benchmark.seeds import derived_seed, keyed_bits, keyed_uniform


def steps_of(phase: Phase, images: int, terms: Terms) -> tuple[int, int]:
    """Count the steps of a client with so many images in an epoch, and in a phase."""
    per_epoch = steps_per_epoch(images, terms.batch_size, terms.drop_last)
    count = phase.epochs * per_epoch
    return per_epoch, count if phase.steps is None else min(count, phase.steps)


class RoundPlan:
    """Steps of all cohorts of a round; item i is the i-th with its rows and masks.

    Args:
        clients: the clients of this round.
        indices: per client, its rows of the pool, int64 [n_k].
        terms: of the federation: the mini-batches' size, their rows and the seed.
        phases: in order.
        stage: what the steps are for.
        width: K, clients stepped together.
        round: number of the round, from 1.
        augment_numbers: uniform numbers drawn for each image (0: none).
    """

    def __init__(
        self,
        clients: Sequence[int],
        indices: Mapping[int, np.ndarray],
        terms: Terms,
        phases: Sequence[Phase],
        stage: Stage,
        width: int,
        round: int,
        augment_numbers: int = 0,
    ) -> None:
        self.indices = {client: indices[client] for client in clients}
        self.terms = terms
        self.phases = phases
        self.stage = stage
        self.round = round
        self.augment_numbers = augment_numbers
        self.poisson_lots = terms.poisson_lots and stage is Stage.TRAIN
        self.sizes = sizes = {client: len(rows) for client, rows in self.indices.items()}
        self.cohorts = cohorts(clients, sizes, width, terms)
        self.steps: list[Step] = []
        self.parts = [part for cohort in self.cohorts for part in self._lay_out(cohort)]
        self._made: tuple[tuple[tuple[int, ...], int], tuple[Tensor, Tensor]] | None = None

    def _own_steps(self, cohort: tuple[int, ...], phase: int) -> tuple[np.ndarray, np.ndarray]:
        """Count the steps of each client in an epoch, and in a phase, which never rise along a cohort."""
        counts = [steps_of(self.phases[phase], self.sizes[client], self.terms) for client in cohort]
        per_epoch, own = np.array(counts).T
        return per_epoch, own if self.phases[phase].is_in(self.round) else 0 * own

    def _lay_out(self, cohort: tuple[int, ...]) -> list[Part]:
        """Add the steps of a cohort; return its phases that have any."""
        parts = []
        for phase in range(len(self.phases)):
            own, begin = self._own_steps(cohort, phase)[1], len(self.steps)
            for number in range(own.max()):
                going = int((own > number).sum())
                stopping = (own[:going] == number + 1) & (number + 1 < own.max())
                clients, stops = cohort[:going], tuple(stopping.tolist())
                self.steps.append(Step(cohort, clients, self.stage, self.round, phase, number, stopping=stops))
            if own.max():
                parts.append(Part(cohort, self.stage, phase, "", "train", range(begin, len(self.steps))))
        return parts

    def _make_batches(self, cohort: tuple[int, ...], phase: int) -> tuple[Tensor, Tensor]:
        """Draw rows and masks of a phase, [steps, K, B] each."""
        per_epoch, own_steps = self._own_steps(cohort, phase)
        sizes = np.array([self.sizes[client] for client in cohort])
        used = np.minimum(sizes, per_epoch * self.terms.row)
        step = np.arange(own_steps.max())[:, None]
        epoch, number = np.divmod(step, per_epoch)
        place = number[..., None] * self.terms.row + np.arange(self.terms.row)  # in its epoch, [steps, K, B]
        mask = (place < used[:, None]) & (step < own_steps)[..., None]
        order = self._orders(cohort, phase, sizes, 1 + int(((own_steps - 1) // per_epoch).max()))
        at = np.where(mask[..., :1], epoch[..., None], 0), np.arange(len(cohort))[:, None], np.where(mask, place, 0)
        rows = np.concatenate([self.indices[client] for client in cohort])
        index = rows[(np.cumsum(sizes) - sizes)[:, None] + order[at]]
        return torch.from_numpy(np.where(mask, index, 0)), torch.from_numpy(mask)

    def _orders(self, cohort: tuple[int, ...], phase: int, sizes: np.ndarray, epochs: int) -> np.ndarray:
        """Draw each client's order of its images in each epoch, [epochs, K, most images], void behind its own.

        All are drawn at once; what a client gets depends on its number and the epoch's alone.
        """
        key = derived_seed(self.terms.seed, f"{self.stage} order", self.round, phase)
        image = np.arange(sizes.max())
        drawn = keyed_bits(key, np.arange(epochs)[:, None, None], np.array(cohort)[:, None], image)
        drawn[:, image >= sizes[:, None]] = np.iinfo(np.uint64).max
        return drawn.argsort(axis=-1, kind="stable")

    def _lots(self, step: Step) -> tuple[Tensor, Tensor]:
        """Draw each image of a client with probability B/n_k, for rows and masks of a step, [K, lot] each.

        What is more than a lot's rows is left out: those that were drawn with the largest numbers, so that each of them
        stays with the same probability.
        """
        sizes = np.array([self.sizes[client] for client in step.clients])[:, None]
        image = np.arange(max(sizes.max(), self.terms.lot))
        key = derived_seed(self.terms.seed, "dp-batch", self.round, step.phase, step.number)
        drawn = keyed_uniform(key, np.array(step.clients)[:, None], image)
        chosen = (drawn < self.terms.batch_size / sizes) & (image < sizes)
        order = np.where(chosen, drawn, 1.0).argsort(axis=1, kind="stable")[:, : self.terms.lot]
        mask = np.take_along_axis(chosen, order, axis=1)
        index = [
            self.indices[client][np.where(own, at, 0)]
            for client, at, own in zip(step.clients, order, mask, strict=True)
        ]
        return torch.from_numpy(np.where(mask, index, 0)), torch.from_numpy(mask)

    def _batches(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return rows and masks of a step, [K, B] each.

        Those of a phase are made together and remembered: steps are asked for in order.
        """
        if self.poisson_lots:
            return self._lots(step)
        key = (step.cohort, step.phase)
        if self._made is None or self._made[0] != key:
            self._made = (key, self._make_batches(*key))
        index, mask = self._made[1]
        return index[step.number, : len(step.clients)], mask[step.number, : len(step.clients)]

    def __getitem__(self, item: int) -> Step:
        step = self.steps[item]
        index, mask = self._batches(step)
        return replace(step, index=index, mask=mask, uniform=self._uniform(step))

    def _uniform(self, step: Step) -> Tensor | None:
        if not self.augment_numbers or step.stage is not Stage.TRAIN:
            return None
        key = derived_seed(self.terms.seed, "augment", self.round, step.phase, step.number)
        number = np.arange(self.terms.lot * self.augment_numbers).reshape(self.terms.lot, -1)
        drawn = keyed_bits(key, np.array(step.clients)[:, None, None], number)
        return torch.from_numpy((drawn >> np.uint64(40)).astype(np.float32) * np.float32(2**-24))
