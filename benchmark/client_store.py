"""The state that belongs to each client and outlives a round."""

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from benchmark.federation import Values
from benchmark.placing import picked, placed


class ClientStore(nn.Module):
    """One row per client and tensor, held in host memory; only the rows of a cohort travel to the device.

    The rows are buffers, so that saved state holds those of all clients.

    Args:
        initial: per name, the value every client starts from, any shape.
        num_clients: N, number of rows.
    """

    def __init__(self, initial: Mapping[str, Tensor], num_clients: int) -> None:
        super().__init__()
        self.names = tuple(initial)
        self._places = _Places()
        for name, value in initial.items():
            rows = value.detach().cpu().unsqueeze(0).repeat(num_clients, *(1,) * value.ndim)
            self.register_buffer(self._key(name), rows)

    @staticmethod
    def _key(name: str) -> str:
        return name.replace(".", "/")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Stay in host memory wherever the module around it goes; take its type of numbers (float64 in 64-true)."""
        for name, rows in self.named_buffers():
            setattr(self, name, rows.to(fn(rows[:0]).dtype))
        return self

    def all_rows(self, name: str) -> Tensor:
        """Return the whole [N, ...] tensor of a name."""
        rows = getattr(self, self._key(name))
        assert isinstance(rows, Tensor)
        return rows

    def rows(self, name: str, clients: Sequence[int], device: torch.device) -> Tensor:
        """Copy the rows of these clients, [K, ...], to ``device``."""
        held = self.all_rows(name)
        return placed(picked(held, self._places.of(clients, held.device)), device)

    def rows_of(self, names: Mapping[str, str], clients: Sequence[int], device: torch.device) -> Values:
        """Copy the rows of these clients of several tensors: ``names`` tells under which name each one is kept."""
        return {name: self.rows(kept, clients, device) for name, kept in names.items()}

    def write(self, name: str, clients: Sequence[int], values: Tensor) -> None:
        """Replace the rows of these clients by ``values`` [K, ...]."""
        held = self.all_rows(name)
        held[self._places.of(clients, held.device)] = placed(values.detach(), held.device).to(held.dtype)


class _Places:
    """Numbers of rows, where these lie; those of a cohort are asked for again and again.

    An object of its own: what changes in a module is taken for a change of the method.
    """

    def __init__(self) -> None:
        self._last: tuple[tuple[int, ...], torch.device, Tensor] | None = None

    def of(self, clients: Sequence[int], device: torch.device) -> Tensor:
        """Return them as int64 [K] on the device."""
        numbers = tuple(clients)
        if self._last is None or self._last[:2] != (numbers, device):
            self._last = (numbers, device, placed(torch.tensor(numbers, dtype=torch.int64), device))
        return self._last[2]
