"""The values that travel between clients and server, and the facts of a federation that both know."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmark.placing import placed

Values = dict[str, Tensor]
#: Numbers that a server's rule or a delivery reports of a round, by name: one of the federation, or one a client, [N].
Facts = dict[str, float | Tensor]


@dataclass(frozen=True)
class Round:
    """A round of the federation.

    Attributes:
        number: from 1; in an evaluation that of the last finished round, 0 before any.
        clients: ids of its clients, ascending; none in an evaluation.
        seed: seed of the run, for keyed draws.
    """

    number: int
    clients: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Broadcast:
    """Message of the server to K clients.

    Attributes:
        common: per name, one value for all of them.
        own: per name [K, ...], a row for each.
        masks: for a name of ``own`` of which clients receive different numbers of rows, [K, n, ...]: bool [K, n], False
            where a row is padding, which does not travel. A client has it as ``received["<name>_mask"]``.
    """

    common: Values = field(default_factory=dict)
    own: Values = field(default_factory=dict)
    masks: Values = field(default_factory=dict)

    def to(self, device: torch.device) -> "Broadcast":
        """Detach the tensors and put them on a device."""
        return Broadcast(
            {name: placed(value.detach(), device) for name, value in self.common.items()},
            {name: placed(value.detach(), device) for name, value in self.own.items()},
            {name: placed(value, device) for name, value in self.masks.items()},
        )

    def rows(self) -> Values:
        """Return what the clients have each of its own, masks included, per name [K, ...]."""
        return self.own | {f"{name}_mask": mask for name, mask in self.masks.items()}

    def message(self, place: int = 0) -> list[Tensor]:
        """Return the tensors that one of the clients receives; without masks those of all have the same shapes."""
        own = {name: rows[place] for name, rows in self.own.items()}
        there = {name: own[name][mask[place]] for name, mask in self.masks.items()}
        return [*self.common.values(), *(own | there).values()]


class Parcel(NamedTuple):
    """Messages of some clients that are sent together.

    Attributes:
        clients: K ids, in any order.
        values: per name [K, ...].
        received: per name of ``values`` that the server had sent, [K, ...], what they began with.
        kept: per name [K, ...], what the clients need to take the server's answer; it does not travel.
        common: names of ``received`` of which all clients had one value.
    """

    clients: tuple[int, ...]
    values: Values
    received: Values
    kept: Values
    common: frozenset[str] = frozenset()

    def of(self, clients: Iterable[int]) -> "Parcel":
        """Keep the rows of these of its clients."""
        kept = set(clients)
        if kept.issuperset(self.clients):
            return self
        rows = [row for row, client in enumerate(self.clients) if client in kept]
        return Parcel(
            tuple(self.clients[row] for row in rows),
            {name: value[rows] for name, value in self.values.items()},
            {name: _some(value, rows) for name, value in self.received.items()},
            {name: value[rows] for name, value in self.kept.items()},
            self.common,
        )


def _some(value: Tensor, rows: Sequence[int]) -> Tensor:
    """Take rows; one value that is expanded for all of them stays one."""
    return value[:1].expand(len(rows), *value.shape[1:]) if value.stride(0) == 0 else value[list(rows)]


def _together(parts: Sequence[Tensor], order: Tensor | None) -> Tensor:
    """Put rows behind each other, in an order; one value that is expanded for all of them stays one."""
    first = parts[0]
    if len({part.data_ptr() for part in parts}) == 1 and all(len(part) == 1 or part.stride(0) == 0 for part in parts):
        return first[:1].expand(sum(map(len, parts)), *first.shape[1:])
    rows = torch.cat([*parts])
    return rows if order is None else rows.index_select(0, placed(order, rows.device))


def flat(rows: Tensor) -> Tensor:
    """Make each of the rows [S, ...] a vector, [S, n]; also those of a single number, and none."""
    return rows.unsqueeze(1) if rows.ndim == 1 else rows.flatten(1)


@dataclass(frozen=True)
class Uploads:
    """Messages that the server receives in a round.

    Attributes:
        clients: S ids, ascending, so that no result depends on the order of arrival.
        values: per name [S, ...].
        weights: float64 [S], the clients' numbers of training images.
        received: per name of ``values`` that the server had sent, [S, ...], what these clients began with; a copy is
            needed of what is kept beyond the round.
        started: int64 [S], the round whose broadcast an upload answers.
        misfits: messages that are no row of ``values``, of another shape for example, as they came, by client; a
            delivery that validates refuses them, and without one the run ends.
        now: the server's shared values, for a delivery that hands over uploads of rounds before.
        common: names of ``received`` of which all clients of the round had one value.
        factors: float64 [S], what ``weights`` have been multiplied with, as late uploads count less; empty: nothing.
    """

    clients: tuple[int, ...]
    values: Values
    weights: Tensor
    received: Values = field(default_factory=dict)
    started: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    misfits: Mapping[int, Values] = field(default_factory=dict)
    now: Values = field(default_factory=dict)
    common: frozenset[str] = frozenset()
    factors: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    @property
    def equal_weights(self) -> Tensor:
        """Return weights of clients that count alike, whatever their numbers of images: float64 [S]."""
        return self.factors if len(self.factors) else torch.ones_like(self.weights)

    @classmethod
    def gathered(cls, parcels: Sequence[Parcel], sizes: Mapping[int, int], number: int = 1) -> "Uploads":
        """Put parcels together, clients ascending.

        Args:
            parcels: in any order; at least one.
            sizes: per client, its number of training images.
            number: of the round.
        """
        clients = [client for parcel in parcels for client in parcel.clients]
        order = sorted(range(len(clients)), key=clients.__getitem__)
        ascending = tuple(clients[place] for place in order)
        moved = None if ascending == tuple(clients) else torch.tensor(order)
        names, began = parcels[0].values, parcels[0].received
        return cls(
            ascending,
            {name: _together([parcel.values[name] for parcel in parcels], moved) for name in names},
            torch.tensor([sizes[client] for client in ascending], dtype=torch.float64),
            {name: _together([parcel.received[name] for parcel in parcels], moved) for name in began},
            torch.full((len(ascending),), number),
            common=frozenset.intersection(*(parcel.common for parcel in parcels)),
        )

    @classmethod
    def nobody(cls, like: Values) -> "Uploads":
        """Return uploads of no client, of these names and shapes."""
        none = {name: value.new_zeros(0, *value.shape) for name, value in like.items()}
        return cls((), none, torch.zeros(0, dtype=torch.float64), dict(none))

    @classmethod
    def alone(cls, client: int, values: Values, received: Values, number: int) -> "Uploads":
        """Return an upload of one client.

        Args:
            client: its id.
            values: per name [1, ...].
            received: per name what it began with, without the dimension of clients.
            number: of the round.
        """
        began = {name: value.unsqueeze(0) for name, value in received.items()}
        one = torch.ones(1, dtype=torch.float64)
        return cls((client,), values, one, began, torch.full((1,), number), common=frozenset(began))

    def with_values(self, values: Values) -> "Uploads":
        """Return the same uploads with other values of the same names and shapes."""
        return replace(self, values=values)

    def without(self, places: Iterable[int], misfits: Mapping[int, Values]) -> "Uploads":
        """Leave out the rows at these places; ``misfits`` are messages in their stead."""
        gone = set(places)
        rest = self.of([place for place in range(len(self.clients)) if place not in gone]) if gone else self
        return replace(rest, misfits=dict(misfits))

    def only(self, names: Iterable[str]) -> "Uploads":
        """Keep the tensors of these names."""
        chosen = tuple(names)
        received = {name: self.received[name] for name in chosen if name in self.received}
        values = {name: self.values[name] for name in chosen}
        return replace(self, values=values, received=received, common=self.common & received.keys())

    def of(self, places: Sequence[int]) -> "Uploads":
        """Keep the rows at these places, ascending."""
        rows = list(places)
        return Uploads(
            tuple(self.clients[row] for row in rows),
            {name: value[rows] for name, value in self.values.items()},
            self.weights[rows],
            {name: value[rows] for name, value in self.received.items()},
            self.started[rows] if len(self.started) else self.started,
            self.misfits,
            self.now,
            self.common,
            self.factors[rows] if len(self.factors) else self.factors,
        )

    def updates(self) -> Values:
        """Return how far clients have moved what they received, end minus received, per name [S, ...]."""
        return {name: self.values[name] - before for name, before in self.received.items()}

    def matrix(self, names: Iterable[str]) -> Tensor:
        """Return the updates of these names as rows [S, P]: names sorted, each tensor row-major."""
        updates = self.updates()
        return torch.cat([flat(updates[name]) for name in sorted(names)], dim=1)

    def from_vector(self, names: Iterable[str], vector: Tensor) -> Values:
        """Take apart a vector [P] in the order of :meth:`matrix`: per name a tensor of one client's shape."""
        shapes = {name: self.values[name].shape[1:] for name in sorted(names)}
        parts = vector.split([shape.numel() for shape in shapes.values()])
        return {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}


