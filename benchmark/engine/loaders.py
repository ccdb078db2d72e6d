"""What the Trainer iterates over: the blocks of a round's steps, or of an evaluation's."""

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmark.contract import Stage
from benchmark.engine.capacity import balanced, widest
from benchmark.engine.evaluation_plan import evaluated_clients, evaluation_plans
from benchmark.engine.plan import Block, Blocks, Plan
from benchmark.engine.pool import gather
from benchmark.engine.roles import overrides
from benchmark.engine.round_plan import RoundPlan
from benchmark.engine.simulation import Simulation
from benchmark.seeds import torch_generator
from benchmark.server import ServerRule

log = logging.getLogger(__name__)

#: Steps handed to the Trainer at once; with loader processes, which send the images themselves, one.
BLOCK = 16


class Loaders:
    """Lays out rounds and evaluations for the Trainer.

    Args:
        simulation: whose clients and phases.
        cohort_width: clients stepped together; ``"auto"`` picks by memory.
        workers: loader processes that gather the images; 0 gathers on the device.
        rule: the server's, started.
        select: gives the clients of a round, by its number.
    """

    def __init__(
        self,
        simulation: Simulation,
        cohort_width: int | Literal["auto"],
        workers: int,
        rule: ServerRule,
        select: Callable[[int], list[int]],
    ) -> None:
        self.simulation = simulation
        self.workers = workers
        self.rule = rule
        self.select = select
        #: what ``auto`` chose; part of a checkpoint, for bit-identical arithmetic
        self.chosen: int | None = None if cohort_width == "auto" else cohort_width
        #: of this rank's clients together, in the round that was laid out last
        self.local_steps = 0
        #: the clients that this rank trains in that round, and those that it scores
        self.trained: list[int] = []
        self.scored: list[int] = []
        #: by its number, a round's blocks, laid out while the one before it ran
        self._ahead: dict[int, Blocks] = {}

    @property
    def width(self) -> int:
        """Clients stepped together."""
        if self.chosen is None:
            simulation, ranks = self.simulation, self.simulation.ranks
            most = min(ranks.everybody("the cohort width", widest(simulation, self.rule, resident=not self.workers)))
            sizes = simulation.holdings.train_sizes
            self.chosen = balanced(most, [sizes[client] for client in self.select(1)], ranks.count)
            log.info("cohorts of up to %d clients are stepped together, by memory", self.chosen)
        return self.chosen

    def training(self, number: int) -> "Blocks | DataLoader[Block]":
        """Return this rank's part of the stacked steps of a round."""
        blocks = self._ahead.pop(number, None) or self._laid_out(number)
        self.local_steps = blocks.local_steps
        self.trained = self._mine(blocks)
        return self._loader(blocks, "train", number)

    def lay_out_next(self, number: int) -> None:
        """Lay out the round after this one while the device still works, where its clients are known by now.

        They are not where a rule has a selection of its own, which may go by what comes of this round; and loader
        processes lay out for themselves. After the last round it is in vain, so that all rounds cost the same.
        """
        if not overrides(self.rule, "select") and not self.workers:
            self._ahead = {number + 1: self._laid_out(number + 1)}
            self._ahead[number + 1].draw_first()

    def _laid_out(self, number: int) -> Blocks:
        return self._blocks([self._plan(self.select(number), Stage.TRAIN, number)])

    def evaluation(self, splits: Sequence[str]) -> "Blocks | DataLoader[Block]":
        """Return this rank's part of the scoring of every client on these splits, after the fitting of copies.

        Its draws do not depend on the round: the same state has the same scores whenever it is evaluated.
        """
        simulation, federation = self.simulation, self.simulation.federation
        fitting = {
            stage: self._plan(clients, stage, 0)
            for stage, clients in evaluated_clients(federation).items()
            if simulation.phases[stage]
        }
        alone = simulation.clients.one_by_one
        plans = evaluation_plans(simulation.method, simulation.roles, federation, splits, fitting, alone)
        blocks = self._blocks(plans)
        self.scored = self._mine(blocks)
        return self._loader(blocks, "evaluate")

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

    def _blocks(self, plans: Sequence[Plan]) -> Blocks:
        ranks = self.simulation.ranks
        return Blocks(plans, 1 if self.workers else BLOCK, ranks.rank, ranks.count)

    def _mine(self, blocks: Blocks) -> list[int]:
        return [client for client, owner in blocks.owners.items() if owner == self.simulation.ranks.rank]

    def _loader(self, blocks: Blocks, *key: int | str) -> "Blocks | DataLoader[Block]":
        if not self.workers:
            return blocks
        pool = self.simulation.images.pool
        gathered = _Gathered(blocks, pool.images, pool.labels)
        # A generator of its own: otherwise the loader draws from the global one, at another moment after a resume.
        generator = torch_generator(self.simulation.terms.seed, "loader", *key)
        return DataLoader(gathered, batch_size=None, num_workers=self.workers, generator=generator)


class _Gathered(Dataset[Block]):
    """Blocks whose steps bring their images: what loader processes do."""

    def __init__(self, blocks: Blocks, images: Tensor, labels: Tensor) -> None:
        self.blocks = blocks
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, item: int) -> Block:
        block = self.blocks[item]
        made = (gather(step, self.images, self.labels) if step.clients else step for step in block.steps)
        return Block(tuple(made), block.last)
