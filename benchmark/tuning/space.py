"""What is tried of a method: options and their values, from the file in ``configs/spaces`` that has its name.

Its lines are those of a W&B sweep's ``parameters``::

    model.init_args.training.lr: {values: [0.01, 0.05, 0.1, 0.25]}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.config_files import read_layers
from benchmark.errors import ConfigurationError
from benchmark.shipped import shipped
from benchmark.yaml_files import read_yaml


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
        """Whether neighbours are alike: the values are numbers."""
        return all(map(_is_number, self.values))

    def argument(self, position: int) -> str:
        """What gives a run the value at a position."""
        return f"--{self.option}={json.dumps(self.values[position])}"


def read_space(configs: Sequence[str], row: str) -> dict[str, list[Any]]:
    """The search space of the method that a run's configuration files name, by option.

    Args:
        configs: files, as for :func:`benchmark.config_files.read_layers`.
        row: what to call the run in errors.

    Raises:
        ConfigurationError: no file names a method, there is no space for it, or one of another form.
    """
    method = next((layer.method for layer in reversed(read_layers([Path(c) for c in configs])) if layer.method), None)
    path = shipped(f"configs/spaces/{method}.yaml")
    if method is None or not path.is_file():
        missing = "no file gives its name as method" if method is None else f"there is no {path}"
        raise ConfigurationError(
            f"row {row} has no search space: {missing}; write configs/spaces/<method>.yaml with lines such as "
            "model.init_args.training.lr: {values: [0.01, 0.1]}, and method: <method> into the method's file"
        )
    space = read_yaml(path)
    if not isinstance(space, dict):
        raise ConfigurationError(f"{path}: expected options and their values, got {str(space)[:80]}")
    for option, entry in space.items():
        values = entry.get("values") if isinstance(entry, dict) and set(entry) == {"values"} else None
        if not isinstance(values, list) or not values or len(set(map(str, values))) < len(values):
            raise ConfigurationError(
                f"{path}: {option}: expected {{values: [...]}} with different values, got {str(entry)[:80]}"
            )
    return {str(option): entry["values"] for option, entry in space.items()}


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
