"""Compute the losses and gradients of a cohort's step, each client's exactly its own."""

from typing import NamedTuple, Protocol

from torch import Tensor

from benchmark.contract import ClientMethod, MiniBatch
from benchmark.engine.cohort import Cohort, Slots
from benchmark.engine.mapping import ClientMap
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
