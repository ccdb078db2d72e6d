"""The local training of a round, laid out as stacked steps of cohorts.

A cohort is up to ``width`` clients that are stepped together; everything in a step has a leading dimension K, one row a
client. Within a phase a client's epochs are laid end to end as its own list of mini-batches, and the stacked steps run
to the longest list of the cohort. A cohort lists its clients by falling size, so those that still have steps to do are
always its first ones, and a step holds only them. What a client sees depends on (seed, round, client, phase, epoch)
alone, so the plan of one client is the same in any cohort.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmark.contract import Stage
from benchmark.engine.ranks.ranks import dealt
from benchmark.federation import Terms
from benchmark.placing import placed_together


class Shown(StrEnum):
    """Name the pool that a step's images are of."""

    OWN = "own"  #: the clients' images
    FOREIGN = "foreign"  #: a stream that those of the split are held against; they have no labels
    CORRUPTED = "corrupted"  #: corrupted versions of images of the split, which the last round scores


@dataclass(frozen=True)
class Step:
    """One mini-batch of K clients: whose, when, and which rows of the image pool.

    Attributes:
        cohort: ids of all clients of the cohort.
        clients: ids of those in this step, K of them: the first ones of ``cohort``.
        stage: what the step is for.
        round: the round, from 1; 0 in evaluation.
        phase: which phase this step belongs to.
        number: of the step in its phase; part of the key of every random draw in the step.
        stopping: per client, whether this is its own last step of the phase while others of the cohort go on.
        point: what is evaluated: ``"server"`` or ``"local"``; empty in training.
        split: ``"train"``, or the split that is evaluated: ``"test"``, ``"val"``, ``"new"``, ...
        shown: which pool the images are of.
        index: int64 [K, B], rows of that pool; 0 where masked out.
        mask: bool [K, B], False where a client's last batch is padded.
        uniform: float32 [K, B, m] numbers in [0, 1) for the augmentation of each image, or None.
        images: uint8 [K, B, 3, H, W] and
        labels: int64 [K, B], where a loader process has gathered them.
    """

    cohort: tuple[int, ...]
    clients: tuple[int, ...]
    stage: Stage = Stage.TRAIN
    round: int = 0
    phase: int = 0
    number: int = 0
    stopping: tuple[bool, ...] = ()
    point: str = ""
    split: str = "train"
    shown: Shown = Shown.OWN
    index: Tensor | None = None
    mask: Tensor | None = None
    uniform: Tensor | None = None
    images: Tensor | None = None
    labels: Tensor | None = None


@dataclass(frozen=True)
class Part:
    """Steps of a cohort that belong together: a phase of its training, or the images of a split at a point.

    Attributes:
        cohort: ids of its clients.
        stage: what the steps are for.
        phase: which phase, in training and in the fitting of copies.
        point: what is evaluated; empty in training.
        split: which images.
        positions: of the steps in their plan.
        shown: corrupted versions of the split's images, or these with the stream that they are held against.
    """

    cohort: tuple[int, ...]
    stage: Stage
    phase: int
    point: str
    split: str
    positions: range
    shown: Shown = Shown.OWN


class Plan(Protocol):
    """Cohorts, what each of them does, and the steps by their position.

    ``parts`` holds those of the first cohort, then those of the second and so on; a cohort may have none.
    """

    cohorts: list[tuple[int, ...]]
    parts: list[Part]
    steps: list[Step]

    def __getitem__(self, item: int) -> Step: ...


#: Gives the steps of a plan at consecutive positions, drawn and perhaps gathered.
Source = Callable[[Plan, range], Iterator[Step]]


class CohortWork:
    """All that one cohort does in a round or in an evaluation: what the Trainer takes for a batch.

    Args:
        clients: ids of the cohort; none for a rank that has no cohort in this round.
        plan: where the parts are from; None where there are none.
        parts: in order.
        source: of the steps.
        together: steps that are placed on the device at a time.
        last: whether it is the rank's last cohort of the round or of the evaluation.
    """

    def __init__(
        self,
        clients: tuple[int, ...],
        plan: Plan | None,
        parts: Sequence[Part],
        source: Source,
        together: int,
        last: bool,
    ) -> None:
        self.clients = clients
        self.plan = plan
        self.parts = parts
        self.source = source
        self.together = together
        self.last = last

    def steps(self, part: Part, device: torch.device) -> Iterator[list[Step]]:
        """Yield the steps of a part on the device, some at a time; parts are asked for in order, each to its end."""
        assert self.plan is not None
        steps = self.source(self.plan, part.positions)
        while some := list(islice(steps, self.together)):
            yield on_device(some, device)


