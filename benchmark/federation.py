"""The values that travel between clients and server, and the facts of a federation that both know."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from benchmark.placing import placed

Values = dict[str, Tensor]


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
    """What K clients receive.

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


@dataclass(frozen=True)
class Uploads:
    """What the server receives in a round.

    Attributes:
        clients: S ids, ascending, so that no result depends on the order of arrival.
        values: per name [S, ...].
        weights: float64 [S], the clients' numbers of training images.
    """

    clients: tuple[int, ...]
    values: Values
    weights: Tensor

    @classmethod
    def gathered(cls, arrived: Sequence[tuple[tuple[int, ...], Values]], sizes: Mapping[int, int]) -> "Uploads":
        """Put messages together, clients ascending.

        Args:
            arrived: ids and their values, per name [K, ...], in any order; at least one.
            sizes: per client, its number of training images.
        """
        clients = [client for ids, _ in arrived for client in ids]
        ascending = tuple(sorted(clients))
        values = {name: torch.cat([sent[name] for _, sent in arrived]) for name in arrived[0][1]}
        if ascending != tuple(clients):
            order = torch.tensor(sorted(range(len(clients)), key=clients.__getitem__))
            values = {name: value.index_select(0, placed(order, value.device)) for name, value in values.items()}
        return cls(
            ascending,
            values,
            torch.tensor([sizes[client] for client in ascending], dtype=torch.float64),
        )

    def only(self, names: Iterable[str]) -> "Uploads":
        """Keep the tensors of these names."""
        return replace(self, values={name: self.values[name] for name in names})

    def of(self, places: Sequence[int]) -> "Uploads":
        """Keep the rows at these places, ascending."""
        rows = list(places)
        return Uploads(
            tuple(self.clients[row] for row in rows),
            {name: value[rows] for name, value in self.values.items()},
            self.weights[rows],
        )


@dataclass(frozen=True)
class Terms:
    """The terms of a federation: public facts, known to the server and to every client, and the same in a deployment.

    Attributes:
        seed: seed of the run.
        num_clients: N.
        training_clients: ids of the clients that can be selected, ascending.
        new_clients: ids of those that never train, ascending.
        participants: clients in a round.
        batch_size: B.
        drop_last: drop a client's incomplete last batch if it has a full one.
        eval_batch_size: images in one evaluation step.
        num_classes: C, of the data set.
        row: rows of a mini-batch, min(B, most training images of any client). A fact of the run: a client's padding and
            draws do not depend on who else takes part in a round.
        own_row: rows of ``Client.own_images``, the most training images of any client.
        label_spaces: per split that has one, its own classes in the order in which labels are counted.
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

    def classes_of(self, split: str) -> int:
        """Return among how many classes the images of a split are classified."""
        return len(self.label_spaces.get(split, range(self.num_classes)))


@dataclass(frozen=True)
class Holdings:
    """What the holders of the images know, each of its own; a simulation has those of all clients.

    Attributes:
        train_rows: per client, its training rows of the image pool, int64 [n_k].
        train_sizes: per client, n_k.
        held_out: per split, per client, the rows it is evaluated on.
        class_counts: int64 [N, C], training images of each class.
    """

    train_rows: Mapping[int, np.ndarray]
    train_sizes: Mapping[int, int]
    held_out: Mapping[str, Mapping[int, np.ndarray]]
    class_counts: Tensor


@dataclass(frozen=True)
class Federation:
    """A federation as its simulation knows it: the terms, and what every client holds.

    Attributes:
        terms: what a server's rule is started with.
        holdings: never a rule's business.
    """

    terms: Terms
    holdings: Holdings
