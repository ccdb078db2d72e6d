"""Late uploads on a simulated clock: deterministic seconds, whatever machine the simulation runs on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from benchmark.delivery import Delivery, Departure, Effect
from benchmark.errors import ConfigurationError
from benchmark.federation import Facts, Round, Terms, Uploads, Values
from benchmark.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat
from benchmark.seeds import numpy_generator


@dataclass
class Flight:
    """An upload on its way.

    Attributes:
        client: whose.
        arrival: seconds of the simulated clock.
        version: of the server when it began.
        round: whose broadcast it answers.
        weight: its client's number of training images.
        values: per name [...], at the end of its training.
        received: per name [...], what it began with.
        common: names of which all clients had received the same.
    """

    client: int
    arrival: float
    version: int
    round: int
    weight: float
    values: Values
    received: Values
    common: tuple[str, ...]


class VirtualClock(Delivery):
    """Clients take simulated time, and uploads that are late at a round's deadline are waited for, lost or stale.

    A client's round takes ``2 latency + down / bandwidth_down + images * seconds_per_image * speed * jitter + up /
    bandwidth_up`` seconds, of the bytes that it receives and sends and its number of training images; its speed is
    drawn once, log-normally, and its jitter, of mean 1, in each round.

    Under ``buffer`` a late upload joins the first aggregation after its arrival, as the server's present value plus the
    client's update, with its weight times ``(1 + s)^-a``, where s versions were made since it began (FedAsync's
    polynomial, Xie et al., 2019). Its client is busy until then: a round that selects it goes without it. Of values
    that a server sends to each client for itself, a stale upload keeps its own end.

    So ``buffer`` is refused with a rule to which that means nothing (:attr:`ServerRule.takes_stale`).

    Args:
        policy: ``wait`` for all; ``drop`` who is late; ``buffer`` it.
        deadline: seconds of a round; none with ``wait``.
        seconds_per_image: of local training at speed 1.
        speeds: one a client; drawn by default.
        speed_spread: standard deviation of the logarithm of drawn speeds.
        jitter: standard deviation of the logarithm of a round's factor.
        latency: seconds of a message's way.
        bandwidth_down: bytes a second; None for any number.
        bandwidth_up: bytes a second.
        staleness: a.
        max_staleness: older uploads are discarded.
        inner: what a message goes through before.
    """

    def __init__(
        self,
        policy: Literal["wait", "drop", "buffer"] = "wait",
        deadline: PositiveFloat | None = None,
        seconds_per_image: NonNegativeFloat = 0.01,
        speeds: Sequence[PositiveFloat] | None = None,
        speed_spread: NonNegativeFloat = 0.5,
        jitter: NonNegativeFloat = 0.0,
        latency: NonNegativeFloat = 0.0,
        bandwidth_down: PositiveFloat | None = None,
        bandwidth_up: PositiveFloat | None = None,
        staleness: NonNegativeFloat = 0.5,
        max_staleness: NonNegativeInt = 10,
        inner: Delivery | None = None,
    ) -> None:
        super().__init__(inner)
        if policy == "wait" and deadline is not None:
            raise ConfigurationError("VirtualClock: policy wait has no deadline; leave it out, or take drop or buffer")
        if policy == "drop" and deadline is None:
            raise ConfigurationError("VirtualClock: policy drop needs a deadline, in seconds of the simulated clock")
        self.policy, self.deadline = policy, math.inf if deadline is None else deadline
        self.seconds_per_image, self.speeds = seconds_per_image, speeds
        self.speed_spread, self.jitter = speed_spread, jitter
        self.latency, self.bandwidth_down, self.bandwidth_up = latency, bandwidth_down, bandwidth_up
        self.staleness, self.max_staleness = staleness, max_staleness

    def start(self, terms: Terms) -> None:
        """Check the speeds, and begin at 0 with no upload on its way.

        Raises:
            ConfigurationError: there is not one for each client.
        """
        super().start(terms)
        self.now, self.version = 0.0, 0
        self.flights: list[Flight] = []
        self._facts: dict[str, float] = {}
        if self.speeds is not None and len(self.speeds) != terms.num_clients:
            raise ConfigurationError(f"VirtualClock: {len(self.speeds)} speeds for {terms.num_clients} clients")

    @property
    def each_by_itself(self) -> bool:
        """Return whether no upload is stale: it would count for a round in which its client did not begin."""
        return self.policy != "buffer"

    @property
    def effects(self) -> frozenset[Effect]:
        """Return whether uploads may be late ones."""
        return frozenset({"late"} if self.policy == "buffer" else ())

    def depart(self, round: Round, clients: tuple[int, ...]) -> Departure:
        """Leave out clients that are still busy."""
        busy = {flight.client for flight in self.flights}
        return super().depart(round, tuple(client for client in clients if client not in busy))

    def seconds(self, round: Round, client: int, images: float, down: int, up: int) -> float:
        """Return how long a client's round takes, of so many images and bytes."""
        seed = self.terms.seed
        if self.speeds is not None:
            speed = self.speeds[client]
        else:
            speed = math.exp(self.speed_spread * numpy_generator(seed, "speed", client).standard_normal())
        drawn = numpy_generator(seed, "jitter", round.number, client).standard_normal()
        jitter = math.exp(self.jitter * drawn - self.jitter**2 / 2)
        travel = down / (self.bandwidth_down or math.inf) + up / (self.bandwidth_up or math.inf)
        return float(2 * self.latency + travel + images * self.seconds_per_image * speed * jitter)

    def arrive(self, round: Round, sent: Uploads) -> Uploads:
        """Move the clock to the round's end; return what has arrived by then."""
        common = sent.common & sent.now.keys()  # of the round, whatever an inner delivery makes of it
        sent = replace(super().arrive(round, sent), common=common)
        compressed = self.upload_size({n: rows[:1] for n, rows in sent.values.items()}, frozenset(sent.received))
        down, up = _bytes_of(sent.received), compressed[0] if compressed else _bytes_of(sent.values)
        arrivals = [
            self.now + self.seconds(round, client, weight, down, up)
            for client, weight in zip(sent.clients, sent.weights.tolist(), strict=True)
        ]
        end = self._end(round, arrivals)
        on_time = [place for place, arrival in enumerate(arrivals) if arrival <= end]
        late = [place for place, arrival in enumerate(arrivals) if arrival > end]
        self.now = end
        here = sent if not late else sent.of(on_time)
        stale: list[Flight] = []
        if self.policy == "buffer":
            landed = [flight for flight in self.flights if flight.arrival <= end]
            stale = [flight for flight in landed if self.version - flight.version <= self.max_staleness]
            self.flights = [flight for flight in self.flights if flight.arrival > end]
            self.flights += [self._flight(round, sent, place, arrivals[place]) for place in late]
            self._facts = {"stale": float(len(stale)), "discarded": float(len(landed) - len(stale))}
            here = self._with(here, stale) if stale else here
        self._facts |= {"clock": self.now, "late": float(len(late))}
        return here

    def close(self, round: Round, void: bool, reverted: frozenset[int]) -> None:
        """Count a version of the server, unless the round was void."""
        super().close(round, void, reverted)
        self.version += not void

    def _end(self, round: Round, arrivals: list[float]) -> float:
        """Return when the round closes: its own clients are there, or its time is up, also where all were lost."""
        if not arrivals:
            if {*round.clients} - {flight.client for flight in self.flights} and self.deadline < math.inf:
                return self.now + self.deadline
            return max(self.now, min((flight.arrival for flight in self.flights), default=self.now))
        return min(self.now + self.deadline, max(arrivals))

    def _flight(self, round: Round, sent: Uploads, place: int, arrival: float) -> Flight:
        return Flight(
            sent.clients[place],
            arrival,
            self.version,
            round.number,
            float(sent.weights[place]),
            {name: rows[place].detach().clone() for name, rows in sent.values.items()},
            {name: rows[place].detach().clone() for name, rows in sent.received.items()},
            tuple(name for name in sent.received if name in sent.common),
        )

    def _with(self, here: Uploads, stale: list[Flight]) -> Uploads:
        """Put stale uploads among fresh ones, clients ascending.

        Raises:
            ConfigurationError: they hold other values.
        """
        at = next((value.device for value in (*here.now.values(), *here.values.values())), torch.device("cpu"))
        clients = [*here.clients, *(flight.client for flight in stale)]
        order = torch.tensor(sorted(range(len(clients)), key=clients.__getitem__))
        names = (here if here.clients else stale[0]).values.keys()
        values: dict[str, list[Tensor]] = {name: [*here.values.get(name, ())] for name in names}
        received: dict[str, list[Tensor]] = {name: [*rows] for name, rows in here.received.items() if len(rows)}
        for flight in stale:
            if flight.values.keys() != names:
                raise ConfigurationError(
                    f"{self.title}: a late upload of round {flight.round} holds {sorted(flight.values)!r:.200}, others "
                    f"hold {sorted(names)!r:.200}; with a method that sends other values in other rounds take policy "
                    "wait or drop"
                )
            for name, value in flight.values.items():
                end, before = value.to(at), flight.received.get(name)  # after a resume they are on the CPU
                if before is None:
                    values[name].append(end)
                    continue
                before = before.to(at)
                began = here.now[name] if name in flight.common else before
                values[name].append(began + (end - before) if name in flight.common else end)
                received.setdefault(name, []).append(began)
        late = [((1 + self.version - flight.version) ** -self.staleness, flight.weight) for flight in stale]
        factors, weights = torch.tensor(late, dtype=torch.float64).reshape(-1, 2).unbind(1)
        fresh = here.started if len(here.started) else torch.full((len(here.clients),), 0)
        return Uploads(
            tuple(sorted(clients)),
            {name: torch.stack(rows)[order] for name, rows in values.items()},
            torch.cat([here.weights, factors * weights])[order],
            {name: torch.stack(rows)[order] for name, rows in received.items()},
            torch.cat([fresh, torch.tensor([flight.round for flight in stale])])[order],
            here.misfits,
            here.now,
            here.common,
            torch.cat([here.equal_weights, factors])[order],
        )

    def report(self, round: Round) -> Facts:
        """Report the clock, and how many uploads were late, stale and discarded."""
        return super().report(round) | self._facts

    def get_extra_state(self) -> dict[str, Any]:
        """Return the clock, the server's version and the uploads on their way."""
        return {"now": self.now, "version": self.version, "flights": [vars(flight).copy() for flight in self.flights]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take what ``get_extra_state`` gave."""
        self.now, self.version = state["now"], state["version"]
        self.flights = [Flight(**flight | {"common": tuple(flight["common"])}) for flight in state["flights"]]


def _bytes_of(values: Values) -> int:
    """Return the bytes of one client's rows."""
    return sum(rows[:1].numel() * rows.element_size() if len(rows) else 0 for rows in values.values())
