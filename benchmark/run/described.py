"""A run's objects as the configuration that makes them again: what their constructors were given, and no more."""

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from pydoc import locate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmark.config.choices import LINKED
from benchmark.errors import ConfigurationError
from benchmark.ranges import arguments_of
from datamodules.federated import FederatedDataModule

if TYPE_CHECKING:
    from benchmark.delivery import Delivery
    from benchmark.method import FederatedMethod
    from benchmark.server import ServerRule

INSTEAD = "give fit no run_dir, or make the run from a configuration file"


def described(
    method: "FederatedMethod",
    data: FederatedDataModule,
    server: "ServerRule | None" = None,
    delivery: "Delivery | None" = None,
) -> dict[str, Any]:
    """Return the configuration of a run of these objects, without the Trainer's settings.

    Args:
        method: as its constructor made it.
        data: the same; its seed is the run's.
        server: instead of the method's own.
        delivery: between clients and server.

    Raises:
        ConfigurationError: an object cannot be described; names it and what to do.
    """
    if type(data) is not FederatedDataModule:
        raise ConfigurationError(
            f"fit: data: {type(data).__name__} derives from FederatedDataModule, which configurations cannot name; "
            f"{INSTEAD}"
        )
    model = _value(method, "method")
    of_data = _value(data, "data")["init_args"]
    seed = of_data.pop("seed", 0)
    for name in LINKED:
        model["init_args"].pop(name, None)  # the data say it
    found = {"seed_everything": seed, "model": model, "data": of_data}
    given = {"server": server, "delivery": delivery}
    return found | {name: _value(value, name) for name, value in given.items() if value is not None}


def check_made_again(given: "FederatedMethod", made: "FederatedMethod") -> None:
    """Refuse a method that was changed after its constructor had made it.

    Args:
        given: the method.
        made: of the configuration that describes it.

    Raises:
        ConfigurationError: they have not the same values; names the first that differs.
    """
    ours, theirs = given.state_dict(), made.state_dict()
    names = [*ours, *(name for name in theirs if name not in ours)]
    alike = (name in ours and name in theirs and torch.equal(ours[name].cpu(), theirs[name].cpu()) for name in names)
    differs = next((name for name, same in zip(names, alike, strict=True) if not same), None)
    if differs is not None:
        raise ConfigurationError(
            f"fit: run_dir: {differs} of {type(given).__name__} is not what its constructor makes after "
            "lightning.seed_everything; make the method right after it and leave its values as they are, or give fit "
            "no run_dir"
        )


def _value(value: Any, place: str) -> Any:
    """Return a value as a configuration file holds it."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_value(each, f"{place}[{number}]") for number, each in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _value(each, f"{place}.{key}") for key, each in value.items()}
    if inspect.isfunction(value) or isinstance(value, type):
        return _path(value, place)
    if dataclasses.is_dataclass(value) and all(map(dataclasses.is_dataclass, inspect.getmro(type(value))[:-1])):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {name: _value(getattr(value, name), f"{place}.{name}") for name in fields}
    given = arguments_of(value)
    if given is None:
        raise ConfigurationError(
            f"fit: run_dir: nothing says how {place} ({type(value).__name__}) was made: it is a copy, or its class "
            f"does not derive from benchmark.ranges.Checked; make it by the constructor of such a class, or {INSTEAD}"
        )
    return {
        "class_path": _path(type(value), place),
        "init_args": {name: _value(each, f"{place}.{name}") for name, each in given.items()},
    }


def _path(named: Any, place: str) -> str:
    """Return the dotted path by which another process finds a class or a function."""
    path = f"{named.__module__}.{named.__qualname__}"
    if named.__module__ == "__main__":
        raise ConfigurationError(
            f"fit: run_dir: {place}: {named.__qualname__} is defined in the script or notebook that runs, where nobody "
            f"else finds it; put it into a module of its own and import it from there, or {INSTEAD}"
        )
    if locate(path) is not named:
        raise ConfigurationError(
            f"fit: run_dir: {place}: {path} cannot be imported by this name, as it is no top-level name of a module; "
            f"define it at the top of one, or {INSTEAD}"
        )
    return path