def on_device(steps: Sequence[Step], device: torch.device) -> list[Step]:
    """Put the tensors of steps on a device: one copy a kind for all steps, for which nobody waits."""
    new: list[dict[str, Any]] = [{} for _ in steps]
    for name in ("index", "mask", "uniform", "images", "labels"):
        values = [getattr(step, name) for step in steps]
        away = [n for n, value in enumerate(values) if value is not None and value.device != device]
        for n, value in zip(away, placed_together([values[n] for n in away], device), strict=True):
            new[n][name] = value
    return [replace(step, **moved) if moved else step for step, moved in zip(steps, new, strict=True)]


class Share:
    """A rank's part of some plans, cohort by cohort.

    What the Trainer iterates over, as it is: a DataLoader made anew each round would cost more than it gives.

    Whole cohorts are dealt, by their clients' steps, so that no client's arithmetic depends on the number of ranks. A
    rank without any gets work without clients, so that all ranks come to the end of a round.

    Args:
        plans: of all ranks together.
        rank: whose part.
        count: of ranks.
        source: of the steps, made anew whenever the cohorts are iterated over; by default the plans themselves.
        together: steps that are placed on the device at a time.
        wanted: asked of each part whenever the cohorts are iterated over; the others are passed over.

    Attributes:
        owners: per client of the plans, the rank that steps it.
        local_steps: of the rank's clients, together.
        cohorts: the rank's: their clients, plan and parts.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        rank: int = 0,
        count: int = 1,
        source: Callable[["Share"], Source] = lambda share: drawn,
        together: int = 1,
        wanted: Callable[[Part], bool] = lambda part: True,
    ) -> None:
        pieces = []
        for plan in plans:
            parts = by_cohort(plan.parts)
            pieces += [(clients, plan, parts.get(clients, [])) for clients in plan.cohorts]
        work = [
            sum(len(plan.steps[position].clients) for part in own for position in part.positions)
            for _, plan, own in pieces
        ]
        ranks = dealt(work, count)
        self.owners = {client: owner for (of, _, _), owner in zip(pieces, ranks, strict=True) for client in of}
        self.local_steps = sum(steps for steps, owner in zip(work, ranks, strict=True) if owner == rank)
        self.cohorts = [piece for piece, owner in zip(pieces, ranks, strict=True) if owner == rank]
        self.source = source
        self.together = together
        self.wanted = wanted

    def __len__(self) -> int:
        return max(1, len(self.cohorts))

    @property
    def positions(self) -> list[tuple[Plan, int]]:
        """Return the plan and the position of every step that is taken now, in order."""
        parts = [(plan, part) for _, plan, of in self.cohorts for part in of if self.wanted(part)]
        return [(plan, position) for plan, part in parts for position in part.positions]

    def __iter__(self) -> Iterator[CohortWork]:
        source = self.source(self)
        if not self.cohorts:
            yield CohortWork((), None, (), source, self.together, last=True)
        for number, (clients, plan, parts) in enumerate(self.cohorts, start=1):
            wanted = [part for part in parts if self.wanted(part)]
            yield CohortWork(clients, plan, wanted, source, self.together, last=number == len(self.cohorts))


def by_cohort(parts: Sequence[Part]) -> dict[tuple[int, ...], list[Part]]:
    """Return the parts of each cohort, in order."""
    found: dict[tuple[int, ...], list[Part]] = {}
    for part in parts:
        found.setdefault(part.cohort, []).append(part)
    return found


def drawn(plan: Plan, positions: range) -> Iterator[Step]:
    """Draw the steps of a plan one after the other, as they are asked for."""
    return map(plan.__getitem__, positions)


def cohorts(
    clients: Sequence[int], sizes: Mapping[int, int], width: int, terms: Terms | None = None
) -> list[tuple[int, ...]]:
    """Cut clients into cohorts of at most ``width``, similar sizes together, so that little work is masked out.

    Clients with different label spaces, which ``terms`` know, are apart.
    """
    made = []
    for alike in with_equal_spaces(clients, terms):
        ordered = sorted(alike, key=lambda client: (-sizes[client], client))
        made += [tuple(ordered[start : start + width]) for start in range(0, len(ordered), width)]
    return made


def with_equal_spaces(clients: Sequence[int], terms: Terms | None) -> list[Sequence[int]]:
    """Return clients by their label spaces, in order of the first with each."""
    if terms is None or not terms.own_spaces:
        return [clients]
    found: dict[tuple[int, ...], list[int]] = {}
    for client in clients:
        found.setdefault(terms.spaces_of(client), []).append(client)
    return [*found.values()]


def steps_per_epoch(num_samples: int, batch_size: int, drop_last: bool) -> int:
    """Count the mini-batches in one epoch of a client; an incomplete one is dropped only if a full one remains."""
    if drop_last and num_samples >= batch_size:
        return num_samples // batch_size
    return -(-num_samples // batch_size)
