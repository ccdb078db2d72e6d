"""The clients that are stepped together: their stacked parameters, and what they hold and are told meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmark.contract import Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round, Values
from benchmark.internals import copy_all


class Slots(nn.ParameterDict):
    """The parameters that are trained, [K, ...] each; their width is that of the cohort in them.

    Args:
        initial: per parameter name, its value at the start.
    """

    def __init__(self, initial: Mapping[str, Tensor]) -> None:
        # Module names may not hold a dot.
        keys = {name: name.replace(".", "/") for name in initial}
        super().__init__({keys[n]: nn.Parameter(v.detach().clone().unsqueeze(0)) for n, v in initial.items()})
        self.names = tuple(initial)
        self._keys_of = keys

    def of(self, name: str) -> nn.Parameter:
        """Return the slot of a parameter."""
        slot: nn.Parameter = getattr(self, self._keys_of[name])
        return slot

    def all(self) -> Values:
        """Return the slots by parameter name, as they are trained."""
        return {name: self.of(name) for name in self.names}

    def detached(self) -> Values:
        """Return the present values by parameter name."""
        return {name: self.of(name).detach() for name in self.names}

    def fill(self, values: Values) -> None:
        """Put the values of a cohort, [K, ...] each, into their slots, with one operation where they have the room."""
        rooms, fitting = [], []
        for name, value in values.items():
            slot = self.of(name)
            slot.grad = None
            if slot.shape == value.shape:
                rooms.append(slot.data)
                fitting.append(value.detach())
            else:
                slot.data = value.detach().to(slot.dtype, copy=True, memory_format=torch.contiguous_format)
        if rooms:
            copy_all(rooms, fitting)


def apart(made: Values, values: Values) -> Values:
    """Return tensors without gradient, and copies of those that are these values themselves, which steps change."""
    own = {value.untyped_storage().data_ptr() for value in values.values()}
    detached = {name: tensor.detach() for name, tensor in made.items()}
    return {n: t.clone() if t.untyped_storage().data_ptr() in own else t for n, t in detached.items()}


@dataclass
class Cohort:
    """K clients while they are stepped or scored: made by ``begin``, spent by ``end``.

    Attributes:
        clients: their ids.
        stage: what for.
        round: which.
        values: per parameter name [K, ...]; a name left out has the same value for all, the method's own.
        received: what the server sent.
        previous: what the method remembers, [K, ...] each.
        participated: bool [K].
        class_counts: int64 [K, C].
        own_images: see ``Client.own_images``, with a leading K.
        constants: what ``client_constants`` returned, with a leading K.
        prepared: what ``prepare`` returned, with a leading K.
        totals: per name reported by the steps, its sum [K, ...] and the number of steps [K].
        momenta: per name in the clients' store, whose rows and what the phases left there.
    """

    clients: tuple[int, ...]
    stage: Stage
    round: Round
    values: Values
    received: Broadcast
    previous: Values
    participated: Tensor
    class_counts: Tensor
    own_images: Values = field(default_factory=dict)
    constants: Values = field(default_factory=dict)
    prepared: Values = field(default_factory=dict)
    totals: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    momenta: dict[str, tuple[Sequence[int], Tensor]] = field(default_factory=dict)

    def rows(self, count: int) -> dict[str, Values]:
        """Return what each of the first ``count`` clients has of its own, [count, ...] throughout."""
        facts = {"participated": self.participated, "class_counts": self.class_counts}
        own = {
            "values": self.values,
            "received": self.received.rows(),
            "previous": self.previous,
            "prepared": self.prepared,
            "own_images": self.own_images,
            "constants": self.constants,
            "facts": facts,
        }
        if count == len(self.clients):
            return own
        return {part: {name: value[:count] for name, value in rows.items()} for part, rows in own.items()}

    def scalars(self) -> Values:
        """Return the sums of what the steps reported of each client as one number, float64 [K]."""
        return {name: total.double() for name, (total, _) in self.totals.items() if total.ndim == 1}

    def report(self, named: Values) -> None:
        """Add what a step of the first clients reported to the totals.

        Raises:
            ConfigurationError: a tensor has another shape than in the step before.
        """
        for name, value in named.items():
            if name not in self.totals:
                count = len(self.clients)
                # Sums in bfloat16 would stop at 256, and those of bools at 1.
                whole = not value.dtype.is_floating_point and value.dtype != torch.bool
                kind = value.dtype if whole else torch.promote_types(value.dtype, torch.float32)
                self.totals[name] = (value.new_zeros(count, *value.shape[1:], dtype=kind), torch.zeros(count))
            total, steps = self.totals[name]
            if total.shape[1:] != value.shape[1:]:
                raise ConfigurationError(
                    f"client_loss reports {name!r} of shape {tuple(value.shape[1:])}, and of {tuple(total.shape[1:])} "
                    "in another step; it is added up over steps, so its shape must not depend on the mini-batch"
                )
            total[: len(value)].add_(value.detach())  # += would copy the sum onto itself
            steps[: len(value)].add_(1)
