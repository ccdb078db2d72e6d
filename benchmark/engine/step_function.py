"""Compute the losses and gradients of a cohort's step, each client's exactly its own."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from benchmark.contract import ClientMethod, MiniBatch
from benchmark.engine.cohort import Cohort, Slots
from benchmark.engine.mapping import ClientFunction, ClientMap
from benchmark.engine.plan.work import Step
from benchmark.engine.refusals.author_errors import losses_of
from benchmark.federation import Values


class Made(NamedTuple):
    """Of one step of K' clients.

    Attributes:
        losses: [K'].
        reported: what the loss reports by name, [K', ...] each.
        gradients: of every slot that is trained, [K, ...] each, by parameter name; None where it has none.
    """

    losses: Tensor
    reported: Values
    gradients: dict[str, Tensor | None]


class StepFunction(Protocol):
    """Computes a step's losses and gradients; one is chosen when the simulation is made."""

    def __call__(self, cohort: Cohort, step: Step, batch: MiniBatch) -> Made:
        """Return them for the clients in ``step``, the first ones of the cohort.

        Args:
            cohort: they and those that have finished; their values lie in the slots.
            step: whose and when.
            batch: their mini-batches, [K', ...] throughout.
        """


#: Calls ``function(client, *rows)`` for the clients of a step, given the function and the rows.
Called = Callable[[ClientFunction, tuple[MiniBatch, ...]], Any]


class WrittenStep(StepFunction, Protocol):
    """A step function that can be recorded.

    Attributes:
        method: whose loss.
        clients: maps it over the cohort.
        slots: what is trained.
    """

    method: ClientMethod
    clients: ClientMap
    slots: Slots

    def made(self, call: Called, step: Step, batch: MiniBatch, trained: Values) -> Made:
        """Return the same with clients' functions called by ``call``, and gradients of ``trained``, [K, ...] each."""


class AsWritten:
    """Takes every step as the method writes it.

    The loss is the sum over clients, so that each slot's gradient is its client's own.

    Args:
        method: whose loss.
        clients: maps it over the cohort.
        slots: what is trained.
    """

    def __init__(self, method: ClientMethod, clients: ClientMap, slots: Slots) -> None:
        self.method = method
        self.clients = clients
        self.slots = slots

    def __call__(self, cohort: Cohort, step: Step, batch: MiniBatch) -> Made:
        """Call ``client_loss`` for all clients at once, and differentiate the sum.

        Raises:
            ConfigurationError: the method's loss is none, or does what cannot be done for many clients at once.
        """
        for slot in self.slots.values():
            slot.grad = None
        count, part = len(step.clients), (step.stage, step.phase)
        loss = self.clients("client_loss", self.method.client_loss, cohort, count, batch, part=part, number=step.number)
        losses, reported = losses_of(self.method, loss, count)
        losses.sum().backward()  # no gradient scaler to go through: fp16 is refused
        gradients = {name: slot.grad for name, slot in self.slots.all().items() if slot.requires_grad}
        return Made(losses, reported, gradients)

    def made(self, call: Called, step: Step, batch: MiniBatch, trained: Values) -> Made:
        """Return losses, and gradients of these leaves, which nothing is written into."""
        made = call(self.method.client_loss, (batch,))
        losses, reported = made if isinstance(made, tuple) else (made, {})
        found = torch.autograd.grad(losses.sum(), list(trained.values()), allow_unused=True)
        return Made(losses, reported, dict(zip(trained, found, strict=True)))
