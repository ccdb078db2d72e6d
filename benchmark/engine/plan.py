"""The local training of a round, laid out as stacked steps of cohorts.

A cohort is up to ``width`` clients that are stepped together; everything in a step has a leading dimension K, one row a
client. Within a phase a client's epochs are laid end to end as its own list of mini-batches, and the stacked steps run
to the longest list of the cohort. A cohort lists its clients by falling size, so those that still have steps to do are
always its first ones, and a step holds only them. What a client sees depends on (seed, round, client, phase, epoch)
alone, so the plan of one client is the same in any cohort.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmark.contract import Stage
from benchmark.engine.ranks import dealt
from benchmark.placing import placed_together


@dataclass(frozen=True)
class Step:
    """One mini-batch of K clients: whose, when, and which rows of the image pool.

    Attributes:
        cohort: ids of all clients of the cohort.
        clients: ids of those in this step, K of them: the first ones of ``cohort``; none where a cohort has no step at
            all.
        stage: what the step is for.
        round: the round, from 1; 0 in evaluation.
        phase: which phase this step belongs to.
        number: of the step in its phase; part of the key of every random draw in the step.
        first: first step of this cohort in this round, or of this evaluation.
        phase_start: first step of the phase.
        own_end: per client, whether this is its own last step of the phase.
        phase_end: last stacked step of the phase.
        end: last step of the cohort in this round.
        point: what is evaluated: ``"server"`` or ``"local"``; empty in training.
        split: ``"train"``, or the split that is evaluated: ``"test"``, ``"val"``, ``"new"``, ...
        index: int64 [K, B], rows of the image pool; 0 where masked out.
        mask: bool [K, B], False where a client's last batch is padded.
        uniform: float32 [K, B, m] numbers in [0, 1) for the augmentation of each image, or None.
        images: uint8 [K, B, 3, H, W] and
        labels: int64 [K, B], where a loader process has gathered them.
    """

    cohort: tuple[int, ...]
    clients: tuple[int, ...] = ()
    stage: Stage = Stage.TRAIN
    round: int = 0
    phase: int = 0
    number: int = 0
    first: bool = False
    phase_start: bool = False
    own_end: tuple[bool, ...] = ()
    phase_end: bool = False
    end: bool = False
    point: str = ""
    split: str = "train"
    index: Tensor | None = None
    mask: Tensor | None = None
    uniform: Tensor | None = None
    images: Tensor | None = None
    labels: Tensor | None = None


class Block:
    """Consecutive steps of one cohort, handed to the Trainer as one batch: its hooks cost a millisecond each time.

    No dataclass, into which the Trainer would look for numbers to convert to its precision; images are when gathered.

    Args:
        steps: the steps, at least one.
        last: whether it is the rank's last one of the round or of the evaluation.
    """

    def __init__(self, steps: tuple[Step, ...], last: bool = False) -> None:
        self.steps = steps
        self.last = last

    @property
    def cohort(self) -> tuple[int, ...]:
        """Ids of all clients of the cohort."""
        return self.steps[0].cohort

    @property
    def first(self) -> bool:
        """Whether the cohort begins here."""
        return self.steps[0].first

    @property
    def end(self) -> bool:
        """Whether the cohort ends here."""
        return self.steps[-1].end

    def to(self, device: torch.device) -> "Block":
        """Put the tensors on a device: one copy a kind for all steps, for which nobody waits."""
        new: list[dict[str, Any]] = [{} for _ in self.steps]
        for name in ("index", "mask", "uniform", "images", "labels"):
            values = [getattr(step, name) for step in self.steps]
            away = [n for n, value in enumerate(values) if value is not None and value.device != device]
            for n, value in zip(away, placed_together([values[n] for n in away], device), strict=True):
                new[n][name] = value
        steps = (replace(step, **moved) if moved else step for step, moved in zip(self.steps, new, strict=True))
        return Block(tuple(steps), self.last)


class Plan(Protocol):
    """Steps by their position."""

    steps: list[Step]

    def __getitem__(self, item: int) -> Step: ...


class Blocks:
    """A rank's part of some plans, one after the other, in blocks of at most ``size`` steps of one cohort.

    What the Trainer iterates over, as it is: a DataLoader made anew each round would cost more than it gives.

    Whole cohorts are dealt, by their clients' steps, so that nobody's arithmetic depends on the number of ranks. A rank
    without any has one block of a step without clients: all ranks come to the end of a round.

    Args:
        plans: of all ranks together.
        size: steps in a block at most.
        rank: whose blocks.
        count: of ranks.

    Attributes:
        owners: per client of the plans, the rank that steps it.
    """

    def __init__(self, plans: Sequence[Plan], size: int, rank: int = 0, count: int = 1) -> None:
        pieces = [(plan, positions) for plan in plans for positions in _of_cohorts(plan.steps)]
        work = [sum(len(plan.steps[position].clients) for position in positions) for plan, positions in pieces]
        ranks = dealt(work, count)
        self.owners = {
            client: owner
            for (plan, positions), owner in zip(pieces, ranks, strict=True)
            for client in plan.steps[positions[0]].cohort
        }
        #: steps of the rank's clients, together
        self.local_steps = sum(steps for steps, owner in zip(work, ranks, strict=True) if owner == rank)
        self.blocks: list[tuple[Plan, range]] = []
        self._first: Block | None = None
        for (plan, positions), owner in zip(pieces, ranks, strict=True):
            begin = positions.start
            for position in positions if owner == rank else ():
                if plan.steps[position].end or position + 1 - begin == size:
                    self.blocks.append((plan, range(begin, position + 1)))
                    begin = position + 1

    def __len__(self) -> int:
        return max(1, len(self.blocks))

    def draw_first(self) -> None:
        """Draw the first block now, and keep it until it is asked for."""
        self._first = self[0]

    def __iter__(self) -> Iterator[Block]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, item: int) -> Block:
        if not self.blocks:
            return Block((Step(()),), last=True)
        if item == 0 and self._first is not None:
            first, self._first = self._first, None
            return first
        plan, positions = self.blocks[item]
        return Block(tuple(plan[position] for position in positions), last=item + 1 == len(self.blocks))


def _of_cohorts(steps: Sequence[Step]) -> Iterator[range]:
    """Yield the positions of each cohort's steps, which follow each other."""
    begin = 0
    for position, step in enumerate(steps):
        if position + 1 == len(steps) or steps[position + 1].cohort != step.cohort:
            yield range(begin, position + 1)
            begin = position + 1


def cohorts(clients: Sequence[int], sizes: Mapping[int, int], width: int) -> list[tuple[int, ...]]:
    """Cut clients into cohorts of at most ``width``, similar sizes together, so that little work is masked out."""
    ordered = sorted(clients, key=lambda client: (-sizes[client], client))
    return [tuple(ordered[start : start + width]) for start in range(0, len(ordered), width)]


def steps_per_epoch(num_samples: int, batch_size: int, drop_last: bool) -> int:
    """Count the mini-batches in one epoch of a client; an incomplete one is dropped only if a full one remains."""
    if drop_last and num_samples >= batch_size:
        return num_samples // batch_size
    return -(-num_samples // batch_size)
