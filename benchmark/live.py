"""One client of a deployment: the engine at width 1 over the images of one holder, without a Trainer or a server."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmark.contract import Stage
from benchmark.engine.batches.loaders import Loaders
from benchmark.engine.batches.pool import Images, Transform
from benchmark.engine.plan.work import Shown
from benchmark.engine.refusals.payload_checks import own_rule, start
from benchmark.engine.roles import overrides
from benchmark.engine.scores import ClientScores
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Federation, Holdings, Parcel, Round, Terms, Values
from benchmark.method import FederatedMethod
from benchmark.privacy.record_level import RecordLevelPrivacy
from benchmark.server import ServerRule


@dataclass
class OwnImages:
    """The images that one client holds.

    Attributes:
        pool: its images and their labels.
        transform: from stored images to the backbone's input; that of the federation.
        train: rows of the pool to train on, int64 [n].
        held_out: per split, the rows that are scored.
        evaluate_local: whether it is scored as local training left it too; None: as the method says.
        metrics: which set of metrics its scores have.
        cache_features: whether to keep what frozen parts make of the images.
        min_support: images of a class, and beside it, from which its AUROC is part of their mean.
    """

    pool: Images
    transform: Transform
    train: np.ndarray
    held_out: Mapping[str, np.ndarray]
    evaluate_local: bool | None = None
    metrics: list[str | dict[str, Any]] | dict[str, Any] | str | None = None
    cache_features: bool | str = "auto"
    min_support: int = 1


class _OwnData:
    """The federation's data as one client knows it: the public terms, and its own images."""

    clients_at_once: int | Literal["auto"] = 1
    on_divergence: Literal["drop", "raise"] = "drop"
    one_by_one = False
    record_privacy: RecordLevelPrivacy | None = None
    others: Mapping[Shown, Images] = MappingProxyType({})
    num_workers = 0
    loaders: Loaders | None = None
    keeps_images = False

    def __init__(self, number: int, own: OwnImages, terms: Terms) -> None:
        labels = own.pool.labels[torch.from_numpy(own.train)]
        counts = torch.zeros(terms.num_clients, terms.num_classes, dtype=torch.int64)
        counts[number] = torch.bincount(labels, minlength=terms.num_classes)
        held = {split: {number: rows} for split, rows in own.held_out.items()}
        self.federation = Federation(terms, Holdings({number: own.train}, {number: len(own.train)}, held, counts))
        self.pool, self.transform = own.pool, own.transform
        self.metrics, self.min_support = own.metrics, own.min_support
        self.evaluate_local, self.cache_features = own.evaluate_local, own.cache_features


