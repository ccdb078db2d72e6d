"""Refuse methods and data for which local training could not hide single images, each with its reason."""

from functools import cached_property

import numpy as np

from benchmark.contract import ClientMethod
from benchmark.engine.roles import Roles
from benchmark.errors import ConfigurationError
from benchmark.federation import Federation

#: What a class can have of its own that may read images; a nested class counts, too.
KINDS = (property, cached_property, staticmethod, classmethod)
#: Functions that a method may have of its own without saying again that it is ``per_example``.
FREE = frozenset({"__init__", "finetune_phases", "make_server"})


def check_private(method: ClientMethod, roles: Roles, federation: Federation) -> None:
    """Refuse a method or data that the account of record-level privacy would not hold for.

    Raises:
        ConfigurationError: it does not.
    """
    if why := _refusal(method, roles) or _of_data(federation):
        raise ConfigurationError(f"data.record_privacy is not for {type(method).__name__}: {why}")


def _refusal(method: ClientMethod, roles: Roles) -> str:
    if roles.reported:
        return f"its clients upload {', '.join(roles.reported)}, made of their images, which no noise covers"
    if not method.per_example:
        return (
            "it does not say that its loss is a mean over single images, so that a clipped gradient of each would be "
            "another loss (per_example)"
        )
    phases = method.local_phases()
    if any(phase.first_round > 1 or phase.last_round is not None or phase.every > 1 for phase in phases):
        return "its phases differ by round, and the account takes all rounds of a client alike"
    for kind in type(method).__mro__:
        if "per_example" in vars(kind):
            break
        for name, value in vars(kind).items():
            if (callable(value) or isinstance(value, KINDS)) and name not in FREE:
                return (
                    f"{kind.__name__} has a {name} of its own, and its base says per_example; say it in "
                    f"{kind.__name__} if it still holds"
                )
    return ""


def _of_data(federation: Federation) -> str:
    terms, rows = federation.terms, federation.holdings.train_rows
    if terms.drop_last:
        return "data.drop_last leaves out images, which the account does not know; set it to false"
    held = np.concatenate([rows[client] for client in terms.training_clients])
    if len(np.unique(held)) < len(held):
        return "clients train on the same images, and each account is of images that one client alone has"
    return ""
