"""Notice in the first steps of a round what would couple clients without a word."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmark.engine.refusals.author_errors import NOT_OWNED, UNKEYED, drawing_line, place
from benchmark.errors import ConfigurationError
from benchmark.seeds import global_states

#: Calls that all have to draw, before a draw is the method's and not that of another thread of the process.
AGAIN = 3


def _draws(call: Callable[[], Any], device: torch.device) -> bool:
    """Return whether a global generator has moved over a call."""
    before = global_states(device)
    call()
    return global_states(device) != before


class Watch:
    """Watches the first call of each function in each part of a round, with and without mapping.

    Args:
        method: whose functions; its slots and its clients' rows may change, nothing else of it.
        engine: modules that the engine has put into the method.
    """

    def __init__(self, method: nn.Module, engine: tuple[nn.Module, ...]) -> None:
        self._method = method
        self._seen: set[tuple[Any, ...]] = set()
        #: the place of every buffer and frozen parameter, and of what all clients start from
        self._standing = [
            (f"{prefix}.{name}".lstrip("."), held, name)
            for prefix, module in method.named_modules()
            if module not in engine
            for held in (module._parameters, module._buffers)
            for name, value in held.items()
            if value is not None
        ]
        #: the place of every number that is an attribute: one that counts what is called would count calls of cohorts
        self._numbers = [
            (f"{prefix}.{name}".lstrip("."), vars(module), name)
            for prefix, module in method.named_modules()
            if module not in engine
            for name, value in vars(module).items()
            if type(value) in (int, float)
        ]

    def start(self) -> None:
        """Begin anew: a round or an evaluation starts."""
        self._seen = set()

    @contextmanager
    def over(self, name: str, part: tuple[Any, ...], device: torch.device, call: Callable[[], Any]) -> Iterator[None]:
        """Refuse what vmap may let pass, and a single client without vmap always would.

        Args:
            name: of the method's function that is called inside.
            part: of the round.
            device: of the method.
            call: what is called inside; called once more to find the line of a draw.

        Raises:
            ConfigurationError: a draw from a global generator, which has no key, or another value of a buffer, a
                frozen parameter or a number that is an attribute, which would pass from client to client.
        """
        if (name, *part) in self._seen:
            yield
            return
        self._seen.add((name, *part))
        states = global_states(device)
        before = [(value := held[key], value._version) for _, held, key in self._standing]
        numbers = [attributes.get(key) for _, attributes, key in self._numbers]
        yield
        if global_states(device) != states and all(_draws(call, device) for _ in range(AGAIN)):
            raise ConfigurationError(f"{place(self._method, name, at=drawing_line(call, device))} {UNKEYED}")
        for (where, held, key), (value, version) in zip(self._standing, before, strict=True):
            if held[key] is not value or value._version != version:
                raise ConfigurationError(f"{place(self._method, name)} changes {where!r}: {NOT_OWNED}")
        for (where, attributes, key), number in zip(self._numbers, numbers, strict=True):
            now = attributes.get(key)
            if now is not number and now != number:  # NaN is unequal to itself
                instead = "return it: it stands in client.prepared then"
                if name != "prepare":
                    instead = "make it a personal parameter, or what prepare returns"
                raise ConfigurationError(
                    f"{place(self._method, name)} changes the attribute {where!r}: it would count calls, each of which "
                    f"is of all clients that are stepped together; {instead}"
                )
