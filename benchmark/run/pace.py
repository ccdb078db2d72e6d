"""The progress of a run, and an estimate of its remaining time."""

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal


@dataclass
class Pace:
    """Counts local steps and clocks rounds; all of it is known to the host, so that nobody waits for a device.

    Attributes:
        rounds: of the whole run; 0 where nothing is trained.
        every: rounds from one evaluation to the next.
        number: the round; 0 before any training.
        part: of the round.
        steps: local steps of the round, of all its clients together.
        step: how many of them are done.
        clients: that are stepped now.
        loss: the mean that is known last.
        evaluated: the part of the evaluation that is done.
    """

    rounds: int
    every: int = 1
    number: int = 0
    part: Literal["training", "evaluation", "end"] = "end"
    steps: int = 0
    step: int = 0
    clients: tuple[int, ...] = ()
    loss: float | None = None
    evaluated: float = 0.0
    _round_began: float = 0.0
    _part_began: float = 0.0
    _steps_before: int = 0
    _training_seconds: float = 0.0
    _evaluation_seconds: float = 0.0
    _under_way: bool = False

    def begin_round(self, number: int, steps: int) -> None:
        """The local training of a round begins."""
        self.number, self.steps, self.step = number, steps, 0
        self.part = "training"
        self._round_began = self._part_began = time.monotonic()

    def begin_evaluation(self) -> None:
        """The evaluation begins, after the round's training or before any."""
        self._end_part()
        self.part, self.evaluated = "evaluation", 0.0

    def begin_batches(self) -> None:
        """The batches of a part begin: what the run's first part did before, as making features, comes once."""
        if not self._under_way:
            self._under_way, self._part_began = True, time.monotonic()

    def end_evaluation(self) -> None:
        """The evaluation is over."""
        self._end_part()

    def end_round(self) -> float:
        """The round is over; return its seconds."""
        self._end_part()
        return time.monotonic() - self._round_began

    def _end_part(self) -> None:
        now = time.monotonic()
        if self.part == "training":
            self._training_seconds += now - self._part_began
            self._steps_before += self.step
        elif self.part == "evaluation":
            self._evaluation_seconds = now - self._part_began
        self.part, self._part_began = "end", now

    @property
    def done(self) -> float:
        """The part of all rounds' local training that is done."""
        within = self.step / self.steps if self.steps else 0.0
        return min(1.0, (max(self.number - 1, 0) + within) / max(self.rounds, 1))

    @property
    def left(self) -> float | None:
        """Seconds until the end, if what comes takes as long as what was; None before the first step."""
        now, training = time.monotonic(), self.part == "training"
        steps = self._steps_before + (self.step if training else 0)
        if not steps:
            return None
        seconds = self._training_seconds + (now - self._part_began if training else 0.0)
        ahead = (self.rounds - self.number) * self.steps + (self.steps - self.step if training else 0)
        evaluations = self.rounds // self.every - self.number // self.every
        rest = seconds / steps * ahead + evaluations * self._evaluation_seconds
        if self.number % self.every == 0 and self.part != "end":
            spent = 0.0 if training else now - self._part_began
            rest += max(0.0, self._evaluation_seconds - spent)
        return rest


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, such as 0:01:30."""
    return str(timedelta(seconds=round(seconds)))
