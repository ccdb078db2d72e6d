"""Act between rounds: select clients, send to them, and make new shared values of their uploads."""

from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Facts, Round, Terms, Uploads, Values
from benchmark.ranges import Checked
from benchmark.seeds import numpy_generator

#: Numbers of several clients whose differences are taken at once, in a processor's cache.
TOGETHER = 2**18


def weighted_mean(values: Values, weights: Tensor) -> Values:
    """``sum_k w_k x_k / sum_k w_k`` of every tensor.

    Args:
        values: per name [S, ...].
        weights: [S], not negative, not all zero.
    """
    share = (weights / weights.sum()).tolist()
    made: Values = {}
    for kind in dict.fromkeys(rows.dtype for rows in values.values()):
        flat = {name: rows.reshape(len(rows), -1) for name, rows in values.items() if rows.dtype == kind}
        # Client after client, around the first one's values: identical updates give those values back bit for bit.
        first = torch.cat([rows[0] for rows in flat.values()])
        mean = first.clone()
        together = max(1, TOGETHER // max(1, len(first)))
        for start in range(1, len(share), together):
            away = torch.cat([rows[start : start + together] for rows in flat.values()], dim=1).sub_(first)
            for part, of_client in zip(share[start : start + together], away.unbind(), strict=True):
                mean.add_(of_client, alpha=part)
        parts = mean.split([rows.shape[1] for rows in flat.values()])
        made |= {name: part.view(values[name].shape[1:]) for name, part in zip(flat, parts, strict=True)}
    return {name: made[name] for name in values}


class Declared(Protocol):
    """A method as far as a server's rule may ask about it."""

    @property
    def shared(self) -> tuple[str, ...]:
        """Prefixes of the parameters that travel."""

    @property
    def personal(self) -> tuple[str, ...]:
        """Prefixes of the parameters that stay with their client."""

    @property
    def uploads(self) -> tuple[str, ...]:
        """Name what clients let the server see of their own."""

    @property
    def sends_of_its_own(self) -> bool:
        """Return whether it makes its message itself: parts, indices, compressed forms."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Return its parameters by name."""

    def make_server(self) -> "ServerRule":
        """Return the rule that the method brings."""


class ServerRule(Checked, nn.Module):
    """FedAvg's server (McMahan et al., AISTATS 2017), and the base of all others.

    All clients receive the shared values, and the new ones are the mean of the uploads weighted with the clients'
    numbers of training images. A rule is plain PyTorch. Its state between rounds lies in its buffers and parameters, or
    in its extra state, so that it is saved without further code. A deployment calls the same functions as a simulation.
    """

    terms: Terms
    #: whether no rule may stand around this one, since what it promises would not hold
    outermost: bool = False
    #: what becomes of a round in which nothing arrives: it is void, or ``aggregate`` is called without uploads
    empty_rounds: Literal["void", "aggregate"] = "void"
    #: whether an upload of an earlier round means something to it, as the present values plus the client's update: not
    #: where clients begin anew in each round, nor where they send other values in other rounds; so with what a delivery
    #: carries over from a client's update to its next one
    takes_stale: bool = True
    #: whether what a client sends is what it received, moved by its training: not of sums over its images, for example
    takes_updates: bool = True
    #: whether clients noise the whole of what they send, so that nothing of it could be sent in fewer bytes
    noises_uploads: bool = False
    #: whether draws have no key, so that processes would draw differently
    draws_without_key: bool = False
    #: whether what it makes of a round depends on how many the run has: a longer run is another one from its start
    follows_rounds: bool = False
    #: whether its mean is weighted with the clients' numbers of images
    weighs_by_images: bool = True

    @property
    def title(self) -> str:
        """Return the rule's name in messages and records, with those inside: ``UserLevelPrivacy(Median)``."""
        return type(self).__name__

    @property
    def rules(self) -> list["ServerRule"]:
        """Return this rule and those inside of it."""
        return [each for each in self.modules() if isinstance(each, ServerRule)]

    @property
    def takes_the_mean(self) -> bool:
        """Return whether ``aggregate`` is this class's weighted mean, so that parameters may be aggregated in groups.

        The mean is taken of each parameter by itself and is finite where the uploads are. A rule that does not
        override ``aggregate`` may return True: where uploads are many, it is then given some parameters at a time.
        """
        return type(self) is ServerRule

    @property
    def reads_rows(self) -> bool:
        """Return whether the rule's result depends on single uploads, not on their mean alone.

        True for every other class than this one, unless it says otherwise.
        """
        return type(self) is not ServerRule

    def start(self, initial: Values, terms: Terms) -> None:
        """Make what the rule keeps, before the first round or before a saved state is loaded.

        Args:
            initial: what all clients start from of the shared parameters, and of the personal ones that they upload.
            terms: public facts of the federation; what clients hold is theirs alone.
        """
        self.terms = terms

    def select(self, number: int) -> list[int]:
        """Draw the clients of a round (from 1) without replacement, ascending; the same for every rule."""
        clients, count = self.terms.training_clients, self.terms.participants
        if count == len(clients):
            return list(clients)
        rng = numpy_generator(self.terms.seed, "select", number)
        # By position: an array of all clients would cost more than the rest of a round where there are very many.
        return sorted(clients[place] for place in rng.choice(len(clients), size=count, replace=False))

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Return what these clients receive in a round, or in the evaluation after it.

        Args:
            round: which; in an evaluation it has no clients.
            shared: the shared values.
            clients: the receivers, K of them.
        """
        return Broadcast(common=dict(shared))

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Return the new values of some or all shared parameters, and move the rule's own state."""
        return weighted_mean(uploads.only(shared).values, uploads.weights) if shared else {}

    def answer(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Return what these clients receive at a round's end, for a method that takes it; nothing by default.

        Args:
            round: which, after its aggregation.
            shared: the new shared values.
            clients: some of those whose messages have left, K of them.
        """
        return Broadcast()

    def adapt(self, round: Round, clients: tuple[int, ...], phase: int, values: Values) -> Values:
        """Answer clients that never train, after a phase of their fitting; the rule itself does not change.

        Args:
            round: the last finished one.
            clients: the cohort, K clients.
            phase: index into ``finetune_phases(new=True)``.
            values: the copies' shared and uploaded parameters after the phase, [K, ...] each.

        Returns:
            New values [K, ...] of some parameters of the copies; nothing by default.
        """
        return {}

    @property
    def around_any(self) -> bool:
        """Return whether the rule stands around the one that a method brings, and so serves methods with one too."""
        return False

    def report(self, round: Round) -> Facts:
        """Return the rule's own numbers after a round, void ones too; nothing by default."""
        return {}

    def guarantee(self) -> dict[str, object] | None:
        """Return what the rule promises of the run's privacy, for its record; None where it promises nothing."""
        return None

    def accept(self, method: Declared) -> str | None:
        """Return why this rule cannot serve a method, or None; asked once, before training."""
        return None

    def complete(self, own: Callable[[], "ServerRule"]) -> None:
        """Take the method's own rule where one is needed and none was given; the engine calls it before ``start``."""


class WrappedRule(ServerRule):
    """A rule around another one: what it does not override, the inner rule does.

    Args:
        inner: the rule inside; None takes the one that the method brings, whatever it is.
    """

    def __init__(self, inner: ServerRule | None = None) -> None:
        super().__init__()
        self.inner = inner

    @property
    def wrapped(self) -> ServerRule:
        """Return the inner rule.

        Raises:
            ConfigurationError: there is none yet: ``complete`` was not called.
        """
        if self.inner is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no inner rule yet; give it one, or call complete first"
            )
        return self.inner

    @property
    def title(self) -> str:
        """Return the names of the whole chain."""
        return f"{type(self).__name__}({self.inner.title if self.inner is not None else ''})"

    @property
    def empty_rounds(self) -> Literal["void", "aggregate"]:  # type: ignore[override]
        """Return what the inner rule says."""
        return self.wrapped.empty_rounds

    @property
    def reads_rows(self) -> bool:
        """Return whether this rule or the inner one does."""
        return type(self) is not WrappedRule or self.wrapped.reads_rows

    @property
    def weighs_by_images(self) -> bool:  # type: ignore[override]
        """Return what the inner rule says."""
        return self.wrapped.weighs_by_images

    @property
    def around_any(self) -> bool:
        """Return whether the innermost rule is the method's."""
        return self.inner is None or self.inner.around_any

    def complete(self, own: Callable[[], ServerRule]) -> None:
        """Put the method's own rule inside where none was given."""
        if self.inner is None:
            self.inner = own()
        else:
            self.inner.complete(own)

    def start(self, initial: Values, terms: Terms) -> None:
        """Start this rule and the inner one."""
        super().start(initial, terms)
        self.wrapped.start(initial, terms)

    def select(self, number: int) -> list[int]:
        """Have the inner rule select."""
        return self.wrapped.select(number)

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Send what the inner rule sends."""
        return self.wrapped.broadcast(round, shared, clients)

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Make what the inner rule makes."""
        return self.wrapped.aggregate(round, shared, uploads)

    def answer(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Answer as the inner rule does."""
        return self.wrapped.answer(round, shared, clients)

    def adapt(self, round: Round, clients: tuple[int, ...], phase: int, values: Values) -> Values:
        """Answer as the inner rule does."""
        return self.wrapped.adapt(round, clients, phase, values)

    def report(self, round: Round) -> Facts:
        """Report what the inner rule reports; further numbers: ``super().report(round) | {...}``."""
        return self.wrapped.report(round)

    def guarantee(self) -> dict[str, object] | None:
        """Promise what the inner rule promises."""
        return self.wrapped.guarantee()

    def accept(self, method: Declared) -> str | None:
        """Ask the inner rule."""
        return self.wrapped.accept(method)
