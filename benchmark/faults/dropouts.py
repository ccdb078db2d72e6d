"""Clients that drop out of a round, before they are reached, before they train or before they send."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from benchmark.delivery import Delivery, Departure
from benchmark.errors import ConfigurationError
from benchmark.federation import Facts, Round, Terms
from benchmark.ranges import UnitInterval
from benchmark.seeds import derived_seed, keyed_uniform


class Dropouts(Delivery):
    """Selected clients drop out of a round: with a probability each, or as a table says.

    Args:
        probability: of each client in each round; drawn by seed, round and client, whatever the other participants.
        table: per round the clients that drop out, instead of a probability.
        point: ``before_download``: nothing happens on the client. ``after_download``: it has received, and does not
            train. ``after_training``: it has trained and keeps what is its own; its message is lost.
        inner: what a message goes through before.
    """

    def __init__(
        self,
        probability: UnitInterval = 0.0,
        table: Mapping[int, list[int]] | None = None,
        point: Literal["before_download", "after_download", "after_training"] = "after_training",
        inner: Delivery | None = None,
    ) -> None:
        super().__init__(inner)
        if table is not None and probability:
            raise ConfigurationError("Dropouts: give either a probability or a table")
        self.probability, self.table, self.point = probability, table, point
        self._lost = 0

    @property
    def each_by_itself(self) -> bool:
        """Return True: draws and table know no uploads."""
        return True

    def start(self, terms: Terms) -> None:
        """Check the table.

        Raises:
            ConfigurationError: it names a round below 1, or a client that there is not.
        """
        super().start(terms)
        for number, clients in (self.table or {}).items():
            strangers = sorted({*clients} - {*terms.training_clients})
            if number < 1 or strangers:
                said = f"client {strangers[0]}, which does not train" if strangers else f"round {number}"
                raise ConfigurationError(f"Dropouts: table names {said}; expected rounds from 1 and clients that train")

    def depart(self, round: Round, clients: tuple[int, ...]) -> Departure:
        """Take out who drops out."""
        made = super().depart(round, clients)
        staying = set(clients) - self._dropping_out(round, clients)
        cut = {"before_download": 0, "after_download": 1, "after_training": 2}[self.point]
        before = (made.reached, made.trained, made.sent)
        self._lost = sum(client not in staying for client in before[cut])
        after = {
            name: tuple(client for client in of if client in staying)
            for name, of in list(zip(("reached", "trained", "sent"), before, strict=True))[cut:]
        }
        return replace(made, **after)

    def _dropping_out(self, round: Round, clients: tuple[int, ...]) -> set[int]:
        if self.table is not None:
            return set(self.table.get(round.number, ()))
        drawn = keyed_uniform(derived_seed(round.seed, "drop", round.number), np.array(clients))
        return {client for client, at in zip(clients, drawn.tolist(), strict=True) if at < self.probability}

    def report(self, round: Round) -> Facts:
        """Report how many have dropped out."""
        return super().report(round) | {"dropped_out": float(self._lost)}