@dataclass(frozen=True)
class Terms:
    """The terms of a federation: public facts, known to the server and to every client, and the same in a deployment.

    Attributes:
        seed: seed of the run.
        num_clients: N.
        training_clients: ids of the clients that can be selected, ascending.
        new_clients: ids of those that never train, ascending.
        testers: per split that is scored once for the federation, with the server's values, the ids of those that hold
            its images, ascending; they hold no others.
        participants: clients in a round.
        batch_size: B.
        drop_last: drop a client's incomplete last batch if it has a full one.
        eval_batch_size: images in one evaluation step.
        num_classes: C, of the data set.
        row: rows of a mini-batch, min(B, most training images of any client). A fact of the run: a client's padding and
            draws do not depend on who else takes part in a round.
        own_row: rows of ``Client.own_images``, the most training images of any client.
        label_spaces: per split that has one, its own classes in the order in which labels are counted; where clients
            have spaces of their own, those of the split are called ``"<split>/0"``, ``"<split>/1"``, ...
        own_spaces: per split whose clients have spaces of their own, the number of each client's; -1 where it holds no
            images of the split.
        held_out_row: per split, the most images of it that any client holds: rows of an evaluation step that draws.
        rounds: of the run, as planned; 0 where that is not known.
        poisson_lots: local training takes each image with probability B/n_k at each step, and not all in an order.
    """

    seed: int
    num_clients: int
    training_clients: tuple[int, ...]
    new_clients: tuple[int, ...]
    participants: int
    batch_size: int
    drop_last: bool
    eval_batch_size: int
    num_classes: int
    row: int
    own_row: int
    label_spaces: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    held_out_row: Mapping[str, int] = field(default_factory=dict)
    rounds: int = 0
    poisson_lots: bool = False
    own_spaces: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    testers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def lot(self) -> int:
        """Return the rows of a mini-batch of local training; of Poisson lots what is beyond twice B is left out."""
        return min(self.own_row, 2 * self.batch_size) if self.poisson_lots else self.row

    def space_of(self, split: str, client: int) -> str:
        """Return what the label space of a client's images of a split is called."""
        return f"{split}/{self.own_spaces[split][client]}" if split in self.own_spaces else split

    def spaces_of(self, client: int) -> tuple[int, ...]:
        """Return what is equal for clients with the same label spaces, who alone can be stepped together."""
        return tuple(numbers[client] for numbers in self.own_spaces.values())

    def classes_in(self, space: str) -> Sequence[int]:
        """Return the classes of a label space in the order in which labels are counted."""
        return self.label_spaces.get(space, range(self.num_classes))

    def most_classes(self, split: str) -> int:
        """Return among how many classes the images of a split are classified at most."""
        numbers = {*self.own_spaces.get(split, ())} - {-1}
        return max(len(self.classes_in(space)) for space in [f"{split}/{n}" for n in numbers] or [split])