class Relay(ServerRule):
    """Stands for the server of elsewhere: sends on what was received from it.

    Attributes:
        received: from the server, by one client.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received = Broadcast()

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Return what the server has sent."""
        return self.received

    def answer(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Return what the server has answered."""
        return self.received


class LocalClient:
    """Trains and scores one client as the simulation does, bit for bit as with ``clients_at_once: 1``.

    Every draw has the same key as there: seed, round and the client's number. Kept features agree to rounding alone: a
    simulation makes them of all clients' images together. What is the client's own leaves this object by :meth:`state`
    alone.

    Args:
        method: as the simulation makes it, from the same configuration and seed.
        number: the client's.
        own: its images.
        terms: of the federation.
        rounds: of the whole run, for schedules of learning rates.

    Raises:
        ConfigurationError: there is no such client, it never trains, it holds no image or more than the terms allow, or
            images of other classes.
    """

    def __init__(self, method: FederatedMethod, number: int, own: OwnImages, terms: Terms, rounds: int) -> None:
        if not 0 <= number < terms.num_clients:
            raise ConfigurationError(f"client {number} is none of this federation's {terms.num_clients}, from 0")
        if number not in terms.training_clients:
            raise ConfigurationError(
                f"client {number} never trains in this federation; a deployment's clients are those that train"
            )
        if not len(own.train):
            raise ConfigurationError(f"client {number} holds no image to train on")
        if len(own.train) > terms.own_row:
            raise ConfigurationError(
                f"client {number} trains on {len(own.train)} images, and the federation's terms say that no client has "
                f"more than {terms.own_row}; agree on new terms"
            )
        labels = own.pool.labels
        if len(labels) and not 0 <= labels.min() <= labels.max() < terms.num_classes:
            raise ConfigurationError(
                f"client {number} has images of classes {labels.min()} to {labels.max()}, and the federation's are 0 "
                f"to {terms.num_classes - 1}; number its classes as the federation does"
            )
        self.method = method
        self.number = number
        self.terms = terms
        self._data = _OwnData(number, own, terms)
        self._simulation = method.join(self._data, clients=[number])
        self._simulation.rounds = rounds
        self._optimizers = self._simulation.local_steps.optimizers(self._simulation.phases[Stage.TRAIN])
        self._relay = Relay()
        self._relay.start({}, terms)
        self._loaders = Loaders(self._simulation, 1, 0, self._relay, lambda number: [self.number])
        method.train()

    def train(self, round: Round, received: Broadcast) -> tuple[Parcel, dict[str, float]]:
        """Train for a round.

        Args:
            round: which, with all its clients.
            received: what the server has sent to this client: own values [1, ...].

        Returns:
            What the client sends, of no client if its loss or values were not finite; and the means that its steps
            reported, by name.
        """
        simulation, clients = self._simulation, (self.number,)
        self._relay.received = received
        share = self._loaders.training(round.number)
        self._loaders.begin(clients)
        simulation.watch.start()
        cohort = simulation.begin(clients, Stage.TRAIN, round, simulation.received(self._relay, round, clients))
        for work in share:
            for part in work.parts:
                optimizer = self._optimizers[part.phase]
                phase = simulation.start(cohort, part, optimizer)
                for step, batch in simulation.steps(work, part):
                    made = simulation.gradients(cohort, step, batch)
                    simulation.local_steps.take(cohort, step, made, phase, optimizer)
                simulation.finish(cohort, part, optimizer)
        parcel = simulation.end(cohort)
        reported = {name: values[self.number].item() for name, values in simulation.reports.take().items()}
        return parcel, reported

    def take(self, round: Round, parcel: Parcel, answer: Broadcast) -> None:
        """Take what the server answers a message, into the client's own parameters.

        Args:
            round: which.
            parcel: as :meth:`train` returned it.
            answer: own values [1, ...].
        """
        if overrides(self.method, "take") and parcel.clients:
            self._relay.received = answer
            self._simulation.take(parcel, round, self._simulation.answered(self._relay, round, parcel.clients))

    def evaluate(self, round: int, received: Broadcast) -> dict[tuple[str, str], ClientScores]:
        """Score the client on its held-out images after a round.

        Args:
            round: number of the last finished one, 0 before any.
            received: what the server sends for the evaluation.

        Returns:
            By point and split the scores, of which this client's row counts.
        """
        evaluation = self.method.evaluation
        self._relay.received = self._known(received)
        evaluation.start()
        self.method.eval()
        share = self._loaders.evaluation([*self._data.federation.holdings.held_out])
        self._loaders.begin(self._loaders.scored)
        for work in share:
            with torch.no_grad():
                evaluation.score(work, Round(round, (), self.terms.seed), self._relay)
        self.method.train()
        return evaluation.scores

    def fitted(self, round: int, received: Broadcast) -> Values:
        """Return the copy of itself with which the client is scored, [1, ...] each; nothing where the method fits none.

        Args:
            round: number of the last finished one.
            received: what the server sends for the evaluation.
        """
        if not self._simulation.phases[Stage.FINETUNE]:
            return {}
        self._relay.received = self._known(received)
        self.method.eval()
        self._simulation.watch.start()
        now, evaluation = Round(round, (), self.terms.seed), self.method.evaluation
        with torch.no_grad():
            sent = self._simulation.received(self._relay, now, (self.number,))
            values = evaluation.fitted(self.number, Stage.FINETUNE, sent, now, self._relay)
        self.method.train()
        return values

    def _known(self, received: Broadcast) -> Broadcast:
        """Return a broadcast with the method's own parameters for values that are equal, as before the first round.

        A simulation sends these parameters themselves then, and draws of an evaluation rest on that.
        """
        own = dict(self.method.named_parameters())
        common = {
            name: own[name].detach() if name in own and torch.equal(own[name], value) else value
            for name, value in received.common.items()
        }
        return replace(received, common=common)

    def state(self) -> Values:
        """Return what the client keeps between rounds, by name: never to be sent."""
        return state_of(self.method, self.number)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` returned.

        Raises:
            ConfigurationError: it is of another method: other names, shapes or types.
        """
        restore_client(self.method, self.number, state)


@dataclass(frozen=True)
class _MadeUp:
    """Placeholder images that belong to no client."""

    images: Tensor
    labels: Tensor


def message_form(
    method: FederatedMethod,
    rule: ServerRule,
    transform: Transform,
    terms: Terms,
    image_size: tuple[int, int],
    number: int,
) -> Values:
    """Return what a client sends after a round with made-up images: its names, shapes and types are those of all.

    Args:
        method: which has not joined a federation.
        rule: that has not started.
        transform: of the federation's images.
        terms: of the federation.
        image_size: height and width of the stored images.
        number: of the round, which a client begins with its initial values.

    Raises:
        ConfigurationError: what came of these images was not finite.
    """
    first = terms.training_clients[0]
    classes = terms.classes_in(terms.space_of("train", first))
    labels = torch.tensor(classes[: terms.own_row])
    size = (len(labels), 3, *image_size)
    images = torch.randint(256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    own = OwnImages(_MadeUp(images, labels), transform, np.arange(len(labels)), {}, cache_features=False)
    client = LocalClient(method, first, own, terms, max(terms.rounds, 1))
    rule.complete(lambda: own_rule(method))
    initial = method.initial_values()
    start(rule, dict(initial), terms)
    round = Round(number, (first,), terms.seed)
    shared = {name: initial[name] for name in method.roles.shared}
    parcel, _ = client.train(round, rule.broadcast(round, shared, round.clients))
    if not parcel.clients:
        raise ConfigurationError(f"{type(method).__name__} was tried out on noise, and its message was not finite")
    return {name: rows[0] for name, rows in parcel.values.items()}


def state_of(method: FederatedMethod, client: int) -> Values:
    """Return what a client of a method, which has joined, keeps between rounds, by name."""
    store = method.store
    return {name: store.rows(name, [client], torch.device("cpu"))[0] for name in store.names}


def restore_client(method: FederatedMethod, client: int, state: Mapping[str, Tensor]) -> None:
    """Have a client of a method, which has joined, go on from what :func:`state_of` returned.

    Raises:
        ConfigurationError: it is of another method: other names, shapes or types.
    """
    kept = state_of(method, client)
    found, expected = ({name: (tuple(v.shape), v.dtype) for name, v in of.items()} for of in (state, kept))
    if found != expected:
        apart = min(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise ConfigurationError(
            f"the kept state is of another method than {type(method).__name__}: {apart} is "
            f"{found.get(apart, 'not there')}; expected {expected.get(apart, 'nothing of that name')}"
        )
    method.store.write_all({name: ([client], value.unsqueeze(0)) for name, value in state.items()})
