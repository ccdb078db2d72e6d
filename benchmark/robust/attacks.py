"""Attacks as a delivery: some clients train like all others, and send something else."""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmark.delivery import Delivery
from benchmark.errors import ConfigurationError
from benchmark.federation import Facts, Round, Terms, Uploads
from benchmark.hostile import hostile_clients
from benchmark.ranges import FewOrNone, PositiveFloat, UnitInterval
from benchmark.robust.byzfl import COUNTING, Aggregator, Attack, PreAggregator, attack, byzfl, rows_after
from benchmark.seeds import derived_seed


class Byzantine(Delivery):
    """Some clients are hostile, know what the honest ones of a round send, and send what an attack makes of it.

    The hostile clients are drawn once, by the seed. All of a round send the received values plus one vector, of all
    tensors that the server has sent; what a client uploads of its own goes as it is. Where no honest client has sent
    anything, that vector is zero; so in a round with too few uploads for the aggregator that ``optimal_...`` knows.
    Attacks are ByzFL's, but ``nan``, ``inf``, ``huge`` and ``zero``. With ``none`` the same clients are drawn and send
    what they have trained: a run to compare attacks with, by the others' accuracy.

    Args:
        attack: what they send.
        fraction: beta; ``floor(beta N)`` clients that train are hostile.
        strength: tau of ``ipm`` and ``alie``, sigma of ``gaussian``; the papers' by default.
        against: the aggregator that ``optimal_...`` attacks know.
        pre: its pre-aggregators.
        tolerated: the hostile clients that it bears, however many there are.
        inner: what a message goes through before.
    """

    def __init__(
        self,
        attack: Attack = "sign_flipping",
        fraction: UnitInterval = 0.2,
        strength: PositiveFloat | None = None,
        against: Aggregator = "average",
        pre: Sequence[PreAggregator] = (),
        tolerated: FewOrNone = 1,
        inner: Delivery | None = None,
    ) -> None:
        super().__init__(inner)
        if strength is not None and attack not in ("ipm", "alie", "gaussian"):
            raise ConfigurationError(f"Byzantine: {attack} has no strength; leave it out")
        self.attack, self.fraction, self.strength = attack, fraction, strength
        self.against, self.pre, self.tolerated = against, tuple(pre), tolerated
        self.hostile: tuple[int, ...] = ()
        self._count = 0

    def start(self, terms: Terms) -> None:
        """Draw the hostile clients.

        Raises:
            ConfigurationError: a round has too few clients for the aggregator that is attacked.
        """
        super().start(terms)
        if self.attack.startswith("optimal_") and not self._bears(terms.participants):
            raise ConfigurationError(
                f"Byzantine: {self.against} with tolerated={self.tolerated} needs more than {2 * self.tolerated} rows, "
                f"and of {terms.participants} clients in a round pre={[*self.pre]} leaves "
                f"{rows_after(self.pre, terms.participants)}; set tolerated as the rule that is attacked has it"
            )
        if self.attack not in ("none", "nan", "inf", "huge", "zero"):
            byzfl()
        self.hostile = hostile_clients(terms.seed, terms.training_clients, self.fraction)

    def _bears(self, rows: int) -> bool:
        """Return whether the aggregator that is attacked can be asked, of so many rows."""
        return not COUNTING & {self.against, *self.pre} or 2 * self.tolerated < rows_after(self.pre, rows)

    @property
    def attackers(self) -> frozenset[int]:
        """Return the hostile clients."""
        return super().attackers.union(self.hostile)

    def arrive(self, round: Round, sent: Uploads) -> Uploads:
        """Replace what hostile clients have sent."""
        sent = super().arrive(round, sent)
        attacks = self.attack != "none"
        places = [place for place, client in enumerate(sent.clients) if attacks and client in self.hostile]
        self._count = len(places)
        names = sorted(sent.received)
        if not places or not names:
            return sent
        honest = [place for place in range(len(sent.clients)) if place not in places]
        rows = sent.only(names).matrix(names).float().cpu()
        known = not self.attack.startswith("optimal_") or self._bears(len(rows))
        vector = self._vector(round, rows[honest], len(places)) if honest and known else torch.zeros_like(rows[0])
        parts = sent.only(names).from_vector(names, vector)
        values = dict(sent.values)
        for name in names:
            changed = values[name].clone()
            changed[places] = sent.received[name][places] + parts[name].to(changed)
            values[name] = changed
        return sent.with_values(values)

    def _vector(self, round: Round, honest: Tensor, hostile: int) -> Tensor:
        """Return what so many hostile clients add to what they have received, [d]."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(self.terms.seed, "attack", round.number))
            known = (self.against, self.pre, self.tolerated)
            made = attack(self.attack, self.strength, *known, hostile)(honest.clone())
        return torch.as_tensor(made)

    def report(self, round: Round) -> Facts:
        """Report how many hostile clients have sent."""
        return super().report(round) | {"hostile_uploads": float(self._count)}
