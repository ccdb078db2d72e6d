"""A cohort's step, forward and backward, as the operations that torch carries out in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from benchmark.contract import MiniBatch
from benchmark.engine.cohort import Cohort, Slots
from benchmark.engine.device.memory import free_memory
from benchmark.engine.mapping import ClientFunction
from benchmark.engine.plan.work import Step
from benchmark.engine.repeat.straight_line import straight_line
from benchmark.engine.step_function import Made, WrittenStep
from benchmark.internals import tree_flatten, tree_map, tree_unflatten, with_trainer, without_autocast

#: Of the device's free memory what all intermediate results of a step may take together while it is recorded.
ROOM = 1 / 4


class _Unread:
    """Stands for what changes from round to round while a step is recorded: the next one could not repeat it.

    Args:
        title: as the loss would spell it.
    """

    def __init__(self, title: str) -> None:
        self._title = title

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"the loss reads {self._title}.{name}, where prepare could")


def inputs(cohort: Cohort, batch: MiniBatch) -> tuple[list[Tensor], tuple[tuple[str, ...], ...]]:
    """Return the tensors that a step reads, in order, and their names part by part."""
    parts = (cohort.received.common, *cohort.rows(len(cohort.clients)).values(), batch.noise, batch.features)
    tensors = [tensor for part in parts for tensor in part.values()]
    return [*tensors, batch.x, batch.y, batch.mask], tuple(map(tuple, parts))


@contextmanager
def as_recorded() -> Iterator[None]:
    """Carry out recorded operations as they are: autograd and autocast have done their part, and would do it again."""
    with torch.no_grad(), without_autocast():
        yield


def repeats(run: Callable[[], Made]) -> bool:
    """Return whether operations give the same bits twice; some kernels of a GPU add in an order that changes."""
    first = tree_map(lambda part: part.clone() if isinstance(part, Tensor) else part, run())
    return equal(first, run())


def recorded(as_written: WrittenStep, cohort: Cohort, step: Step, batch: MiniBatch) -> Callable[..., Made]:
    """Record a step: return a function of its ``inputs`` that gives its losses and gradients, bit for bit.

    Args:
        as_written: takes it as it is written.
        cohort: the clients.
        step: which of them.
        batch: their mini-batches.

    Raises:
        Exception: whatever torch cannot record, the loss reads the round, or there is no room.
    """
    clients, slots, count = as_written.clients, as_written.slots, len(step.clients)
    tensors, _ = inputs(cohort, batch)
    _, layout = tree_flatten((cohort.received.common, cohort.rows(len(cohort.clients)), batch.noise, batch.features))

    def gradients(*given: Tensor) -> Made:
        common, own, noise, features = tree_unflatten(given[:-3], layout)
        trained = {name: own["values"][name].requires_grad_() for name in own["values"] if _is_trained(slots, name)}
        if count < len(cohort.clients):
            own = tree_map(lambda rows: rows[:count], own)
        x, y, mask = given[-3:]
        mini_batch = MiniBatch(x, y, mask, batch.phase, batch.split, noise, features)

        def call(function: ClientFunction, rows: tuple[MiniBatch, ...]) -> Any:
            return clients.bound(function, count, cast(Any, _Unread("client.round")), common, own, rows)()

        made = as_written.made(call, step, mini_batch, trained)
        laid_out = {name: _laid_out(made.gradients[name], leaf) for name, leaf in trained.items()}
        return Made(made.losses.detach(), tree_map(Tensor.detach, made.reported), laid_out)

    room = int(ROOM * free_memory(batch.x.device))
    with torch.enable_grad(), with_trainer(as_written.method, _Unread("self.trainer")):
        return cast(Callable[..., Made], straight_line(gradients, [tensor.detach() for tensor in tensors], room))


def equal(made: Made, again: Made) -> bool:
    """Return whether every number is equal, bit for bit, NaN to NaN."""
    first, of = tree_flatten(made)
    second, like = tree_flatten(again)
    return of == like and all(
        a is b is None or (a is not None and b is not None and a.dtype == b.dtype and _alike(a, b))
        for a, b in zip(first, second, strict=True)
    )


def _alike(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (
        a.shape == b.shape and a.is_floating_point() and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
    )


def _is_trained(slots: Slots, name: str) -> bool:
    return slots.of(name).requires_grad


def _laid_out(gradient: Tensor | None, of: Tensor) -> Tensor | None:
    """Put a gradient into the parameter's order in memory, as autograd does."""
    return gradient if gradient is None or gradient.stride() == of.stride() else gradient.contiguous()
