"""Collect what the clients of a round send, and have the server's rule make new values of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchmark.delivery import Delivery
from benchmark.engine.communication import Traffic
from benchmark.engine.ranks.ranks import Ranks
from benchmark.engine.refusals.payload_checks import check_arrived, unchanged
from benchmark.engine.reports import Reports
from benchmark.engine.roles import overrides
from benchmark.engine.simulation import Simulation
from benchmark.federation import Parcel, Round, Uploads, Values
from benchmark.server import ServerRule

#: Bytes of all clients' values of some parameters that are put together, and folded, at a time.
TOGETHER = 2**28


class Arrivals:
    """The uploads of a round, in the cohorts that this rank has stepped, then those of all ranks.

    Attributes:
        missing: clients whose losses or values were not finite.
        count: clients whose upload has left.
        sent: what has left, by cohort of this rank.
        before: what the clients of each of its cohorts kept before the round, where some may go back to it.
        void: whether nothing arrived, so that nothing was made.
    """

    def __init__(self) -> None:
        self.missing: list[int] = []
        self.count = 0
        self.void = False
        self._stepped: list[int] = []
        self.sent: list[Parcel] = []
        self.before: list[Parcel] = []
        #: per rank and cohort, the clients that sent something
        self._clients: list[list[tuple[int, ...]]] = []

    def add(self, cohort: tuple[int, ...], parcel: Parcel, leaving: Sequence[int]) -> Parcel:
        """Take what a cohort has to send; return what leaves, of the clients in ``leaving``."""
        self._stepped += cohort
        self.missing += sorted(set(cohort) - set(parcel.clients))
        left = parcel.of(leaving)
        self.sent.append(left)
        self.count += len(left.clients)
        return left

    def share(self, round: Round, ranks: Ranks, traffic: Traffic, reports: Reports) -> None:
        """Let all ranks know who has sent, what was counted and what was reported; all of them are here."""
        mine = (
            [parcel.clients for parcel in self.sent],
            self._stepped,
            self.missing,
            traffic.rounds[-1],
            reports.of(self._stepped),
        )
        everybody = ranks.everybody(f"the end of round {round.number}", mine)
        self._clients = [clients for clients, *_ in everybody]
        self.count = sum(len(clients) for cohorts in self._clients for clients in cohorts)
        self.missing = sorted(client for _, _, missing, _, _ in everybody for client in missing)
        traffic.rounds[-1] = [sum(column) for column in zip(*(row for *_, row, _ in everybody), strict=True)]
        for rank, (_, stepped, _, _, numbers) in enumerate(everybody):
            if rank != ranks.rank:
                reports.take_in(stepped, numbers)

    def aggregate(self, rule: ServerRule, delivery: Delivery, round: Round, simulation: Simulation) -> Values:
        """Have a rule make new shared values of all ranks' uploads, in host or device memory as they were sent.

        The mean, which takes each parameter by itself, never has more than ``TOGETHER`` bytes of uploads in one place;
        other rules see all of them, as the delivery hands them over.

        Returns:
            New values; none where nothing has arrived and so the round is void.
        """
        shared, sizes = simulation.shared(), simulation.holdings.train_sizes
        if self.count and rule.takes_the_mean and delivery.is_plain:
            new: Values = {}
            for names in self._groups(shared):
                part = {name: shared[name] for name in names}
                uploads = self._uploads(names, simulation.ranks, sizes, round.number)
                with unchanged(part, f"{rule.title}.aggregate"):
                    new |= rule.aggregate(round, part, uploads)
            return new
        if self.count:
            uploads = self._uploads(None, simulation.ranks, sizes, round.number)
        else:
            sent = () if overrides(simulation.method, "message") else simulation.uploaded
            nothing = {name: simulation.parameters[name].detach() for name in sent}
            uploads = Uploads.nobody(nothing)
        arrived = delivery.arrive(round, replace(uploads, now=shared))
        check_arrived(arrived, delivery, uploads, round)
        self.void = not arrived.clients and rule.empty_rounds == "void"
        if self.void:
            return {}
        with unchanged(shared, f"{rule.title}.aggregate"):
            return rule.aggregate(round, shared, arrived)

    def _groups(self, shared: Values) -> Iterator[list[str]]:
        """Cut names into runs of which all clients' values take ``TOGETHER`` bytes at most, or of one name."""
        run: list[str] = []
        room = TOGETHER
        for name, value in shared.items():
            need = value.numel() * value.element_size() * self.count
            if run and need > room:
                yield run
                run, room = [], TOGETHER
            run, room = [*run, name], room - need
        if run or not shared:  # a round without shared parameters has its uploads too
            yield run

    def _uploads(self, names: Sequence[str] | None, ranks: Ranks, sizes: Mapping[int, int], number: int) -> Uploads:
        """Put the uploads of all ranks together: of some names, or all of them with what their clients had received."""
        mine: Values = {}
        for place, parcel in enumerate(self.sent):
            chosen = parcel.values if names is None else names
            mine |= {f"{place}/{name}": parcel.values[name] for name in chosen}
            for name, rows in parcel.received.items() if names is None else ():
                mine[f"{'common' if name in parcel.common else 'received'} {place}/{name}"] = (
                    rows[:1] if name in parcel.common else rows
                )
        parcels: list[Parcel] = []
        for cohorts, values in zip(self._clients, ranks.gather("uploads", mine), strict=True):
            of_cohort = [Parcel(clients, {}, {}, {}) for clients in cohorts]
            for key, value in values.items():
                head, name = key.split("/", 1)
                kind, _, number_of = head.rpartition(" ")
                place = int(number_of)
                parcel = of_cohort[place]
                if not kind:
                    parcel.values[name] = value
                    continue
                parcel.received[name] = value.expand(len(parcel.clients), *value.shape[1:])
                if kind == "common":
                    of_cohort[place] = parcel._replace(common=parcel.common | {name})
            parcels += of_cohort
        return Uploads.gathered([parcel for parcel in parcels if parcel.clients], sizes, number)
