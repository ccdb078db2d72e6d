"""What the Trainer iterates over: the blocks of a round's steps, or of an evaluation's."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmark.contract import Stage
from benchmark.engine.capacity import widest
from benchmark.engine.evaluation_plan import EvaluationPlan
from benchmark.engine.plan import Block, Blocks, Plan
from benchmark.engine.pool import gather
from benchmark.engine.round_plan import RoundPlan
from benchmark.engine.simulation import Simulation
from benchmark.seeds import torch_generator
from benchmark.server import ServerRule

log = logging.getLogger(__name__)

#: Steps handed to the Trainer at once; with loader processes, which send the images themselves, one.
BLOCK = 16

#: Bytes of what clients differ in (whole models, with some methods) that are tested together at most.
EVALUATED_STATE = 2**32


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
        #: of all clients together, in the round that was laid out last
        self.local_steps = 0

    @property
    def width(self) -> int:
        """Clients stepped together."""
        if self.chosen is None:
            self.chosen = widest(self.simulation, self.rule, resident=not self.workers)
            log.info("cohorts of up to %d clients are stepped together, by memory", self.chosen)
        return self.chosen

    def training(self, number: int) -> "DataLoader[Block]":
        """Return the stacked steps of a round."""
        plan = self._plan(self.select(number), Stage.TRAIN, number)
        self.local_steps = sum(len(step.clients) for step in plan.steps)
        return self._loader([plan], "train", number)

    def evaluation(self, splits: Sequence[str]) -> "DataLoader[Block]":
        """Return the scoring of every client on these splits, after the fitting of copies.

        Its draws do not depend on the round: the same state has the same scores whenever it is evaluated.
        """
        simulation, federation = self.simulation, self.simulation.federation
        method, roles = simulation.method, simulation.roles
        names = roles.personal + (roles.shared if method.evaluate_local else ())
        own = sum(value.numel() * value.element_size() for value in map(method.get_parameter, names))
        most = max(1, EVALUATED_STATE // max(own, 1))
        plans: list[Plan] = []
        for clients, stage, tested in (
            (federation.training_clients, Stage.FINETUNE, [name for name in splits if name != "new"]),
            (federation.new_clients, Stage.ADAPT, [name for name in splits if name == "new"]),
        ):
            if clients and tested:
                fitting = self._plan(clients, stage, 0) if simulation.phases[stage] else None
                points = ("server", "local") if method.evaluate_local and stage is Stage.FINETUNE else ("server",)
                rows = {name: federation.held_out[name] for name in tested}
                plans.append(EvaluationPlan(clients, rows, fitting, points, federation.eval_batch_size, most))
        return self._loader(plans, "evaluate")

    def _plan(self, clients: Sequence[int], stage: Stage, number: int) -> RoundPlan:
        federation = self.simulation.federation
        return RoundPlan(
            clients,
            federation.train_rows,
            self.simulation.phases[stage],
            stage,
            federation.batch_size,
            federation.drop_last,
            self.width,
            federation.seed,
            number,
            self.simulation.images.pool.transform.augment_numbers,
        )

    def _loader(self, plans: Sequence[Plan], *key: int | str) -> "DataLoader[Block]":
        blocks: Dataset[Block] = Blocks(plans, 1 if self.workers else BLOCK)
        if self.workers:
            pool = self.simulation.images.pool
            blocks = _Gathered(blocks, pool.images, pool.labels)
        # A generator of its own: otherwise the loader draws from the global one, at another moment after a resume.
        generator = torch_generator(self.simulation.federation.seed, "loader", *key)
        return DataLoader(blocks, batch_size=None, num_workers=self.workers, generator=generator)


class _Gathered(Dataset[Block]):
    """Blocks whose steps bring their images: what loader processes do."""

    def __init__(self, blocks: Dataset[Block], images: Tensor, labels: Tensor) -> None:
        self.blocks = blocks
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(cast(Any, self.blocks))

    def __getitem__(self, item: int) -> Block:
        steps = self.blocks[item].steps
        return Block(tuple(gather(step, self.images, self.labels) if step.clients else step for step in steps))
