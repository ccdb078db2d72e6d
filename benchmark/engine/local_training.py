"""Optimizer steps of a whole cohort, each client's exactly its own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from benchmark.contract import Client, ClientMethod, Phase, Stage
from benchmark.engine.client_state import momenta_of, owners
from benchmark.engine.cohort import Cohort, Slots
from benchmark.engine.gradients import clip_each_client, refuse_held_graph
from benchmark.engine.mapping import ClientMap
from benchmark.engine.plan.work import Step
from benchmark.engine.refusals.author_errors import tensors
from benchmark.engine.roles import below, names_under
from benchmark.engine.step_function import Made
from benchmark.errors import ConfigurationError
from benchmark.federation import Values

Optimizer = LightningOptimizer | torch.optim.Optimizer


def schedule_factor(phase: Phase, finished: int, rounds: int) -> float:
    """Return what a phase's learning rates are multiplied with after so many finished ones of all rounds."""
    return 1.0 if phase.schedule == "constant" else 0.5 * (1 + math.cos(math.pi * finished / max(rounds, 1)))


class LocalSteps:
    """Takes the optimizer steps of cohorts: one optimizer for the stack, elementwise, is one for each client.

    Args:
        method: whose loss.
        clients: maps functions over cohorts.
        slots: what is trained.
    """

    def __init__(self, method: ClientMethod, clients: ClientMap, slots: Slots) -> None:
        self.method = method
        self.clients = clients
        self.slots = slots
        #: called after every step with its cohort, for measurements
        self.on_step: list[Callable[[Cohort, Step], None]] = []
        self._personal = names_under(method, method.personal)
        #: per client and tensor, what steps have moved when the client's own last step was done
        self._finished: dict[tuple[int, str], Tensor] = {}

    def optimizers(self, phases: Sequence[Phase]) -> list[torch.optim.Optimizer]:
        """Make one optimizer a phase; its state is set whenever the phase starts."""
        return [self._optimizer(phase) for phase in phases]

    def _optimizer(self, phase: Phase) -> torch.optim.Optimizer:
        groups = []
        for group in phase.groups:
            names = names_under(self.method, group.parameters)
            settings = {"lr": group.lr, "weight_decay": group.weight_decay, "momentum": group.momentum}
            if phase.optimizer == "adam":
                settings.pop("momentum")
            groups.append({"params": [self.slots.of(name) for name in names], **settings})
        return (torch.optim.SGD if phase.optimizer == "sgd" else torch.optim.Adam)(groups, lr=0.0, foreach=True)

    def take(self, cohort: Cohort, step: Step, made: Made, phase: Phase, optimizer: Optimizer) -> None:
        """Take one step of the clients in ``step``.

        Args:
            cohort: they and those that have finished.
            step: whose and when.
            made: its losses and gradients.
            phase: what is trained.
            optimizer: the phase's.
        """
        for name, gradient in made.gradients.items():
            self.slots.of(name).grad = gradient
        if phase.clip is not None:
            clip_each_client(made.gradients.values(), phase.clip)
        if phase.transform is None:
            optimizer.step()
        else:
            self._transformed_step(cohort, step, phase.transform, optimizer)
        cohort.report({"loss": made.losses, **made.reported})
        if any(step.stopping):
            self._set_aside(step, phase, optimizer)
        for watcher in self.on_step:
            watcher(cohort, step)

    def start(self, phase: Phase, optimizer: Optimizer, rate_factor: float, momenta: Values) -> None:
        """Set the optimizer's state and this round's rates; only the phase's parameters take gradients.

        Args:
            phase: what is trained now.
            optimizer: the phase's.
            rate_factor: what its rates are multiplied with.
            momenta: per parameter name [K, ...]; the others start at zero.
        """
        inner = getattr(optimizer, "optimizer", optimizer)
        inner.state.clear()
        for name, momentum in momenta.items():
            inner.state[self.slots.of(name)]["momentum_buffer"] = momentum
        for settings, group in zip(inner.param_groups, phase.groups, strict=True):
            settings |= {"lr": group.lr * rate_factor, "weight_decay": group.weight_decay}
            if "momentum" in settings:
                settings["momentum"] = group.momentum
        trained = below((name for group in phase.groups for name in group.parameters), self.slots.names)
        for name in self.slots.names:
            slot = self.slots.of(name)
            slot.requires_grad_(name in trained)
            slot.grad = None
            if slot.requires_grad:
                if phase.restart and name in self._personal:
                    slot.data.copy_(self.method.get_parameter(name).expand_as(slot))
                refuse_held_graph(type(self.method).__name__, name, slot)
        self._finished = {}

    def _transformed_step(
        self, cohort: Cohort, step: Step, transform: Callable[[Client, Values], Values], optimizer: Optimizer
    ) -> None:
        """Take an optimizer step whose update goes through the phase's ``transform``.

        Raises:
            ConfigurationError: it gives something that the phase does not train, or another shape.
        """
        count = len(step.clients)
        before = {n: self.slots.of(n).detach().clone() for n in self.slots.names if self.slots.of(n).requires_grad}
        optimizer.step()
        update = {name: (self.slots.of(name).detach() - value)[:count] for name, value in before.items()}
        # The client's parameters are those before the step.
        at_start = replace(cohort, values=before)
        name_of = getattr(transform, "__name__", "transform")
        part = (step.stage, step.phase)
        changed = self.clients(name_of, transform, at_start, count, update, part=part, number=step.number)
        for name, value in tensors(self.method, name_of, changed).items():
            if name not in before or value.shape[1:] != before[name].shape[1:]:
                expected = tuple(before[name].shape[1:]) if name in before else f"some of: {', '.join(sorted(before))}"
                raise ConfigurationError(
                    f"{type(self.method).__name__}.{name_of} gives {name!r} of shape {tuple(value.shape[1:])}; "
                    f"expected {expected}"
                )
            self.slots.of(name).data[:count] = before[name][:count] + value

    def _moved(self, stage: Stage, number: int, phase: Phase, optimizer: Optimizer) -> Values:
        """Return what steps of a phase move, by parameter, and kept momenta by the name of their row."""
        state = getattr(optimizer, "optimizer", optimizer).state
        kept = momenta_of(self.method, phase, number) if stage is Stage.TRAIN else {}
        moved = {name: slot.data for name, slot in self.slots.all().items() if slot.requires_grad}
        return moved | {row: state[self.slots.of(name)]["momentum_buffer"] for name, row in kept.items()}

    def _set_aside(self, step: Step, phase: Phase, optimizer: Optimizer) -> None:
        """Keep what the steps moved of clients at their own last step while others of the cohort go on.

        Momentum and weight decay go on moving a slot after its client's last step; that counts for nothing.
        """
        moved = self._moved(step.stage, step.phase, phase, optimizer)
        for k, stops in enumerate(step.stopping):
            if stops:
                self._finished |= {(k, name): value[k].clone() for name, value in moved.items()}

    def finish(self, cohort: Cohort, stage: Stage, number: int, phase: Phase, optimizer: Optimizer) -> None:
        """End a phase: write back what was set aside, and keep the momenta that outlive the round.

        Args:
            cohort: whose.
            stage: of the phase.
            number: of the phase.
            phase: what was trained.
            optimizer: the phase's.
        """
        moved = self._moved(stage, number, phase, optimizer)
        for (k, name), value in self._finished.items():
            moved[name][k].copy_(value)
        self._finished = {}
        kept = momenta_of(self.method, phase, number) if stage is Stage.TRAIN else {}
        cohort.momenta |= {row: (owners(cohort, phase), moved[row]) for row in kept.values()}
