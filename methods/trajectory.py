"""Evaluate a weighted mean of a federation's shared values over its rounds; training goes on without it."""

import math
from typing import Any

from benchmark.federation import Broadcast, Round, Terms, Uploads, Values
from benchmark.server import ServerRule

#: Shape of the Beta distribution whose density weights the rounds (TRIP).
SHAPE = 0.2


class TrajectoryRule(ServerRule):
    """FedAvg whose values are evaluated as their weighted mean over the rounds: the base of the rules that say how."""

    def log_weight_of(self, number: int) -> float:
        """Return the logarithm of the weight of a round, from 1."""
        raise NotImplementedError

    @property
    def reads_rows(self) -> bool:
        """Return no: all it makes is made of means."""
        return False

    def start(self, initial: Values, terms: Terms) -> None:
        """Begin with no round."""
        super().start(initial, terms)
        self.averaged: Values = {}
        #: logarithm of the sum of weights: those of early rounds may be too small for a number themselves
        self.log_weight = -math.inf

    def get_extra_state(self) -> dict[str, Any]:
        """Return the mean until now, and its weight."""
        return {"averaged": self.averaged, "log_weight": self.log_weight}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take what ``get_extra_state`` gave."""
        self.averaged, self.log_weight = state["averaged"], state["log_weight"]

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Send the values of the last round to train, and their mean to be evaluated."""
        return Broadcast(dict(shared) if round.clients else {**shared, **self.averaged})

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Average the uploads, and add what came of it to the mean over the rounds."""
        made = super().aggregate(round, shared, uploads)
        self.add(made, self.log_weight_of(round.number))
        return made

    def add(self, values: Values, log_weight: float) -> None:
        """Add values to the mean, with a weight."""
        most = max(self.log_weight, log_weight)
        self.log_weight = most + math.log(math.exp(self.log_weight - most) + math.exp(log_weight - most))
        part = math.exp(log_weight - self.log_weight)
        for name, value in values.items():
            before = self.averaged.get(name, value).to(value)  # after a resume it is on the CPU
            self.averaged[name] = before + part * (value - before)


class BetaTrajectory(TrajectoryRule):
    """FedAvg whose values are evaluated as their Beta-weighted mean over the rounds; training goes on without it.

    Round i of T, from 1, has the weight ``w_i = Beta(0.2, 0.2)((i - 1/2) / (T + 1))``: the first rounds and the last
    count most. A round after these counts as a last one.

    Args:
        rounds: T; None for those that are planned.
        with_start: the initial values are part of the mean too, with the weight of the first round.
    """

    def __init__(self, rounds: int | None, with_start: bool) -> None:
        super().__init__()
        self.rounds, self.with_start = rounds, with_start
        self.follows_rounds = rounds is None

    def log_weight_of(self, number: int) -> float:
        """Return ``log w_i``."""
        place = (number - 0.5) / (max(number, self.rounds or self.terms.rounds) + 1)
        norm = 2 * math.lgamma(SHAPE) - math.lgamma(2 * SHAPE)
        return (SHAPE - 1) * (math.log(place) + math.log1p(-place)) - norm

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Average the uploads; the mean over the rounds may begin with the values before."""
        if self.with_start and not self.averaged:
            self.add(shared, self.log_weight_of(1))
        return super().aggregate(round, shared, uploads)


class AveragedTrajectory(TrajectoryRule):
    """FedAvg whose values are evaluated as their Gaussian-weighted mean over the rounds; training goes on without it.

    ``m_t = sum_{i <= t} w_i theta^i / sum_{i <= t} w_i`` with ``w_i = exp(-(i - mean)^2 / (2 spread^2))``.

    Args:
        mean: the round with the greatest weight; None is 0.75 of the planned rounds.
        spread: in rounds; None is 0.05 of the planned rounds.
    """

    def __init__(self, mean: float | None = None, spread: float | None = None) -> None:
        super().__init__()
        self.mean, self.spread = mean, spread
        self.follows_rounds = mean is None or spread is None

    def log_weight_of(self, number: int) -> float:
        """Return ``log w_i``."""
        rounds = max(number, self.terms.rounds)
        mean = 0.75 * rounds if self.mean is None else self.mean
        spread = 0.05 * rounds if self.spread is None else self.spread
        return -((number - mean) ** 2) / (2 * spread**2)
