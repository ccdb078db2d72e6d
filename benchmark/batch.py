"""One stacked step of a cohort, and the plan of a round as a map-style data set of such steps.

A cohort is up to ``cohort_width`` clients that are stepped together; everything in a batch has a leading
dimension K, one row a client. Within a local phase a client's epochs are laid end to end as its own list of
mini-batches, and the stacked steps run to the longest list of the cohort. A cohort lists its clients by falling size,
so those that still have steps to do are always its first ones, and a step holds only them. What a client sees depends
on (seed, round, client, phase, epoch) alone, so the plan of one client
is the same in any cohort.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmark.seeds import numpy_generator


@dataclass(frozen=True)
class ClientBatch:
    """One step of K clients, in training or in evaluation.

    Attributes:
        index: int64 [K, B], rows of the image pool; 0 where masked out.
        mask: bool [K, B], False where a client's last batch is padded.
        clients: ids of the clients in this step, K of them: the first ones of ``cohort``.
        cohort: ids of all clients of the cohort.
        kind: ``"train"``; ``"finetune"`` (a step on a copy, before that copy is evaluated); ``"adapt"`` (the same
            of a client that never trains); ``"evaluate"``; or ``"idle"`` (a cohort with no local step at all).
        first: first step of this cohort in this round (or of this evaluation).
        phase: which local phase this step belongs to.
        step: index of the step in its phase; part of the key of every random draw in the step.
        phase_start: first step of the phase.
        own_end: per client, whether this is its own last step of the phase.
        phase_end: last stacked step of the phase.
        end: last step of the cohort in this round.
        point: what is evaluated: ``"server"`` or ``"local"``; empty in training.
        split: ``"train"``, or the split that is evaluated: ``"test"``, ``"val"``, ``"new"``, ...
        round: the round, from 1; 0 in evaluation.
        noise: float32 [K, B, m] uniform numbers in [0, 1) for the augmentation of each image, or None.
        x: the images, [K, B, 3, H, W]; None until the images have been gathered.
        y: int64 [K, B], labels within the label space of the split, -100 where masked out; None until gathered.
        features: per name [K, B, ...], what the frozen parts make of each image, where that was made beforehand.
    """

    index: Tensor
    mask: Tensor
    clients: tuple[int, ...]
    cohort: tuple[int, ...]
    kind: str
    first: bool
    phase: int
    step: int
    phase_start: bool
    own_end: tuple[bool, ...]
    phase_end: bool
    end: bool
    point: str = ""
    split: str = "train"
    round: int = 0
    noise: Tensor | None = None
    x: Tensor | None = None
    y: Tensor | None = None
    features: Mapping[str, Tensor] | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> "ClientBatch":
        """The same step with its tensors on ``device``."""
        moved = {
            name: tensor.to(device, non_blocking=non_blocking)
            for name in ("index", "mask", "noise", "x", "y")
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **moved)


class Block:
    """Consecutive steps of one cohort, handed to the Trainer as one batch: its hooks cost a millisecond each time.

    No dataclass, into which the Trainer would look for numbers to convert to its precision; images are when gathered.

    Args:
        steps: the steps, at least one.
    """

    def __init__(self, steps: tuple[ClientBatch, ...]) -> None:
        self.steps = steps

    @property
    def cohort(self) -> tuple[int, ...]:
        """Ids of all clients of the cohort."""
        return self.steps[0].cohort

    @property
    def first(self) -> bool:
        """Whether the cohort's first step in this round is here."""
        return self.steps[0].first

    @property
    def end(self) -> bool:
        """Whether the cohort's last step in this round is here."""
        return self.steps[-1].end

    def to(self, device: torch.device, non_blocking: bool = False) -> "Block":
        """The same steps with their tensors on ``device``."""
        return Block(tuple(step.to(device, non_blocking) for step in self.steps))


@dataclass(frozen=True)
class PlannedPhase:
    """What the plan needs to know of a local phase: its epochs, and how many of their mini-batches at most."""

    epochs: int
    kind: str = "train"
    steps: int | None = None


