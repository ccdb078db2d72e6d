"""Bytes on the wire, counted from the tensors that are placed in the messages."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def message_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of a message's payload."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Traffic:
    """What travelled in each round: bytes and numbers, down (server to client) and up, and between how many clients.

    A row of ``rounds`` is ``[clients, bytes down, bytes up, numbers down, numbers up]``.
    """

    def __init__(self) -> None:
        self.rounds: list[list[int]] = []

    def start_round(self) -> None:
        """Begin the next round's row."""
        self.rounds.append([0, 0, 0, 0, 0])

    def down(self, message: Sequence[Tensor]) -> None:
        """Count what one client receives."""
        row = self.rounds[-1]
        row[0] += 1
        row[1] += message_bytes(message)
        row[3] += sum(tensor.numel() for tensor in message)

    def up(self, message: Sequence[Tensor]) -> None:
        """Count what one client uploads."""
        row = self.rounds[-1]
        row[2] += message_bytes(message)
        row[4] += sum(tensor.numel() for tensor in message)

    def per_client(self) -> dict[str, float]:
        """Means per participating client and round; zeros if nothing has run."""
        clients = sum(row[0] for row in self.rounds)
        names = ("down_bytes", "up_bytes", "down_floats", "up_floats")
        return {name: sum(row[i] for row in self.rounds) / max(clients, 1) for i, name in enumerate(names, start=1)}

    def state_dict(self) -> dict[str, Any]:
        """The rows, as plain numbers."""
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rows."""
        self.rounds = [list(row) for row in state["rounds"]]
