"""One row's tuning: an Optuna study whose trials are ordinary runs, one after the other, scored on ``val`` alone.

A trial's values follow from the study's seed, the trial's number, and how the trials before it turned out; so they are
the same however many studies go on at once, and after a kill at any moment. The study is a SQLite file; it holds which
values were tried and what they came to, the runs hold everything else.
"""

import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmark.cells.identity import Cell
from benchmark.cells.outcome import Outcome
from benchmark.errors import ConfigurationError
from benchmark.files import refuse_link
from benchmark.locks import FileLock
from benchmark.records.evaluations import read_evaluations
from benchmark.records.metrics_table import PARTS
from benchmark.records.record import RunRecord
from benchmark.records.record_file import is_finished, read_record
from benchmark.records.source_code import changed_files
from benchmark.records.summary import average_by_round
from benchmark.records.words import metric_number
from benchmark.seeds import derived_seed
from benchmark.tuning.study_file import ENDED, open_study, optuna_library, score_of, told
from benchmark.tuning.task import Task, Trial

#: Trials drawn at random, the row's own values among them, before earlier ones guide what is drawn.
RANDOM_TRIALS = 5
#: Trials that have come to their end before any is ended early.
COMPLETE_TRIALS = 4
#: What the engine says of a run whose values are no numbers any more.
DIVERGED = "not finite"


