"""Uploads that are broken on purpose, to see what a server bears."""

from collections.abc import Sequence
from typing import Literal

import torch

from benchmark.delivery import Delivery, Effect
from benchmark.errors import ConfigurationError
from benchmark.federation import Facts, Round, Terms, Uploads, Values
from benchmark.ranges import NonNegativeInt, PositiveInt, UnitInterval
from benchmark.seeds import numpy_generator

#: By how much ``huge`` multiplies an update.
HUGE = 1e8


class InjectedFaults(Delivery):
    """Some uploads arrive broken.

    Args:
        kind: ``nan`` and ``inf``: one entry of the first tensor. ``huge``: the update times 1e8. ``repeat_last``: the
            update that the client has sent last, whichever that was; the first one as it is. ``wrong_shape``,
            ``missing_tensor``, ``extra_tensor``, ``wrong_dtype``: no message that the server could read.
        clients: whose uploads; all, where a probability is given.
        probability: of each upload of these clients.
        rounds: in which; all by default.
        inner: what a message goes through before.
    """

    def __init__(
        self,
        kind: Literal[
            "nan", "inf", "huge", "repeat_last", "wrong_shape", "missing_tensor", "extra_tensor", "wrong_dtype"
        ] = "nan",
        clients: Sequence[NonNegativeInt] | None = None,
        probability: UnitInterval = 1.0,
        rounds: Sequence[PositiveInt] | None = None,
        inner: Delivery | None = None,
    ) -> None:
        super().__init__(inner)
        if clients is None and probability == 1:
            raise ConfigurationError("InjectedFaults: give clients, a probability below 1, or both")
        self.kind, self.clients, self.probability, self.rounds = kind, clients, probability, rounds

    def start(self, terms: Terms) -> None:
        """Check the clients, and begin with no upload seen.

        Raises:
            ConfigurationError: one of them does not train, so that nothing of it could be broken.
        """
        super().start(terms)
        if strangers := sorted({*(self.clients or ())} - {*terms.training_clients}):
            raise ConfigurationError(
                f"InjectedFaults: clients names client {strangers[0]}, which does not train; expected some of the "
                f"{len(terms.training_clients)} clients that train"
            )
        self._last: dict[int, Values] = {}
        self._count = 0

    @property
    def each_by_itself(self) -> bool:
        """Return True."""
        return True

    @property
    def effects(self) -> frozenset[Effect]:
        """Return whether updates are sent again."""
        return frozenset({"carried over"} if self.kind == "repeat_last" else ())

    def get_extra_state(self) -> dict[int, Values]:
        """Return the last updates of those who may repeat them."""
        return self._last

    def set_extra_state(self, state: dict[int, Values]) -> None:
        """Take what ``get_extra_state`` gave."""
        self._last = dict(state)

    def _breaks(self, round: Round, client: int) -> bool:
        if self.rounds is not None and round.number not in self.rounds:
            return False
        if self.clients is not None and client not in self.clients:
            return False
        return bool(numpy_generator(round.seed, "fault", self.kind, round.number, client).random() < self.probability)

    def arrive(self, round: Round, sent: Uploads) -> Uploads:
        """Break uploads."""
        sent = super().arrive(round, sent)
        places = [place for place, client in enumerate(sent.clients) if self._breaks(round, client)]
        self._count = len(places)
        if self.kind == "repeat_last":
            return self._repeated(round, sent, places)
        if not places:
            return sent
        if self.kind in ("nan", "inf", "huge"):
            return sent.with_values(self._spoiled(sent, places))
        misfits = {sent.clients[place]: self._unreadable(sent, place) for place in places}
        return sent.without(places, misfits)

    def _spoiled(self, sent: Uploads, places: list[int]) -> Values:
        values = dict(sent.values)
        if self.kind == "huge":
            for name, before in sent.received.items():
                values[name] = values[name].clone()
                values[name][places] = before[places] + HUGE * (values[name][places] - before[places])
            return values
        first = next(iter(sent.values))
        values[first] = values[first].clone()
        values[first].view(len(sent.clients), -1)[places, 0] = torch.nan if self.kind == "nan" else torch.inf
        return values

    def _unreadable(self, sent: Uploads, place: int) -> Values:
        """Return one client's message, which no row of the uploads can be."""
        message = {name: rows[place] for name, rows in sent.values.items()}
        first = next(iter(sent.values))
        if self.kind == "missing_tensor":
            del message[first]
        elif self.kind == "extra_tensor":
            message["unasked"] = torch.zeros(1)
        elif self.kind == "wrong_dtype":
            message[first] = message[first].to(torch.int32)
        else:
            message[first] = message[first].flatten()[None].repeat(2, 1)
        return message

    def _repeated(self, round: Round, sent: Uploads, places: list[int]) -> Uploads:
        """Resend the previous updates of clients at these places, and note what each client has sent."""
        if self.rounds is not None and round.number > max(self.rounds, default=0):
            self._last = {}  # nobody repeats any more
            return sent
        values = {name: rows.clone() if name in sent.received else rows for name, rows in sent.values.items()}
        for place, client in enumerate(sent.clients):
            if self.clients is not None and client not in self.clients:
                continue
            if place in places and client in self._last:
                for name, moved in self._last[client].items():
                    values[name][place] = sent.received[name][place] + moved.to(values[name])
            else:
                self._last[client] = {
                    name: (sent.values[name][place] - before[place]).cpu() for name, before in sent.received.items()
                }
        return sent.with_values(values)

    def report(self, round: Round) -> Facts:
        """Report how many uploads were broken."""
        return super().report(round) | {f"broken_{self.kind}": float(self._count)}
