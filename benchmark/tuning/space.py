"""The search space of a method: options and the values to try, from its configuration file.

They stand there under ``search``, which is not an option of a run::

    search:
      model.init_args.training.lr: [0.01, 0.05, 0.1, 0.25]
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.config.files import read_layers
from benchmark.errors import ConfigurationError


@dataclass(frozen=True)
class Choice:
    """An option and what is tried of it.

    Attributes:
        option: by its dotted name, as on the command line.
        values: each once; numbers rise.
        own: which of them the row has untuned, by position.
    """

    option: str
    values: tuple[Any, ...]
    own: int

    @property
    def ordered(self) -> bool:
        """Return whether all values are numbers, so that neighbours are similar."""
        return all(map(_is_number, self.values))

    def argument(self, position: int) -> str:
        """Return the command-line argument that gives a run the value at a position."""
        return f"--{self.option}={json.dumps(self.values[position], default=str)}"  # YAML knows dates


def read_space(configs: Sequence[str], row: str) -> dict[str, list[Any]]:
    """The search space in the last of a run's configuration files that has one, by option.

    Args:
        configs: files, as for :func:`benchmark.config.files.read_layers`.
        row: what to call the run in errors.

    Raises:
        ConfigurationError: no file has a search space, or it is one of another form.
    """
    layers = read_layers([Path(config) for config in configs])
    found = next((layer for layer in reversed(layers) if "search" in layer.given), None)
    if found is None:
        raise ConfigurationError(
            f"row {row} has no search space: none of {', '.join(configs)} has search; write into the method's file "
            "search: {model.init_args.training.lr: [0.01, 0.1]}, with an option and its values for each that is tried"
        )
    return checked_space(found.given["search"], str(found.path))


def checked_space(space: Any, where: str) -> dict[str, list[Any]]:
    """Return a search space, by option.

    Args:
        space: as it was read.
        where: what to call its place in errors.

    Raises:
        ConfigurationError: it is one of another form.
    """
    if not isinstance(space, dict):
        raise ConfigurationError(f"{where}: search: expected options and their values, got {str(space)[:80]}")
    for option, values in space.items():
        if not isinstance(values, list) or not values or len(set(map(str, values))) < len(values):
            raise ConfigurationError(
                f"{where}: search: {option}: expected a list of different values, got {str(values)[:80]}"
            )
    return {str(option): values for option, values in space.items()}


def with_own_values(space: Mapping[str, Sequence[Any]], config: Mapping[str, Any], row: str) -> tuple[Choice, ...]:
    """The choices of a space, to which the row's own values are added where they are not among them.

    Args:
        space: from :func:`read_space`.
        config: the row's resolved configuration.
        row: what to call it in errors.

    Raises:
        ConfigurationError: the configuration has no such option.
    """
    choices = []
    for option, values in space.items():
        own: Any = config
        for key in option.split("."):
            if not isinstance(own, Mapping) or key not in own:
                raise ConfigurationError(
                    f"row {row}: its search space has the option {option}, and its configuration has none of this name"
                )
            own = own[key]
        every = [*values] if own in values else [own, *values]
        if all(map(_is_number, every)):
            every.sort()
        choices.append(Choice(option, tuple(every), every.index(own)))
    return tuple(choices)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
