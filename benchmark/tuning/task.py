"""The tuning of a row: its search space, a trial, and the choice of the best trial's values."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.cells.identity import Cell, with_overrides
from benchmark.config.given_options import given_options
from benchmark.errors import ConfigurationError
from benchmark.metrics import lower_is_better
from benchmark.records.hashes import canonical
from benchmark.tables.numbers import scaled
from benchmark.tuning.space import Choice


@dataclass(frozen=True)
class Task:
    """The task of a study: a row on a data group, and its search space.

    Attributes:
        row: label of the table's row.
        group: name of the data group.
        name: name of the study.
        cell: a trial without its values.
        choices: the options and the values to try.
        point: evaluation point at which the row is read.
        metric: metric of split ``val``, averaged over clients, in the last round.
        rounds: number of rounds of a trial.
        trials: number of trials.
    """

    row: str
    group: str
    name: str
    cell: Cell
    choices: tuple[Choice, ...]
    point: str
    metric: str
    rounds: int
    trials: int

    @property
    def combinations(self) -> int:
        """Return how many combinations of values there are."""
        return math.prod(len(choice.values) for choice in self.choices)

    @property
    def tries_all(self) -> bool:
        """Return whether every combination of values is tried: as many trials are asked for as there are."""
        return self.trials >= self.combinations

    def untried(self, tried: Iterable[Mapping[str, Any]]) -> int:
        """Return how many combinations are not among these, values or positions by option."""
        return self.combinations - len({canonical(dict(each)) for each in tried})

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that must not change during the study, as plain JSON values; the number of trials may change."""
        facts = {
            "options": given_options(self.cell.configs, self.cell.overrides),
            "seed": self.cell.seed,
            "space": {choice.option: list(choice.values) for choice in self.choices},
            "point": self.point,
            "metric": self.metric,
        }
        return dict(json.loads(json.dumps(facts, default=str)))  # default: YAML knows dates

    @property
    def hash(self) -> str:
        """Stands for :attr:`facts`; hexadecimal."""
        return hashlib.sha256(canonical(self.facts)).hexdigest()[:16]

    def best(self, trials: Sequence["Trial"]) -> "Trial | None":
        """The complete trial with the best score, the first of equals; None where there is none.

        Scores count as they are written down, so that these choose as those do that are read again.
        """
        complete = [trial for trial in trials if trial.state == "complete"]
        sign = -1 if lower_is_better(self.metric) else 1
        return max(complete, key=lambda trial: sign * (self.written(trial.score) or 0.0), default=None)

    def written(self, score: float | None) -> float | None:
        """A score as it is written down: in per cent where the metric is shown so, with six digits."""
        return None if score is None else round(scaled(score, self.metric), 6)

    def chosen(self, trials: Sequence["Trial"]) -> tuple[str, ...]:
        """Return the arguments that give a run the best trial's values and note in its record where they come from.

        Raises:
            ConfigurationError: no trial was completed.
        """
        best = self.best(trials)
        if best is None:
            raise ConfigurationError(
                f"none of the {len(trials)} trials of {self.row} came to its end with a finite {self.metric} on the "
                "held-out images; lower the rates of its search space, or hold out enough images for the metric"
            )
        positions = {choice.option: choice.values.index(best.values[choice.option]) for choice in self.choices}
        facts = json.dumps({"trials": len(trials), "chosen_on": "val", "study": self.hash})
        return (*self.arguments(positions), f"--tuning={facts}")

    def trial(self, positions: dict[str, int]) -> Cell:
        """The run with the values at these positions."""
        return with_overrides(self.cell, self.arguments(positions))

    def arguments(self, positions: dict[str, int]) -> tuple[str, ...]:
        """Return the command-line arguments that give a run the values at these positions."""
        return tuple(choice.argument(positions[choice.option]) for choice in self.choices)

    def values(self, positions: dict[str, int]) -> dict[str, Any]:
        """The values at these positions, by option."""
        return {choice.option: choice.values[positions[choice.option]] for choice in self.choices}


@dataclass(frozen=True)
class Trial:
    """A trial that has ended.

    Attributes:
        number: from 0 on; 0 has the row's own values.
        state: ``complete``; ``pruned``, as it was worse than half of those before it in the same round; or
            ``diverged``, as its numbers were no numbers any more.
        values: by option.
        rounds: of which the study knows a score.
        seconds: that it took.
        score: in the last of these rounds; None where there is none.
        run: name of its directory.
    """

    number: int
    state: str
    values: dict[str, Any]
    rounds: int
    seconds: float
    score: float | None
    run: str
