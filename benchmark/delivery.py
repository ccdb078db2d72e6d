"""Between the clients and a server's rule: who is reached, who trains, whose upload arrives, and when."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from benchmark.federation import Facts, Round, Terms, Uploads, Values
from benchmark.ranges import Checked


@dataclass(frozen=True)
class Departure:
    """The clients of a round before anything arrives; each is a part of the one before, ascending.

    Attributes:
        reached: ids of the clients that the broadcast reaches; its bytes are counted for them.
        trained: ids of those that train.
        sent: ids of those whose upload leaves; its bytes are counted. The others keep what they have learned.
    """

    reached: tuple[int, ...]
    trained: tuple[int, ...]
    sent: tuple[int, ...]


#: What becomes of uploads: they are handed over in a later round, moved to where the server is then; a part of one
#: round's update is added to another's, or sent again in its place; less than the update is sent; what a client
#: received is handed over in place of what it sent.
Effect = Literal["late", "carried over", "compressed", "replaced"]


class Delivery(Checked, nn.Module):
    """Everything arrives, at once and unchanged; the base of all others.

    Faults, delays, attacks, validation and compression derive from it, and stand around each other by ``inner``. What a
    delivery keeps between rounds lies in its buffers or its extra state, as with a rule. Its draws have a key of seed,
    round and client, so that every rank makes the same of the same uploads.

    Args:
        inner: what a message goes through before this delivery; nothing by default.
    """

    terms: Terms

    def __init__(self, inner: "Delivery | None" = None) -> None:
        super().__init__()
        self.inner = inner

    @property
    def title(self) -> str:
        """Return the names of the whole chain, the last first: ``Late(Dropouts)``."""
        return type(self).__name__ + (f"({self.inner.title})" if self.inner is not None else "")

    @property
    def is_plain(self) -> bool:
        """Return whether everything arrives unchanged, so that uploads need not be put together for it."""
        return type(self) is Delivery and (self.inner is None or self.inner.is_plain)

    @property
    def each_by_itself(self) -> bool:
        """Return whether what becomes of an upload depends on no other client's, so that privacy can be accounted for.

        That of ``inner`` is asked apart. So it is not taken for, unless a class says it.
        """
        return type(self) is Delivery

    @property
    def effects(self) -> frozenset[Effect]:
        """Return what it makes of uploads beside losing some; a delivery inside says its own."""
        return frozenset()

    @property
    def attackers(self) -> frozenset[int]:
        """Return the clients that are hostile on purpose; known once it is started."""
        return frozenset() if self.inner is None else self.inner.attackers

    @property
    def may_revert(self) -> bool:
        """Return whether clients may have to go back to what they kept before a round, so that it is put aside."""
        return self.inner is not None and self.inner.may_revert

    @property
    def reverted(self) -> frozenset[int]:
        """Return the clients that go back to what they kept before the round whose uploads have arrived last."""
        return frozenset() if self.inner is None else self.inner.reverted

    def start(self, terms: Terms) -> None:
        """Make what the delivery keeps, before the first round or before a saved state is loaded."""
        self.terms = terms
        if self.inner is not None:
            self.inner.start(terms)

    def upload_size(self, values: Values, received: frozenset[str]) -> tuple[int, int] | None:
        """Return bytes and numbers of one client's upload where it is sent in another form; None where as it is.

        Args:
            values: per name [...], of any client.
            received: names of those tensors that the server had sent.
        """
        return None if self.inner is None else self.inner.upload_size(values, received)

    def depart(self, round: Round, clients: tuple[int, ...]) -> Departure:
        """Return who of the selected clients is reached, trains and sends.

        Args:
            round: which; its ``clients`` are those that the rule has selected.
            clients: those that are left to decide on, ascending.
        """
        return Departure(clients, clients, clients) if self.inner is None else self.inner.depart(round, clients)

    def arrive(self, round: Round, sent: Uploads) -> Uploads:
        """Return what the rule is given: fewer, changed, or uploads of rounds before; none makes the round void.

        Args:
            round: which.
            sent: the uploads of the clients that have sent one.
        """
        return sent if self.inner is None else self.inner.arrive(round, sent)

    def close(self, round: Round, void: bool, reverted: frozenset[int]) -> None:
        """Take note of how a round has ended; the engine calls it last.

        Args:
            round: which.
            void: nothing was made of its uploads.
            reverted: clients that go back to what they kept before it.
        """
        if self.inner is not None:
            self.inner.close(round, void, reverted)

    def report(self, round: Round) -> Facts:
        """Return the delivery's own numbers after a round, such as how many were lost; nothing by default."""
        return {} if self.inner is None else self.inner.report(round)
