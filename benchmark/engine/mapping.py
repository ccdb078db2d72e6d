"""A function of one client, called for all clients of a cohort at once."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from benchmark.backbones import products
from benchmark.backbones.merged_layers import MergedLayers
from benchmark.contract import Client, ClientMethod, MiniBatch
from benchmark.engine.cohort import Cohort
from benchmark.engine.refusals.author_errors import explained
from benchmark.engine.refusals.watch import Watch
from benchmark.engine.roles import Roles
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Values
from benchmark.internals import register_pytree_node, tree_leaves, tree_map

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


class _OneClient(nn.Module):
    """Calls a function of one client while ``functional_call`` has put the client's values in the method's parameters.

    Args:
        method: whose parameters the function sees.
        places: per parameter name, where it stands in this module.
        merged: what merges frozen layers of many clients.
        has_frozen: whether the method has any.
        by_onednn: whether oneDNN has the faster products with them on a CPU.
    """

    def __init__(
        self, method: nn.Module, places: dict[str, str], merged: MergedLayers, has_frozen: bool, by_onednn: bool
    ) -> None:
        super().__init__()
        self.method = method
        self._present = {name: attrgetter(place) for name, place in places.items()}
        self._merged = merged
        self._has_frozen = has_frozen
        self._by_onednn = by_onednn

    def forward(
        self,
        function: ClientFunction,
        names: tuple[str, ...],
        alone: bool,
        round: Round,
        common: Values,
        own: dict[str, Values],
        rows: tuple[Any, ...],
    ) -> Any:
        """Return ``function(client, *rows)``, with a leading 1 if the client is not mapped but ``alone``."""
        facts = own["facts"]
        client = Client(
            {name: self._present[name](self) for name in names},
            common | own["received"],
            facts["class_counts"],
            round,
            facts["participated"],
            own["previous"],
            own["prepared"],
            own["own_images"],
            own["constants"],
        )
        with self._merging(client.class_counts.device):
            made = function(client, *rows)
        return _with_leading_one(made) if alone else made

    def _merging(self, device: torch.device) -> AbstractContextManager[Any]:
        """Have attention and frozen layers merge the clients on a GPU, and on a CPU under autocast or by oneDNN.

        Elsewhere it gains nothing. The backward kernels of stacked attention fail on a GPU.
        """
        on_cpu = self._by_onednn or (self._has_frozen and torch.is_autocast_enabled("cpu"))
        worthwhile = device.type != "cpu" or on_cpu
        return self._merged if worthwhile else nullcontext()


class ClientMap:
    """Maps functions of one client over cohorts with ``torch.func.vmap``.

    Args:
        method: whose parameters the functions see.
        roles: of its parameters.
        watch: over what a function must not do.
        merged: another map's, of the same method.
        one_by_one: for a debugger: cohorts hold one client each, which is called in plain PyTorch.

    Attributes:
        merged: holds what it has cast of frozen parameters.
    """

    def __init__(
        self,
        method: ClientMethod,
        roles: Roles,
        watch: Watch,
        merged: MergedLayers | None = None,
        one_by_one: bool = False,
    ) -> None:
        self._method = method
        self._has_frozen = roles.has_frozen
        self._watch = watch
        self.merged = merged or MergedLayers(method.get_parameter(name) for name in roles.slots)
        self.one_by_one = one_by_one
        self._places = {name: f"method.{name}" for name in roles.slots}
        # Looking for tied parameters at every step takes a twentieth of a small network's.
        standing = Counter(id(parameter) for module in method.modules() for parameter in _own_parameters(module))
        tied = any(standing[id(method.get_parameter(name))] > 1 for name in roles.slots)
        frozen = (parameter for name, parameter in method.named_parameters() if name not in self._places)
        by_onednn = products.faster_by_onednn() and any(map(products.large, frozen))
        one_client = _OneClient(method, self._places, self.merged, roles.has_frozen, by_onednn)
        self._of_one_client = partial(functional_call, one_client, tie_weights=tied)

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
        call = self.bound(function, count, cohort.round, cohort.received.common, cohort.rows(count), rows)
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

    def bound(
        self, function: ClientFunction, count: int, round: Round, common: Values, own: dict[str, Values], rows: Any
    ) -> Callable[[], Any]:
        """Return the call of ``function(client, *rows)`` for so many clients: what it returns is [K, ...].

        One client alone of a method that trains everything is not mapped, which would cost a tenth of a small
        network's step. (With a frozen backbone it costs nothing that counts, and all widths agree up to what a product
        of matrices rounds by its number of rows.)
        """
        alone = count == 1 and (self.one_by_one or not self._has_frozen)
        if alone:
            own, rows = tree_map(lambda part: part.squeeze(0), (own, rows))
        named = {self._places[name]: value for name, value in own["values"].items()}
        rest = {part: values for part, values in own.items() if part != "values"}
        arguments = (function, tuple(own["values"]), alone, round, common, rest, rows)
        if alone:
            return partial(self._of_one_client, named, arguments)
        mapped = vmap(self._of_one_client, in_dims=(0, (None, None, None, None, None, 0, 0)))
        return partial(mapped, named, arguments)


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that stand in a module itself; one that has two names is there twice."""
    return [parameter for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)]


def _with_leading_one(made: Any) -> Any:
    for part in tree_leaves(made):
        if not isinstance(part, Tensor):  # as vmap says it
            raise ValueError(f"must only return Tensors, got type {type(part)}")
    return tree_map(lambda part: part.unsqueeze(0), made)
