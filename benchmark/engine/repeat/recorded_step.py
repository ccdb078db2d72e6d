"""A cohort's step recorded once as a list of operations, and repeated without Python, vmap and autograd around them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from benchmark.contract import MiniBatch, Stage
from benchmark.engine.cohort import Cohort
from benchmark.engine.plan.work import Step
from benchmark.engine.repeat.attributes import Attributes
from benchmark.engine.repeat.captured_step import Graphs
from benchmark.engine.repeat.recording import as_recorded, equal, inputs, recorded, repeats
from benchmark.engine.step_function import Made, WrittenStep
from benchmark.errors import ConfigurationError

log = logging.getLogger(__name__)

#: Steps of a kind that are taken as they are written before it is recorded, which takes as long as hundreds of them.
BEFORE_RECORDING = 16
#: Repeated steps that are timed.
TIMED = 8
#: Seconds of a step on a CPU above which arithmetic is nearly all of it, so that nothing is gained.
SMALL_STEP = 0.03
#: A recorded step that takes more than so much of the time of the same one as it is written, is not used.
WORTHWHILE = 0.95
#: Times that a method's attributes may change between phases before its steps are no longer recorded.
CHANGES = 4


@dataclass
class _Kind:
    """Steps of one stage, phase and shape.

    Attributes:
        seen: how many were taken as they are written.
        plain: seconds of the fastest of them.
        repeated: the same of repeated ones.
        repeats: how many were repeated.
        program: the recorded operations.
        trusted: whether they gave what a step as it is written did, on other numbers than those of the recording.
        last_look: the last round has come, in which the record is compared once more.
        given_up: it is not recorded any more.
    """

    seen: int = 0
    plain: float = float("inf")
    repeated: float = float("inf")
    repeats: int = 0
    program: Callable[..., Made] | None = None
    trusted: bool = False
    last_look: bool = False
    given_up: bool = False


class Visit:
    """One step in front of its record.

    Args:
        owner: keeps the records.
        kind: the step's.
        tensors: what it reads.
        cohort: the clients.
        step: which of them.
        batch: their mini-batches.

    Attributes:
        repeated: what the record gives, where one is used.
        wanted: whether the step is to be taken as it is written too, or once more; something is learned from it.
    """

    def __init__(
        self, owner: "RecordedSteps", kind: _Kind, tensors: list[Tensor], cohort: Cohort, step: Step, batch: MiniBatch
    ) -> None:
        self._owner, self._kind, self._tensors = owner, kind, tensors
        self._cohort, self._step, self._batch, self._began = cohort, step, batch, perf_counter()
        self._doubted: Made | None = None
        self.repeated = self._repeat() if kind.trusted else None
        tried = kind.repeats.bit_count() == 1 and kind.repeats >= TIMED  # the 8th time, the 16th, the 32nd ...
        last = step.round == owner.rounds() and not kind.last_look
        kind.last_look |= last
        self.wanted = kind.trusted and (tried or last)

    def _repeat(self) -> Made:
        made, kind = self.run(), self._kind
        kind.repeats += 1
        kind.repeated = min(kind.repeated, perf_counter() - self._began)
        if kind.repeats == TIMED and kind.repeated > WORTHWHILE * kind.plain:
            self._owner.give_up(kind, self._step, "it is not faster")
        return made

    def learn(self, made: Made) -> None:
        """Take in what the step as it is written gave.

        Raises:
            ConfigurationError: the record gives other numbers, although it once gave the same.
        """
        kind, owner, before = self._kind, self._owner, self._doubted
        self.wanted, self._doubted = False, made
        if self.repeated is None:
            self._learn_first(made, perf_counter() - self._began)
        elif before is not None and equal(made, before):
            raise ConfigurationError(
                f"{type(owner.method).__name__}.client_loss depends on something outside of the method that has changed"
                f" (round {self._cohort.round.number}): make it an attribute of the method, or return it from prepare"
            )
        elif before is not None or not equal(made, self.repeated):
            self.wanted = before is None and repeats(self.run)  # once more, to see whether it differs from itself
            if not self.wanted:
                owner.give_up(kind, self._step, "its kernels give other bits each time")

    def _learn_first(self, made: Made, seconds: float) -> None:
        """Take in what a step without record gave, and how long it took."""
        kind = self._kind
        kind.plain, kind.seen = min(kind.plain, seconds), kind.seen + 1
        if kind.program is None and kind.seen > BEFORE_RECORDING:
            self._owner.record(kind, self._tensors, self._cohort, self._step, self._batch)
        elif kind.program is not None:
            kind.trusted = equal(made, self.run())
            if not kind.trusted:
                self._owner.give_up(kind, self._step, "its numbers differ")

    def run(self) -> Made:
        """Carry out the recorded operations."""
        assert self._kind.program is not None
        with as_recorded():
            return Made(*self._kind.program(*self._tensors))


class RecordedSteps:
    """Has steps taken as they are written until their kind has been recorded, and repeats the record from then on.

    A record is the list of the operations that torch carries out in a step, forward and backward, after Python, vmap
    and autograd have done their part: the same operations on the same numbers, so that every bit of the result is
    equal. It holds for one stage, phase, number of clients and shape. Before it is used, its losses and gradients were
    equal to those of a later step as it is written; and so they are looked at again at its 8th use, its 16th, its 32nd
    and so on, and once in the last round, so that no run ends with a record that has ceased to hold. Where an attribute
    of the method has changed since, or a submodule's, it is recorded anew.

    Args:
        as_written: takes a step as it is written.
        store: what belongs to the clients between rounds.
        rounds: returns how many the run has.
    """

    def __init__(self, as_written: WrittenStep, store: nn.Module, rounds: Callable[[], int]) -> None:
        self.as_written = as_written
        self.rounds = rounds
        self.method = as_written.method
        self._attributes = Attributes(self.method, (as_written.slots, store))
        self._graphs = Graphs(as_written.slots)
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self._changes = 0

    def __call__(self, cohort: Cohort, step: Step, batch: MiniBatch) -> Made:
        """Repeat a step, or take it as it is written, or both where the two are compared."""
        visit = self.visit(cohort, step, batch)
        if visit is None:
            return self.as_written(cohort, step, batch)
        made = visit.repeated
        while made is None or visit.wanted:
            made = self.as_written(cohort, step, batch)
            visit.learn(made)
        return made

    def visit(self, cohort: Cohort, step: Step, batch: MiniBatch) -> Visit | None:
        """Look up a step's record, and repeat it if there is one; None where there will not be any."""
        if self._changes > CHANGES:
            return None
        if step.number == 0 and not self._attributes.unchanged(step.stage):
            self._forget(step.stage)
        tensors, names = inputs(cohort, batch)
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in tensors)
        key = (step.stage, step.phase, batch.phase, batch.split, len(step.clients), names, shapes)
        kind = self._kinds.setdefault(key, _Kind())
        return None if kind.given_up else Visit(self, kind, tensors, cohort, step, batch)

    def _forget(self, stage: Stage) -> None:
        """Drop the records of a stage, since an attribute has changed."""
        dropped = [key for key, kind in self._kinds.items() if key[0] is stage and kind.program is not None]
        self._kinds |= {key: _Kind(plain=self._kinds[key].plain) for key in dropped}
        self._changes += bool(dropped)
        if self._changes > CHANGES:
            log.info("steps of %s are not recorded: its attributes change", type(self.method).__name__)

    def record(self, kind: _Kind, tensors: list[Tensor], cohort: Cohort, step: Step, batch: MiniBatch) -> None:
        """Record a step, unless it is large or cannot be; on a GPU make a graph of it."""
        on_gpu, sets = tensors[-1].is_cuda, "the loss sets attributes of the method"
        if not on_gpu and kind.plain > SMALL_STEP:
            return self.give_up(kind, step, "it is large")
        if not self._attributes.unchanged(step.stage):
            return self.give_up(kind, step, sets)
        try:
            kind.program = recorded(self.as_written, cohort, step, batch)
        except Exception as error:  # whatever torch says: nothing is lost but time
            return self.give_up(kind, step, str(error).splitlines()[0] if str(error) else type(error).__name__)
        if not self._attributes.unchanged(step.stage):
            return self.give_up(kind, step, sets)
        if on_gpu:
            try:
                kind.program = self._graphs.of(kind.program, tensors)
            except (RuntimeError, ValueError) as error:
                log.info("%s is no CUDA graph: %s", self._named(step), str(error).splitlines()[0])

    def give_up(self, kind: _Kind, step: Step, why: str) -> None:
        """Have all further steps of a kind taken as they are written."""
        kind.given_up, kind.program, kind.trusted = True, None, False
        log.debug("%s is taken as it is written: %s", self._named(step), why)

    def _named(self, step: Step) -> str:
        return f"a step of {type(self.method).__name__} ({step.stage}, phase {step.phase}, {len(step.clients)} clients)"