def steps_per_epoch(num_samples: int, batch_size: int, drop_last: bool) -> int:
    """Mini-batches in one epoch of a client; an incomplete batch is dropped only if a full one remains.

    So does Dassl. PFLlib drops it always: a client with fewer images than a batch takes no step there, and the
    unchanged model that it returns counts in the server's mean. Here such a client trains on its one batch.
    """
    if drop_last and num_samples >= batch_size:
        return num_samples // batch_size
    return -(-num_samples // batch_size)


def cohorts(clients: Sequence[int], sizes: Mapping[int, int], width: int) -> list[tuple[int, ...]]:
    """Cut clients into cohorts of at most ``width``, similar sizes together, so that little work is masked out."""
    ordered = sorted(clients, key=lambda client: (-sizes[client], client))
    return [tuple(ordered[start : start + width]) for start in range(0, len(ordered), width)]


def _filling(
    clients: Sequence[int], held_out: Mapping[str, Mapping[int, np.ndarray]], batch_size: int, most_clients: int
) -> list[tuple[int, ...]]:
    """Cohorts of as many clients as the most images of their first one, and so of each, fit into a step."""
    sizes = {client: max(len(lists[client]) for lists in held_out.values()) for client in clients}
    ordered = sorted(clients, key=lambda client: (-sizes[client], client))
    made: list[tuple[int, ...]] = []
    begin = 0
    while begin < len(ordered):
        together = min(most_clients, max(1, batch_size // max(sizes[ordered[begin]], 1)))
        made.append(tuple(ordered[begin : begin + together]))
        begin += together
    return made


@dataclass(frozen=True)
class _Step:
    cohort: int
    phase: int
    step: int
    kind: str
    point: str = ""
    split: str = "train"
    first: bool = False
    phase_start: bool = False
    phase_end: bool = False
    end: bool = False
    rows: int = 0


class RoundPlan(Dataset[ClientBatch]):
    """The local training of one round: item i is its i-th stacked step.

    Args:
        clients: the clients of this round.
        indices: per client, its rows of the pool, int64 [n_k].
        phases: the local phases, in order.
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
        phases: Sequence[PlannedPhase],
        batch_size: int,
        drop_last: bool,
        width: int,
        seed: int,
        round: int,
        augment_numbers: int = 0,
    ) -> None:
        self.indices = indices
        self.phases = phases
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self.round = round
        self.augment_numbers = augment_numbers
        self.cohorts = cohorts(clients, {client: len(indices[client]) for client in clients}, width)
        # One row length for the whole round, whatever the cohort width, so that widths do the same arithmetic.
        self.row = min(batch_size, max(len(indices[client]) for client in clients))
        self.steps = [step for number in range(len(self.cohorts)) for step in self._lay_out(number)]
        self._made: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None

    def _own_steps(self, client: int, phase: int) -> int:
        per_epoch = steps_per_epoch(len(self.indices[client]), self.batch_size, self.drop_last)
        planned = self.phases[phase]
        count = per_epoch * planned.epochs
        return count if planned.steps is None else min(count, planned.steps)

    def _lay_out(self, cohort: int) -> list[_Step]:
        steps = []
        for phase, planned in enumerate(self.phases):
            count = max(self._own_steps(client, phase) for client in self.cohorts[cohort])
            steps += [
                _Step(cohort, phase, i, planned.kind, phase_start=i == 0, phase_end=i == count - 1)
                for i in range(count)
            ]
        steps = steps or [_Step(cohort, 0, 0, "idle")]
        steps[0] = replace(steps[0], first=True)
        steps[-1] = replace(steps[-1], end=True)
        return steps

    def _make_batches(self, cohort: int, phase: int) -> tuple[Tensor, Tensor]:
        """Rows and masks of a phase, [steps, K, B] each."""
        clients = self.cohorts[cohort]
        count = max(self._own_steps(client, phase) for client in clients)
        index = torch.zeros(count, len(clients), self.row, dtype=torch.int64)
        mask = torch.zeros(count, len(clients), self.row, dtype=torch.bool)
        for k, client in enumerate(clients):
            own = np.asarray(self.indices[client])
            per_epoch = steps_per_epoch(len(own), self.batch_size, self.drop_last)
            for epoch in range(self.phases[phase].epochs):
                kind = self.phases[phase].kind
                rng = numpy_generator(self.seed, f"{kind} order", self.round, client, phase, epoch)
                order = torch.from_numpy(own[rng.permutation(len(own))])
                for step in range(min(per_epoch, self._own_steps(client, phase) - epoch * per_epoch)):
                    rows = order[step * self.batch_size : (step + 1) * self.batch_size]
                    index[epoch * per_epoch + step, k, : len(rows)] = rows
                    mask[epoch * per_epoch + step, k, : len(rows)] = True
        return index, mask

    def _batches(self, cohort: int, phase: int) -> tuple[Tensor, Tensor]:
        """As ``_make_batches``, remembering the last answer: steps are asked for in order."""
        if self._made is None or self._made[0] != (cohort, phase):
            self._made = ((cohort, phase), self._make_batches(cohort, phase))
        return self._made[1]

    def __len__(self) -> int:
        return len(self.steps)

    def ends_cohort(self, item: int) -> bool:
        """Whether this step is its cohort's last."""
        return self.steps[item].end

    def __getitem__(self, item: int) -> ClientBatch:
        step = self.steps[item]
        cohort = self.cohorts[step.cohort]
        own_steps = [0 if step.kind == "idle" else self._own_steps(client, step.phase) for client in cohort]
        clients = tuple(c for c, count in zip(cohort, own_steps, strict=True) if count > step.step)
        if step.kind == "idle":
            index, mask = torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.bool)
        else:
            all_index, all_mask = self._batches(step.cohort, step.phase)
            index, mask = all_index[step.step, : len(clients)], all_mask[step.step, : len(clients)]
        return ClientBatch(
            index=index,
            mask=mask,
            clients=clients,
            cohort=cohort,
            kind=step.kind,
            first=step.first,
            phase=step.phase,
            step=step.step,
            phase_start=step.phase_start,
            own_end=tuple(count == step.step + 1 for count in own_steps[: len(clients)]),
            phase_end=step.phase_end,
            end=step.end,
            round=self.round,
            noise=self._noise(clients, step) if step.kind == "train" else None,
        )

    def _noise(self, clients: tuple[int, ...], step: _Step) -> Tensor | None:
        if not self.augment_numbers:
            return None
        shape = (self.row, self.augment_numbers)
        draws = [
            numpy_generator(self.seed, "augment", self.round, client, step.phase, step.step).random(shape, np.float32)
            for client in clients
        ]
        return torch.from_numpy(np.stack(draws))


class EvaluationPlan(Dataset[ClientBatch]):
    """The evaluation of clients on their own held-out images: per cohort and point, fine-tuning steps, then test steps.

    As many clients are tested together as their images fit into one step; with fine-tuning, those that are fine-tuned
    together. So the scores do not depend on the width of training's cohorts. The images of a split are cut into equal
    steps, so that little is padding.

    Args:
        clients: the clients to evaluate.
        held_out: per split name, per client, rows of the pool to test on.
        training: the fine-tuning of a copy: a plan over the same clients, or None.
        points: which states to evaluate, ``"server"`` and/or ``"local"``.
        batch_size: images in one step at most: of one client, or of several that have few.
        most_clients: tested together at most; with fine-tuning, the plan's own width holds.
    """

    def __init__(
        self,
        clients: Sequence[int],
        held_out: Mapping[str, Mapping[int, np.ndarray]],
        training: RoundPlan | None,
        points: Sequence[str],
        batch_size: int,
        most_clients: int,
    ) -> None:
        self.held_out = held_out
        self.training = training
        if training is not None:  # both must step the same clients together
            self.cohorts = training.cohorts
        else:
            self.cohorts = _filling(clients, held_out, batch_size, most_clients)
        fitting: list[list[int]] = [[] for _ in self.cohorts]
        for position, step in enumerate(training.steps if training is not None else []):
            if step.kind != "idle":
                fitting[step.cohort].append(position)
        # The cohorts of fine-tuning are as wide as those of training, on which no result may depend.
        alike: dict[str, int] = {}
        if training is not None:
            alike = {split: max(len(lists[c]) for c in clients) for split, lists in held_out.items()}
        self.items: list[tuple[int, _Step]] = []
        for number, members in enumerate(self.cohorts):
            for point in points:
                begin = len(self.items)
                if training is not None and point == "server":
                    self.items += [(i, replace(training.steps[i], point=point)) for i in fitting[number]]
                for split, lists in held_out.items():
                    own = max(len(lists[c]) for c in members)
                    most = alike.get(split, own)
                    steps = -(-most // batch_size)
                    rows = -(-most // max(steps, 1))
                    count = -(-own // max(rows, 1))
                    self.items += [
                        (-1, _Step(number, 0, i, "evaluate", point=point, split=split, rows=rows)) for i in range(count)
                    ]
                self.items[begin] = (self.items[begin][0], replace(self.items[begin][1], first=True))
                self.items[-1] = (self.items[-1][0], replace(self.items[-1][1], end=True))

    def __len__(self) -> int:
        return len(self.items)

    def ends_cohort(self, item: int) -> bool:
        """Whether this step is the last of its cohort and point."""
        return self.items[item][1].end

    def __getitem__(self, item: int) -> ClientBatch:
        source, step = self.items[item]
        if source >= 0 and self.training is not None:
            batch = self.training[source]
            return replace(batch, first=step.first, end=step.end, point=step.point)
        clients = self.cohorts[step.cohort]
        index = torch.zeros(len(clients), step.rows, dtype=torch.int64)
        mask = torch.zeros(len(clients), step.rows, dtype=torch.bool)
        for k, client in enumerate(clients):
            own = self.held_out[step.split][client]
            rows = torch.from_numpy(np.asarray(own[step.step * step.rows : (step.step + 1) * step.rows]))
            index[k, : len(rows)] = rows
            mask[k, : len(rows)] = True
        return ClientBatch(
            index=index,
            mask=mask,
            clients=clients,
            cohort=clients,
            kind="evaluate",
            first=step.first,
            phase=0,
            step=step.step,
            phase_start=False,
            own_end=(False,) * len(clients),
            phase_end=False,
            end=step.end,
            point=step.point,
            split=step.split,
        )


class Blocks(Dataset[Block]):
    """Plans of one round one after the other, in blocks of at most ``size`` steps; no block spans two cohorts."""

    def __init__(self, plans: Sequence[RoundPlan | EvaluationPlan], size: int) -> None:
        self.blocks: list[tuple[RoundPlan | EvaluationPlan, range]] = []
        for plan in plans:
            begin = 0
            for position in range(len(plan)):
                if plan.ends_cohort(position) or position + 1 - begin == size:
                    self.blocks.append((plan, range(begin, position + 1)))
                    begin = position + 1

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, item: int) -> Block:
        plan, positions = self.blocks[item]
        return Block(tuple(plan[position] for position in positions))