class Study:
    """The trials of a task, in its file and in the folder of runs.

    Args:
        task: what is tuned.
        folder: of the studies' files.
        runs_dir: of the runs.
        present_code: begin anew if other code than the present one made a run among the trials; the old file is kept,
            with another ending.

    Raises:
        ConfigurationError: Optuna is missing, another process has the study, or its file is refused
            (:func:`benchmark.tuning.study_file.open_study`).
    """

    def __init__(self, task: Task, folder: Path, runs_dir: Path, present_code: bool = False) -> None:
        optuna_library()
        self.task = task
        self.runs_dir = runs_dir
        self.error = ""
        refuse_link(folder)
        self.file = folder / f"{task.name}.db"
        self.lock = FileLock(folder / f"{task.name}.lock")
        self.lock.take(lambda who: f"the study {task.name} is being tuned by {who}; wait for it to end")
        try:
            self._load()
            if present_code and any(changed_files(record.code or {}) for record in self.records):
                self.storage.engine.dispose()
                self.file.rename(self.file.with_suffix(f".{time.time_ns()}"))
                self._load()
        except BaseException:
            self.lock.release()
            raise
        self.trial: Any = None  # of Optuna
        self.cell: Cell | None = None
        self.run_dir = runs_dir  # of the present trial
        self.pruned = 0
        self.seen = 0  # evaluations of the present trial that were looked at

    def _load(self) -> None:
        warmup = max(1, self.task.rounds // 3)
        pruner = optuna_library().pruners.MedianPruner(COMPLETE_TRIALS, n_warmup_steps=warmup)
        self.storage, self.optuna = open_study(self.file, self.task, self.runs_dir, pruner)

    def _wanted(self) -> dict[str, int] | None:
        """The values that the next trial is to have, by position; None where they are drawn.

        The row's own come first. Where a study has as many trials as there are combinations, those that no trial has
        follow in their order. Optuna's own samplers for this stop a loop of Optuna's, and there is none here.
        """
        own = {choice.option: choice.own for choice in self.task.choices}
        tried = [trial.params for trial in self.optuna.trials]
        if not tried:
            return own
        if not self.task.tries_all:
            return None
        every = product(*(range(len(choice.values)) for choice in self.task.choices))
        names = [choice.option for choice in self.task.choices]
        return next((each for at in every if (each := dict(zip(names, at, strict=True))) not in tried), None)

    def close(self) -> None:
        """Let go of the study."""
        self.storage.engine.dispose()
        self.lock.release()

    @property
    def done(self) -> bool:
        """Return whether all trials have ended."""
        return len(self._ended) >= self.total

    @property
    def total(self) -> int:
        """Trials in all: where every combination is tried, one for each, and those of fewer trials that repeat one."""
        if not self.task.tries_all:
            return self.task.trials
        ended = self._ended
        return max(self.task.trials, len(ended) + self.task.untried(trial.params for trial in ended))

    @property
    def _ended(self) -> list[Any]:
        return [trial for trial in self.optuna.trials if trial.state.is_finished()]

    def next(self) -> Cell | None:
        """The run of the trial that comes now, one that was begun first; None where all have ended.

        Each value is drawn with a sampler of its own, so that a trial can be begun, killed and begun again.
        """
        optuna = optuna_library()
        if self.done:
            self.trial = self.cell = None
            return None
        begun = [trial for trial in self.optuna.trials if trial.state == optuna.trial.TrialState.RUNNING]
        number = begun[0].number if begun else len(self._ended)
        states = {trial.state for trial in self.optuna.trials}
        waiting = optuna.trial.TrialState.WAITING in states  # a killed process noted it, and did not begin it
        if not begun and not waiting and (wanted := self._wanted()) is not None:
            self.optuna.enqueue_trial(wanted)
        self._seed(number, "all options")
        # Optuna has no public way to go on with a trial that a killed process began.
        self.trial = optuna.trial.Trial(self.optuna, begun[0]._trial_id) if begun else self.optuna.ask()
        positions = {}
        for choice in self.task.choices:
            self._seed(number, choice.option)
            last = len(choice.values) - 1
            if choice.ordered:
                positions[choice.option] = self.trial.suggest_int(choice.option, 0, last)
            else:
                positions[choice.option] = self.trial.suggest_categorical(choice.option, list(range(last + 1)))
        self.pruned = self.seen = 0
        self.cell = self.task.trial(positions)
        self.run_dir = self.runs_dir / self.cell.name
        return self.cell

    def _seed(self, trial: int, drawn: str) -> None:
        seed = derived_seed(self.task.cell.seed, "tuning", trial, drawn) % 2**32
        self.optuna.sampler = optuna_library().samplers.TPESampler(n_startup_trials=RANDOM_TRIALS, seed=seed)

    def watch(self) -> int:
        """:meth:`pruned_after`, of a run that goes on: cheap as long as it has evaluated nothing new."""
        assert self.cell is not None
        there = len(list((self.run_dir / PARTS).glob("*")))
        if self.pruned or there == self.seen:
            return self.pruned
        self.seen = there
        return self.pruned_after()

    def pruned_after(self) -> int:
        """The round after which the present trial is given up; 0 while it is to go on.

        Rounds count in their order, whenever they are looked at: a quick run comes to the same end as a slow one.
        """
        assert self.cell is not None
        if self.pruned:
            return self.pruned
        known = self.optuna.trials[self.trial.number].intermediate_values
        for number, score in self._scores().items():
            # Of the last known round a killed process may have noted the score and not what follows from it.
            if 0 < number < self.task.rounds and (number not in known or number == max(known)):
                if number not in known:
                    self.trial.report(score, number)
                if self.trial.should_prune():
                    self.pruned = number
                    return number
        return 0

    def _scores(self) -> dict[int, float]:
        """Of each evaluated round of the present run the average over clients."""
        import pandas as pd

        try:
            tables = [table for _, table in read_evaluations(self.run_dir)]
        except ConfigurationError:  # it ends this very moment, and merges them
            return {}
        if not tables:
            return {}
        table = pd.concat(tables, ignore_index=True)
        sizes = [0] * (int(table["client"].max()) + 1)
        rounds, found = average_by_round(table, sizes, self.task.point, "val", self.task.metric)
        return dict(zip(map(int, rounds), map(float, found.get("average", ())), strict=True))

    def settle(self, outcome: Outcome, seconds: float) -> None:
        """Note how the present trial's run has ended; :attr:`error` says where no trial can be made of it."""
        states = optuna_library().trial.TrialState
        assert self.cell is not None
        diverged = outcome.run_dir is None and DIVERGED in outcome.error
        if outcome.run_dir is None and not outcome.ended_early and not diverged:
            log = f" (log: {outcome.log})" if outcome.log else ""
            self.error = f"{self.cell.name}: {outcome.error}{log}"
            return
        self.run_dir = outcome.run_dir or self.run_dir  # one that was there may lie among the kept ones
        pruned = self.pruned_after()
        score = None
        if outcome.run_dir is not None:
            record = read_record(outcome.run_dir)
            images = self.optuna.user_attrs.get("images") or record.images_sha256
            if record.images_sha256 not in (None, images):
                self.error = (
                    f"{outcome.run_dir} is a run on other images than the trials before it; remove it to run it on "
                    f"those again, or {self.file} to tune anew"
                )
                return
            self.optuna.set_user_attr("images", images)
            seconds = record.seconds["total"]
            score = score_of(record, self.task)
        self.trial.set_user_attr("run", self.cell.name)
        self.trial.set_user_attr("seconds", seconds)
        if pruned:
            self.optuna.tell(self.trial, state=states.PRUNED)
        elif diverged or score is None:
            self.optuna.tell(self.trial, state=states.FAIL)
        else:
            self.optuna.tell(self.trial, score)

    @property
    def trials(self) -> list[Trial]:
        """The first :attr:`total` of the ended trials."""
        return [
            Trial(
                trial.number,
                ENDED[trial.state.name],
                self.task.values(trial.params),
                self.task.rounds if trial.state.name == "COMPLETE" else max(trial.intermediate_values, default=0),
                trial.user_attrs["seconds"],
                trial.value if trial.value is not None else _last(trial.intermediate_values),
                trial.user_attrs["run"],
            )
            for trial in self._ended[: self.total]
        ]

    def last_line(self) -> str:
        """Say the last trial's values and score, and the best score so far."""
        task, trials = self.task, self.trials
        trial, best = trials[-1], task.best(trials)
        values = ", ".join(f"{option.rpartition('.')[2]} {value}" for option, value in trial.values.items())
        said = trial.state if trial.state != "pruned" else f"pruned after round {trial.rounds}"
        if trial.state == "complete" and trial.score is not None:
            said = f"val {task.metric} {metric_number(trial.score, task.metric)}"
        so_far = f" (best {metric_number(best.score, task.metric)})" if best and best.score is not None else ""
        return f"{task.row} on {task.group}, trial {len(trials)} of {self.total}: {values} -> {said}{so_far}"

    @property
    def records(self) -> list[RunRecord]:
        """Of the trials' runs, those that came to their end and are still there."""
        folders = dict.fromkeys(self.runs_dir / trial.run for trial in self.trials if trial.state == "complete")
        return [read_record(folder) for folder in folders if is_finished(folder)]


class Studies:
    """All studies of a table as the course of its cells: each has one trial at a time, and several go on at once.

    Two studies may have a trial in common; it is run once.
    """

    def __init__(self, studies: Sequence[Study]) -> None:
        self.studies = studies

    @property
    def total(self) -> int:
        """Trials of all studies."""
        return sum(study.total for study in self.studies)

    def first(self) -> list[Cell]:
        """The cells to begin with."""
        return [cell for study in self.studies if (cell := study.next()) is not None]

    def reason_to_end(self, cell: Cell) -> str:
        """Say that all studies that have it give it up."""
        rounds = [study.watch() for study in self._at(cell)]
        return f"pruned after round {max(rounds)}" if rounds and all(rounds) else ""

    def after(self, cell: Cell, outcome: Outcome, seconds: float) -> list[Cell]:
        """Tell the studies, print what the trial has come to, and give their next trials."""
        following = [_next(study, outcome, seconds) for study in self._at(cell)]
        return [cell for cell in following if cell is not None]

    def _at(self, cell: Cell) -> list[Study]:
        return [s for s in self.studies if s.cell is not None and s.cell.name == cell.name and not s.error]


def _next(study: Study, outcome: Outcome, seconds: float) -> Cell | None:
    """Tell a study how its trial has ended, and print it; its next one, if there is one and its file can be used."""
    try:
        with told(study.file):
            study.settle(outcome, seconds)
            if study.error:
                return None
            print(f"  {study.last_line()}", flush=True)
            return study.next()
    except ConfigurationError as error:
        study.error = str(error)
        return None


def _last(values: dict[int, float]) -> float | None:
    return values[max(values)] if values else None
