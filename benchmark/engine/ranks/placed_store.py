"""The clients' rows over several ranks: each lies with one, and visits those that step its client."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from benchmark.client_store import ClientStore
from benchmark.engine.device.memory import free_memory
from benchmark.engine.ranks.ranks import Ranks
from benchmark.federation import Values
from benchmark.placing import fetched_together

#: Of a GPU's free memory, what all clients' rows may take there at most.
ROOM = 0.25


class PlacedStore(ClientStore):
    """A store that holds the rows of this rank's clients; with one rank those of all.

    Rows that another rank steps are brought there before, and sent home after: what is trained moves, and no rank
    holds more than its part and its visitors. With one rank the rows lie on the GPU if they take a quarter of its free
    memory at most; else in host memory, from where those of a cohort travel.

    Args:
        initial: per name, the value every client starts from, any shape.
        homes: per client, the rank that holds its rows.
        ranks: the processes.
    """

    def __init__(self, initial: Values, homes: Sequence[int], ranks: Ranks) -> None:
        self.homes = np.asarray(homes)
        #: the clients whose rows lie here, ascending
        self.held = np.flatnonzero(self.homes == ranks.rank)
        super().__init__(initial, len(self.held))
        self.ranks = ranks
        #: where a client's rows lie here, -1 where they do not
        self._place = np.full(len(self.homes), -1)
        self._place[self.held] = np.arange(len(self.held))
        self._visitors: dict[int, int] = {}
        self._visiting: Values = {}
        #: per rank, the clients that visit it
        self._away: list[list[int]] = []

    def rows(self, name: str, clients: Sequence[int], device: torch.device) -> Tensor:
        """Copy the rows of these clients, which lie or visit here, [K, ...], to ``device``."""
        if not self._visitors:
            return super().rows(name, self._place[list(clients)].tolist(), device)
        return torch.stack([self._row(name, client) for client in clients]).to(device)

    def _row(self, name: str, client: int) -> Tensor:
        if self._place[client] >= 0:
            return self.all_rows(name)[self._place[client]]
        return self._visiting[name][self._visitors[client]]

    def write(self, name: str, clients: Sequence[int], values: Tensor) -> None:
        """Replace the rows of these clients by ``values`` [K, ...]."""
        if not self._visitors:
            return super().write(name, self._place[list(clients)].tolist(), values)
        for client, value in zip(clients, values.detach().to("cpu", self.all_rows(name).dtype), strict=True):
            self._row(name, client).copy_(value)
        return None

    def write_all(self, rows: Mapping[str, tuple[Sequence[int], Tensor]]) -> None:
        """Replace rows of several tensors, per name of some clients; the host waits for the device once at most."""
        values = [value for _, value in rows.values()]
        if not self.on_device:
            values = fetched_together(values)
        for (name, (clients, _)), value in zip(rows.items(), values, strict=True):
            self.write(name, clients, value)

    # ------------------------------------------------------------------ where rows lie

    @property
    def on_device(self) -> bool:
        """Return whether the rows lie where the method does, not in host memory."""
        return any(rows.device.type != "cpu" for rows in self.buffers())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to a GPU with the method around it, if there is room and no other rank's clients visit; else stay."""
        super()._apply(fn, recurse)
        if not self.names:
            return self
        some = next(self.buffers())
        device = fn(some[:0]).device
        size = sum(rows.numel() * rows.element_size() for rows in self.buffers())
        fits = device.type == "cpu" or (self.ranks.count == 1 and size <= ROOM * free_memory(device))
        if fits and device != some.device:  # rows that lie there already are not asked whether there is room
            for name, rows in self.named_buffers():
                setattr(self, name, rows.to(device))
        return self

    # ------------------------------------------------------------------ between ranks

    def bring(self, clients: Sequence[int]) -> None:
        """Have the rows of these clients here, wherever they lie; called by all ranks, each with its own."""
        if not self.names or self.ranks.count == 1:
            return
        missing = [client for client in clients if self._place[client] < 0]
        self._away = self.ranks.everybody("the clients that visit", missing)
        if not any(self._away):
            return
        arrived = self.ranks.exchange("clients' rows", [self._of(wanted) for wanted in self._away])
        order = [client for home in range(self.ranks.count) for client in missing if self.homes[client] == home]
        self._visitors = {client: place for place, client in enumerate(order)}
        self._visiting = {name: torch.cat([part[name] for part in arrived if part]) for name in self.names if missing}

    def _of(self, clients: Sequence[int]) -> Values:
        """Return the rows of those of these clients that lie here."""
        places = [place for place in self._place[list(clients)].tolist() if place >= 0]
        return {name: self.all_rows(name)[places] for name in self.names} if places else {}

    def send_home(self) -> None:
        """Give the visitors' rows, as they are now, to the ranks where they lie; called by all ranks."""
        away, visitors, visiting = self._away, self._visitors, self._visiting
        self.dismiss()
        if not any(away):
            return
        parcels: list[Values] = []
        for home in range(self.ranks.count):
            places = [place for client, place in visitors.items() if self.homes[client] == home]
            parcels.append({name: rows[places] for name, rows in visiting.items()} if places else {})
        arrived = self.ranks.exchange("rows that come home", parcels)
        for clients, part in zip(away, arrived, strict=True):
            for name, rows in part.items():
                self.write(name, [client for client in clients if self._place[client] >= 0], rows)

    def dismiss(self) -> None:
        """Forget the visitors, of whom nothing has changed."""
        self._visitors, self._visiting = {}, {}
        self._away = []

    # ------------------------------------------------------------------ in checkpoints

    def whole(self) -> Values:
        """Return the rows of all clients as a checkpoint of the first rank names them; nothing on other ranks."""
        own = {self._key(name): self.all_rows(name) for name in self.names}
        if self.ranks.count == 1:
            return own
        found: Values = {}
        for key, rows in own.items():
            parcels: list[Values] = [{} for _ in range(self.ranks.count)]
            parcels[0] = {key: rows}
            parts = self.ranks.exchange("a checkpoint's rows", parcels)
            if self.ranks.rank == 0:
                found[key] = rows.new_empty(len(self.homes), *rows.shape[1:])
                for rank, part in enumerate(parts):
                    found[key][np.flatnonzero(self.homes == rank)] = part[key]
        return found

    def shapes(self) -> Values:
        """Return tensors without content, in the shapes of ``whole``."""
        rows = {self._key(name): self.all_rows(name) for name in self.names}
        return {
            key: torch.empty(len(self.homes), *v.shape[1:], dtype=v.dtype, device="meta") for key, v in rows.items()
        }

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Take this rank's part of the rows of all clients."""
        mine = {prefix + self._key(name) for name in self.names}
        own = {key: value[self.held] if key in mine else value for key, value in state_dict.items()}
        super()._load_from_state_dict(own, prefix, *others)
