"""Scalars that clients report of their local training: means over a client's steps of a round."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmark.engine.cohort import Cohort
from benchmark.federation import Values


class Reports:
    """The reported scalars by name, float64 [N], NaN for a client that did not take part; emptied by each evaluation.

    Args:
        num_clients: N.
    """

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self._values: dict[str, Tensor] = {}

    def add(self, cohort: Cohort, rows: Sequence[int], totals: Values) -> None:
        """Add the scalars that the steps of these rows of a cohort reported; ``totals`` are its in host memory."""
        chosen = list(rows)
        for name, total in totals.items():
            if name not in self._values:
                self._values[name] = torch.full((self.num_clients,), math.nan, dtype=torch.float64)
            steps = cohort.totals[name][1]
            self._values[name][[cohort.clients[k] for k in chosen]] = total[chosen] / steps[chosen]

    def of(self, clients: Sequence[int]) -> dict[str, list[float]]:
        """Return the numbers of these clients, by name."""
        return {name: values[list(clients)].tolist() for name, values in self._values.items()}

    def take_in(self, clients: Sequence[int], numbers: dict[str, list[float]]) -> None:
        """Replace the numbers of these clients, by name, with the result of another rank's ``of``; skip NaN."""
        for name, given in numbers.items():
            own = self._values.setdefault(name, torch.full((self.num_clients,), math.nan, dtype=torch.float64))
            new, chosen = torch.tensor(given, dtype=torch.float64), list(clients)
            own[chosen] = torch.where(new.isnan(), own[chosen], new)

    def put(self, name: str, values: Tensor) -> None:
        """Add a number of every client, [N], that is not made of steps; NaN of a client that another rank tells of."""
        self._values[name] = values.double()

    def mean(self, name: str) -> float | None:
        """Return the mean over the clients that have reported it so far, if any has."""
        return self._values[name].nanmean().item() if name in self._values else None

    def state_dict(self) -> dict[str, Tensor]:
        """Return what was reported since the last evaluation."""
        return dict(self._values)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what ``state_dict`` gave."""
        self._values = dict(state)

    def take(self) -> dict[str, Tensor]:
        """Return everything that was reported since the last time."""
        taken, self._values = self._values, {}
        return {name: values for name, values in taken.items() if not values.isnan().all()}
