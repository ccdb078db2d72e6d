"""What the clients of a round have sent, until the server's rule has made new values of it."""

from collections.abc import Iterator, Mapping

from benchmark.engine.messages import unchanged
from benchmark.engine.ranks import Ranks
from benchmark.engine.reports import Reports
from benchmark.engine.simulation import Simulation
from benchmark.engine.traffic import Traffic
from benchmark.federation import Round, Uploads, Values
from benchmark.server import ServerRule

#: Bytes of all clients' values of some parameters that are put together, and folded, at a time.
TOGETHER = 2**28


class Arrivals:
    """The uploads of a round, in the cohorts that this rank has stepped, then those of all ranks.

    Attributes:
        missing: clients whose losses or values were not finite.
        count: clients that sent something.
    """

    def __init__(self) -> None:
        self.missing: list[int] = []
        self.count = 0
        self._stepped: list[int] = []
        self._sent: list[tuple[tuple[int, ...], Values]] = []
        #: per rank and cohort, the clients that sent something
        self._clients: list[list[tuple[int, ...]]] = []

    def add(self, cohort: tuple[int, ...], clients: tuple[int, ...], sent: Values) -> None:
        """Take what some clients of a cohort have sent, [K', ...] each."""
        self._stepped += cohort
        self._sent.append((clients, sent))
        self.count += len(clients)
        self.missing += sorted(set(cohort) - set(clients))

    def share(self, round: Round, ranks: Ranks, traffic: Traffic, reports: Reports) -> None:
        """Let all ranks know who has sent, what was counted and what was reported; all of them are here."""
        mine = (
            [who for who, _ in self._sent],
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

    def aggregate(self, rule: ServerRule, round: Round, simulation: Simulation) -> Values:
        """Have a rule make new shared values of all ranks' uploads, in host or device memory as they were sent.

        The mean, which takes each parameter by itself, never has more than ``TOGETHER`` bytes of uploads in one place;
        other rules see all of them.
        """
        shared, sizes = simulation.shared(), simulation.holdings.train_sizes
        if not rule.takes_the_mean:
            uploads = self._uploads(None, simulation.ranks, sizes)
            with unchanged(shared, f"{type(rule).__name__}.aggregate"):
                return rule.aggregate(round, shared, uploads)
        new: Values = {}
        for names in self._groups(shared):
            part = {name: shared[name] for name in names}
            uploads = self._uploads(names, simulation.ranks, sizes)
            with unchanged(part, f"{type(rule).__name__}.aggregate"):
                new |= rule.aggregate(round, part, uploads)
        return new

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

    def _uploads(self, names: list[str] | None, ranks: Ranks, sizes: Mapping[int, int]) -> Uploads:
        """Put the uploads of all ranks together, those of some names or of all."""
        mine = {
            f"{number}/{name}": sent[name]
            for number, (_, sent) in enumerate(self._sent)
            for name in (sent if names is None else names)
        }
        arrived: list[tuple[tuple[int, ...], Values]] = []
        for cohorts, values in zip(self._clients, ranks.gather("uploads", mine), strict=True):
            of_cohort: list[Values] = [{} for _ in cohorts]
            for key, value in values.items():
                number, name = key.split("/", 1)
                of_cohort[int(number)][name] = value
            arrived += zip(cohorts, of_cohort, strict=True)
        return Uploads.gathered(arrived, sizes)