@dataclass(frozen=True)
class CorruptedRows:
    """Corrupted versions of test images; a row of their pool is the image's number times V plus the version's.

    Attributes:
        rows: per client, those that it scores, int64.
        versions: what the accuracy on each is called, V of them; the first is of the images as they were.
    """

    rows: Mapping[int, np.ndarray] = field(default_factory=dict)
    versions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Holdings:
    """Facts that only the holder of the images knows; a simulation has those of all clients.

    Attributes:
        train_rows: per client, its training rows of the image pool, int64 [n_k].
        train_sizes: per client, n_k.
        held_out: per split, per client, the rows it is evaluated on.
        class_counts: int64 [N, C], training images of each class.
        streams: per split of which images are held against foreign ones, the rows of the latter in their own pool.
        corrupted: of images of split ``test``.
    """

    train_rows: Mapping[int, np.ndarray]
    train_sizes: Mapping[int, int]
    held_out: Mapping[str, Mapping[int, np.ndarray]]
    class_counts: Tensor
    streams: Mapping[str, np.ndarray] = field(default_factory=dict)
    corrupted: CorruptedRows = field(default_factory=CorruptedRows)


@dataclass(frozen=True)
class Federation:
    """A federation as its simulation knows it: the terms, and what every client holds.

    Attributes:
        terms: what a server's rule is started with.
        holdings: never a rule's business.
    """

    terms: Terms
    holdings: Holdings
