"""Lay out a round or an evaluation as the cohorts that the Trainer iterates over."""

import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Literal

from torch.utils.data import DataLoader, Dataset

from benchmark.contract import Stage
from benchmark.engine.batches.images import ImageFeed
from benchmark.engine.batches.pool import gather
from benchmark.engine.device.capacity import balanced, widest
from benchmark.engine.plan.evaluation_plan import evaluated_clients, evaluation_plans
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.engine.plan.work import Part, Plan, Share, Shown, Source, Step
from benchmark.engine.simulation import Simulation
from benchmark.seeds import torch_generator
from benchmark.server import ServerRule

log = logging.getLogger(__name__)

#: Steps that are placed on the device at a time; those that loader processes have gathered, one.
TOGETHER = 16


class Loaders:
    """Lays out rounds and evaluations for the Trainer.

    Args:
        simulation: whose clients and phases.
        clients_at_once: clients stepped together; ``"auto"`` picks by memory.
        workers: loader processes that gather the images; 0 gathers on the device.
        rule: the server's, started.
        select: gives the clients of a round, by its number.
        is_last: says whether an evaluation that begins is of the last round, or of a finished run.
    """

    def __init__(
        self,
        simulation: Simulation,
        clients_at_once: int | Literal["auto"],
        workers: int,
        rule: ServerRule,
        select: Callable[[int], list[int]],
        is_last: Callable[[], bool] = lambda: False,
    ) -> None:
        self.simulation = simulation
        self.workers = workers
        self.rule = rule
        self.select = select
        self.is_last = is_last
        #: what ``auto`` chose; part of a checkpoint, for bit-identical arithmetic
        self.chosen: int | None = None if clients_at_once == "auto" else clients_at_once
        #: of this rank's clients together, in the round that was laid out last
        self.local_steps = 0
        self._evaluation: Share | None = None
        #: the clients that this rank trains in that round, and those that it scores
        self.trained: list[int] = []
        self.scored: list[int] = []

    @property
    def width(self) -> int:
        """Clients stepped together."""
        if self.chosen is None:
            simulation, ranks = self.simulation, self.simulation.ranks
            most = min(ranks.everybody("the clients at once", widest(simulation, self.rule, resident=not self.workers)))
            sizes = simulation.holdings.train_sizes
            self.chosen = balanced(most, [sizes[client] for client in self.select(1)], ranks.count)
            log.info("up to %d clients are stepped at once, by memory", self.chosen)
        return self.chosen

    def training(self, number: int) -> Share:
        """Return this rank's cohorts of a round."""
        share = self._share([self._plan(self.select(number), Stage.TRAIN, number)], "train", number)
        self.local_steps = share.local_steps
        self.trained = self._mine(share)
        return share

    def evaluation(self, splits: Sequence[str]) -> Share:
        """Return this rank's cohorts of the scoring of every client on these splits, after the fitting of copies.

        Its draws do not depend on the round: the same state has the same scores whenever it is evaluated.
        """
        simulation, federation = self.simulation, self.simulation.federation
        fitting = {
            stage: self._plan(clients, stage, 0)
            for stage, clients in evaluated_clients(federation).items()
            if simulation.phases.get(stage)
        }
        alone = simulation.clients.one_by_one
        plans = evaluation_plans(simulation.method, simulation.roles, federation, splits, fitting, alone)
        self._evaluation = share = self._share(plans, "evaluate")
        self.scored = self._mine(share)
        return share

    @property
    def evaluation_steps(self) -> int:
        """Return this rank's steps of the evaluation that was laid out last."""
        return 0 if self._evaluation is None else len(self._evaluation.positions)

    def _wanted(self, part: Part) -> bool:
        return part.shown is not Shown.CORRUPTED or self.is_last()

    def begin(self, clients: Sequence[int]) -> None:
        """Have what the steps of these clients need, before the first; called by all ranks, each with its own."""
        self.simulation.images.settle(self.simulation.device, resident=not self.workers)
        self.simulation.store.bring(clients)

    def _plan(self, clients: Sequence[int], stage: Stage, number: int) -> RoundPlan:
        federation = self.simulation.federation
        return RoundPlan(
            clients,
            federation.holdings.train_rows,
            federation.terms,
            self.simulation.phases[stage],
            stage,
            self.width,
            number,
            self.simulation.images.pool.transform.augment_numbers,
        )

    def _share(self, plans: Sequence[Plan], *key: int | str) -> Share:
        ranks = self.simulation.ranks
        if not self.workers:
            return Share(plans, ranks.rank, ranks.count, together=TOGETHER, wanted=self._wanted)

        def gathered(share: Share) -> Source:
            """Have loader processes gather the images of all steps, in the order in which they are taken."""
            # A generator of its own: otherwise the loader draws from the global one, at another moment after a resume.
            generator = torch_generator(self.simulation.terms.seed, "loader", *key)
            steps = _Gathered(share, self.simulation.images)
            arriving = iter(DataLoader(steps, batch_size=None, num_workers=self.workers, generator=generator))
            return lambda plan, positions: islice(arriving, len(positions))

        return Share(plans, ranks.rank, ranks.count, gathered, wanted=self._wanted)

    def _mine(self, share: Share) -> list[int]:
        return [client for client, owner in share.owners.items() if owner == self.simulation.ranks.rank]


class _Gathered(Dataset[Step]):
    """The steps of a rank's cohorts, one after the other, with their images: what loader processes do."""

    def __init__(self, share: Share, images: ImageFeed) -> None:
        self.places = share.positions
        shown = {plan.steps[position].shown for plan, position in self.places}
        pools = {each: images.pool_of(each) for each in shown}
        self.pools = {each: (pool.images, pool.labels) for each, pool in pools.items()}

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, item: int) -> Step:
        plan, position = self.places[item]
        step = plan[position]
        return gather(step, *self.pools[step.shown])
