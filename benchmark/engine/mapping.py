"""A function of one client, called for all clients of a cohort at once."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from benchmark.backbones.merged_layers import MergedLayers
from benchmark.contract import Client, ClientMethod, MiniBatch
from benchmark.engine.cohort import Cohort
from benchmark.engine.mistakes import explained
from benchmark.engine.roles import Roles
from benchmark.engine.watch import Watch
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Values

#: Clients of a cohort that an error's last line names.
NAMED = 5
#: ``function(client, *rows)``; while it runs, the method's parameters are that client's.
ClientFunction = Callable[..., Any]


def _rebuilt(x: Tensor, y: Tensor, mask: Tensor, noise: Values, features: Values, phase: int, split: str) -> MiniBatch:
    return MiniBatch(x, y, mask, phase, split, noise, features)


# vmap takes a stacked mini-batch apart, so that a client's function is called with its own.
register_pytree_node(
    MiniBatch,
    lambda batch: ([batch.x, batch.y, batch.mask, batch.noise, batch.features], (batch.phase, batch.split)),
    lambda parts, of: _rebuilt(*parts, *of),
)


class _Call(nn.Module):
    """Calls a function of the method while ``functional_call`` has put other values in its parameters."""

    def __init__(self, method: nn.Module) -> None:
        super().__init__()
        self.method = method

    def forward(self, function: ClientFunction, *arguments: Any) -> Any:
        return function(*arguments)


class ClientMap:
    """Maps functions of one client over cohorts with ``torch.func.vmap``.

    Args:
        method: whose parameters the functions see.
        roles: of its parameters.
        watch: over what a function must not do.
        merged: another map's, of the same method.

    Attributes:
        merged: holds what it has cast of frozen parameters.
    """

    def __init__(self, method: ClientMethod, roles: Roles, watch: Watch, merged: MergedLayers | None = None) -> None:
        self._method = method
        self._call = _Call(method)
        self._has_frozen = roles.has_frozen
        self._watch = watch
        self.merged = merged or MergedLayers(method.get_parameter(name) for name in roles.slots)
        #: for a debugger: cohorts hold one client each, which is called in plain PyTorch
        self.one_by_one = False
        places: dict[int, list[str]] = {}
        for prefix, module in method.named_modules():
            for name, parameter in module.named_parameters(prefix, recurse=False):
                places.setdefault(id(parameter), []).append(f"method.{name}")
        #: where a parameter stands in the method; tied ones stand at several places
        self._places = {name: places[id(method.get_parameter(name))] for name in roles.slots}

    def __call__(
        self,
        name: str,
        function: ClientFunction,
        cohort: Cohort,
        count: int,
        *rows: Any,
        part: tuple[Any, ...] = (),
        number: int | None = None,
    ) -> Any:
        """Call ``function(client, *rows)`` for the first ``count`` clients; what it returns has a leading dimension.

        Args:
            name: of the method's function that it calls, for messages.
            function: of one client.
            cohort: the clients.
            count: how many of them.
            rows: further arguments, trees of tensors [count, ...].
            part: of the round; the first call in each part is watched.
            number: of the step, which ``part`` begins with the stage of.

        Raises:
            ConfigurationError: the function does what cannot be done for many clients at once.
        """
        own, common = cohort.rows(count), cohort.received.common
        call = partial(self.stacked(function, count), cohort.round, common, own, rows)
        try:
            with self._watch.over(name, (*part, count > 1), cohort.class_counts.device, call):
                return call()
        except Exception as error:
            told = explained(self._method, name, error)
            clients = [*map(str, cohort.clients[:count])]
            whose = f"client{'s' * (count > 1)} {', '.join(clients[:NAMED])}{', ...' * (count > NAMED)}"
            whose += f"{' together' * (count > 1)}, round {cohort.round.number}"
            whose += "" if number is None else f", {part[0]} step {number}"
            if told is None:
                error.add_note(f"in {type(self._method).__name__}.{name}: {whose}")
            elif self.one_by_one:
                told = ConfigurationError(f"{told} ({whose})")
            if told is None or told is error:
                raise
            raise told from error

    def mapped(self, function: ClientFunction) -> Callable[..., Any]:
        """Return ``(round, common, own, rows) -> results [K, ...]``."""
        return vmap(self._of_one_client(function), in_dims=(None, None, 0, 0))

    def stacked(self, function: ClientFunction, count: int) -> Callable[..., Any]:
        """Return the same for so many clients; one client alone of a method that trains everything is not mapped.

        Mapping would cost a tenth of a small network's step. (With a frozen backbone it costs nothing that counts, and
        all widths agree up to what a product of matrices rounds by its number of rows.)
        """
        if count > 1 or (self._has_frozen and not self.one_by_one):
            return self.mapped(function)
        return self._of_one_client(function, alone=True)

    def _of_one_client(self, function: ClientFunction, alone: bool = False) -> Callable[..., Any]:
        """Return ``(round, common, own, rows) -> function(client, *rows)`` with the client's values in the method.

        Called ``alone``, not by vmap, its rows and results have a leading 1.
        """

        def one(round: Round, common: Values, own: dict[str, Values], rows: tuple[Any, ...]) -> Any:
            if alone:
                own, rows = tree_map(lambda part: part.squeeze(0), (own, rows))
            values, facts = own["values"], own["facts"]
            client = Client(
                values,
                common | own["received"],
                facts["class_counts"],
                round,
                facts["participated"],
                own["previous"],
                own["prepared"],
                own["own_images"],
                own["constants"],
            )
            # torch would look for tied parameters at every step, which takes a twentieth of a small network's.
            named = {place: value for name, value in values.items() for place in self._places[name]}
            with self._merging(client.class_counts.device):
                made = functional_call(self._call, named, (function, client, *rows), tie_weights=False)
            return _with_leading_one(made) if alone else made

        return one

    def _merging(self, device: torch.device) -> AbstractContextManager[Any]:
        """Have attention and frozen layers merge the clients on a GPU, and on a CPU frozen ones under autocast.

        Elsewhere it gains nothing. The backward kernels of stacked attention fail on a GPU.
        """
        worthwhile = device.type != "cpu" or (self._has_frozen and torch.is_autocast_enabled("cpu"))
        return self.merged if worthwhile else nullcontext()


def _with_leading_one(made: Any) -> Any:
    for part in tree_leaves(made):
        if not isinstance(part, Tensor):  # as vmap says it
            raise ValueError(f"must only return Tensors, got type {type(part)}")
    return tree_map(lambda part: part.unsqueeze(0), made)
