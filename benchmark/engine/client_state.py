"""Name the rows that the clients' store keeps between rounds."""

from collections.abc import Collection, Sequence

import torch

from benchmark.contract import ClientMethod, Phase, Stage
from benchmark.engine.cohort import Cohort
from benchmark.engine.roles import Roles, names_under, phases_of
from benchmark.errors import ConfigurationError
from benchmark.federation import Values

#: Prefix of the rows that hold shared parameters as the client's last round left them.
LAST = "last."
PARTICIPATED = "participated"


def initial_rows(method: ClientMethod, roles: Roles) -> Values:
    """Return what every client keeps between rounds, at the start.

    Personal parameters by their name; shared ones that are remembered, or scored after local training, under ``last.``;
    momenta that go on; and, beside any of these, whether the client has taken part.

    Raises:
        ConfigurationError: a personal parameter has a name that something else is kept by.
    """
    remembered = set(roles.remembered) | set(roles.shared if method.evaluate_local else ())
    rows: Values = {LAST + name: method.get_parameter(name) for name in roles.shared if name in remembered}
    for number, phase in enumerate(phases_of(method)[Stage.TRAIN]):
        for name, row in momenta_of(method, phase, number).items():
            rows[row] = torch.zeros_like(method.get_parameter(name))
    if rows or roles.personal:
        rows[PARTICIPATED] = torch.zeros(())
    if taken := [name for name in roles.personal if name in rows]:
        raise ConfigurationError(
            f"the personal parameter {taken[0]} of {type(method).__name__} has the name of something else that clients "
            "keep between rounds; call it something else"
        )
    return {name: method.get_parameter(name) for name in roles.personal} | rows


def trained_rows(roles: Roles, kept: Collection[str]) -> dict[str, str]:
    """Name the rows that hold trained parameters, and by which name these are known to the method."""
    own = {name: name for name in roles.personal} | {LAST + name: name for name in roles.shared}
    return {row: name for row, name in own.items() if row in kept and name in roles.trained}


def own_rows(method: ClientMethod, roles: Roles, kept: Collection[str]) -> list[str]:
    """Name the rows that a round may change and that are each client's own: not a momentum that all clients share."""
    phases = enumerate(phases_of(method)[Stage.TRAIN])
    of_clients = [(number, phase) for number, phase in phases if phase.optimizer_state == "client"]
    momenta = [row for number, phase in of_clients for row in momenta_of(method, phase, number).values()]
    personal = [name for name in roles.personal if name in kept]
    return list(dict.fromkeys([*personal, *trained_rows(roles, kept), *momenta, *({PARTICIPATED} & {*kept})]))


def momenta_of(method: ClientMethod, phase: Phase, number: int) -> dict[str, str]:
    """Name the parameters whose momentum outlives the round, and by which name the store keeps it."""
    if phase.optimizer_state == "fresh":
        return {}
    groups = [group.parameters for group in phase.groups if group.momentum]
    return {name: f"momentum.{number}.{name}" for prefixes in groups for name in names_under(method, prefixes)}


def owners(cohort: Cohort, phase: Phase) -> Sequence[int]:
    """Say whose rows of the store hold the momenta of a cohort: its clients', or the first for all."""
    return cohort.clients if phase.optimizer_state == "client" else (0,)
