"""The parts of a method that never train, and what the others may not do in training mode."""

from typing import Any, cast

from torch import nn

from benchmark.engine.roles import Roles
from benchmark.errors import ConfigurationError
from benchmark.internals import BATCH_NORMS, DROPOUTS, NORMS_WITH_STATISTICS


def frozen_parts(method: nn.Module, roles: Roles) -> list[nn.Module]:
    """List the outermost modules that have parameters of which none is trained, not even in a copy."""
    trained = {id(method.get_parameter(name)) for name in roles.slots}
    parts: list[nn.Module] = []
    inside: set[int] = set()
    for module in list(method.modules())[1:]:
        held = [id(parameter) for parameter in module.parameters()]
        if held and id(module) not in inside and not trained.intersection(held):
            parts.append(module)
            inside.update(map(id, module.modules()))
    return parts


def check_modes(method: nn.Module, parts: list[nn.Module]) -> None:
    """Refuse what behaves differently in training mode in a way that no client owns, outside the frozen parts.

    What is not known here by its class is noticed in the first step (see ``benchmark.engine.refusals.watch``).

    Raises:
        ConfigurationError: running statistics, or dropout whose draws have no key.
    """
    title = type(method).__name__
    frozen = {id(module) for part in parts for module in part.modules()}
    for name, module in method.named_modules():
        if id(module) in frozen:
            continue
        if isinstance(module, BATCH_NORMS) or (
            isinstance(module, NORMS_WITH_STATISTICS) and module.track_running_stats
        ):
            kind = "batch" if isinstance(module, BATCH_NORMS) else "instance"
            raise ConfigurationError(
                f"{title}: {name} is a trained {kind} normalisation, whose running statistics belong to no client; use "
                "a backbone with group or layer normalisation, or freeze this one"
            )
        if dropped := _dropped(module):
            raise ConfigurationError(
                f"{title}: {name} is {type(module).__name__} of {dropped:g}, whose draws have no key of seed, round, "
                f"client and step; draw a mask in draw_noise and multiply by it and by 1 / (1 - {dropped:g}), or set "
                "it to 0"
            )


def _dropped(module: nn.Module) -> float:
    """Return the part of its input that a dropout module leaves out in training mode; 0 for all others."""
    if isinstance(module, DROPOUTS):
        return float(cast(Any, module).p)
    name = "dropout" if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else "drop_prob"
    part = getattr(module, name, None)
    return part if isinstance(part, float) else 0.0
