"""Bytes on the wire, counted from the tensors that are placed in the messages."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Traffic:
    """Bytes and numbers that travelled in each round, down (server to client) and up, and between how many clients.

    A row of ``rounds`` is ``[clients, bytes down, bytes up, numbers down, numbers up]``; of what goes down, ``ends``
    tells what is sent after the aggregation, ``[bytes, numbers]`` by the round's number.
    """

    def __init__(self) -> None:
        self.rounds: list[list[int]] = []
        self.ends: dict[int, list[int]] = {}

    def start_round(self) -> None:
        """Begin the next round's row."""
        self.rounds.append([0, 0, 0, 0, 0])

    def down(self, clients: int, message: Sequence[Tensor]) -> None:
        """Count what so many clients receive, this message or one of its shape each."""
        self.rounds[-1][0] += clients
        self._count(clients, message, 1)

    def up(self, clients: int, message: Sequence[Tensor], size: tuple[int, int] | None = None) -> None:
        """Count what so many clients upload: this message each, or bytes and numbers of another form of it."""
        self._count(clients, message, 2, size)

    def answered(self, size: int, numbers: int) -> None:
        """Count bytes and numbers that all clients together receive after the aggregation of the last round."""
        self.ends[len(self.rounds)] = [size, numbers]
        self.rounds[-1][1] += size
        self.rounds[-1][3] += numbers

    def _count(
        self, clients: int, message: Sequence[Tensor], column: int, other: tuple[int, int] | None = None
    ) -> None:
        row, (size, numbers) = self.rounds[-1], other or size_of(message)
        row[column] += clients * size
        row[column + 2] += clients * numbers

    def per_client(self) -> dict[str, float]:
        """Return means per participating client and round; zeros if nothing has run."""
        clients = sum(row[0] for row in self.rounds)
        names = ("down_bytes", "up_bytes", "down_floats", "up_floats")
        means = {name: sum(row[i] for row in self.rounds) / max(clients, 1) for i, name in enumerate(names, start=1)}
        ends = {"end_bytes": 0, "end_floats": 1} if self.ends else {}
        return means | {name: sum(end[i] for end in self.ends.values()) / max(clients, 1) for name, i in ends.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the rows, as plain numbers."""
        return {"rounds": self.rounds, "ends": dict(self.ends)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rows."""
        self.rounds = [list(row) for row in state["rounds"]]
        self.ends = {number: list(end) for number, end in state.get("ends", {}).items()}  # none in older checkpoints


def size_of(message: Sequence[Tensor]) -> tuple[int, int]:
    """Return the bytes and the numbers of a message."""
    sizes = [(tensor.numel() * tensor.element_size(), tensor.numel()) for tensor in message]
    return sum(size for size, _ in sizes), sum(numbers for _, numbers in sizes)
