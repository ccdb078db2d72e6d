"""Images of every client, all in one array."""

import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Rows = Mapping[int, Indices]


class ClientRows(Sequence[Indices]):
    """The rows of client 0, then those of client 1, and so on; reads as a list of one array a client.

    What a million clients hold is so checked, sorted and counted in a few operations on one array; one by one each
    client takes microseconds.

    Args:
        rows: int64 [n], the clients' rows one after the other.
        sizes: int64 [N], how many of them each client has.
    """

    def __init__(self, rows: Indices, sizes: Indices) -> None:
        self.rows = rows
        self.sizes = sizes
        #: int64 [N + 1], where each client's rows begin, and where the last one's end
        self.bounds: Indices = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])

    @classmethod
    def of(cls, held: Sequence[Indices]) -> "ClientRows":
        """Put one array a client together; what is together already stays as it is."""
        if isinstance(held, ClientRows):
            return held
        sizes = np.fromiter(map(len, held), dtype=np.int64, count=len(held))
        return cls(np.concatenate(held) if len(held) else np.zeros(0, dtype=np.int64), sizes)

    @property
    def owners(self) -> Indices:
        """The client of each row, int64 [n]."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def ascending(self) -> "ClientRows":
        """Sort each client's rows, as int64."""
        rows = self.rows[np.lexsort((self.rows, self.owners))] if len(self.rows) else self.rows
        return ClientRows(rows.astype(np.int64, copy=False), self.sizes)

    def part(self, clients: slice) -> "ClientRows":
        """Return the rows of neighbouring clients; the slice has a start."""
        sizes, begin = self.sizes[clients], int(self.bounds[clients.start])
        return ClientRows(self.rows[begin : begin + int(sizes.sum())], sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Indices]:
        bounds, rows = self.bounds.tolist(), self.rows
        for begin, end in itertools.pairwise(bounds):
            yield rows[begin:end]

    def __add__(self, other: Sequence[Indices]) -> list[Indices]:
        return [*self, *other]

    @overload
    def __getitem__(self, client: int) -> Indices: ...
    @overload
    def __getitem__(self, client: slice) -> list[Indices]: ...
    def __getitem__(self, client: int | slice) -> Indices | list[Indices]:
        count = len(self.sizes)
        if isinstance(client, slice):
            return [self[number] for number in range(*client.indices(count))]
        if not -count <= client < count:
            raise IndexError(f"client {client} of {count}")
        client = client % count
        return self.rows[self.bounds[client] : self.bounds[client + 1]]


class ByClient(Rows):
    """The rows by client's number; none are cut out before they are asked for.

    Args:
        held: of clients 0 to N - 1.
    """

    def __init__(self, held: ClientRows) -> None:
        self._rows = held.rows
        self._bounds = array("q", held.bounds.tobytes())  # whose numbers are read faster than NumPy's

    def __getitem__(self, client: int) -> Indices:
        if not 0 <= client < len(self._bounds) - 1:
            raise KeyError(client)
        return self._rows[self._bounds[client] : self._bounds[client + 1]]

    def __contains__(self, client: object) -> bool:
        return client in range(len(self))

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __len__(self) -> int:
        return len(self._bounds) - 1


def class_counts(held: Sequence[Indices], labels: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """Count each client's images by class: [N, C]."""
    together = ClientRows.of(held)
    places = together.owners * num_classes + labels[together.rows]
    return np.bincount(places, minlength=len(together) * num_classes).reshape(len(together), num_classes)
