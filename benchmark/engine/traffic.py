"""Bytes on the wire, counted from the tensors that are placed in the messages."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Traffic:
    """What travelled in each round: bytes and numbers, down (server to client) and up, and between how many clients.

    A row of ``rounds`` is ``[clients, bytes down, bytes up, numbers down, numbers up]``.
    """

    def __init__(self) -> None:
        self.rounds: list[list[int]] = []

    def start_round(self) -> None:
        """Begin the next round's row."""
        self.rounds.append([0, 0, 0, 0, 0])

    def down(self, clients: int, message: Sequence[Tensor]) -> None:
        """Count what so many clients receive, this message or one of its shape each."""
        self.rounds[-1][0] += clients
        self._count(clients, message, 1)

    def up(self, clients: int, message: Sequence[Tensor]) -> None:
        """Count what so many clients upload."""
        self._count(clients, message, 2)

    def _count(self, clients: int, message: Sequence[Tensor], column: int) -> None:
        row = self.rounds[-1]
        row[column] += clients * sum(tensor.numel() * tensor.element_size() for tensor in message)
        row[column + 2] += clients * sum(tensor.numel() for tensor in message)

    def per_client(self) -> dict[str, float]:
        """Return means per participating client and round; zeros if nothing has run."""
        clients = sum(row[0] for row in self.rounds)
        names = ("down_bytes", "up_bytes", "down_floats", "up_floats")
        return {name: sum(row[i] for row in self.rounds) / max(clients, 1) for i, name in enumerate(names, start=1)}

    def state_dict(self) -> dict[str, Any]:
        """Return the rows, as plain numbers."""
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rows."""
        self.rounds = [list(row) for row in state["rounds"]]
