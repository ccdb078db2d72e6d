"""A study's file, a SQLite database of Optuna: opened, and checked as a whole, before anything follows from it."""

import logging
import math
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmark.errors import ConfigurationError, causes
from benchmark.metrics import lower_is_better
from benchmark.records.record import RunRecord
from benchmark.records.record_file import is_finished, read_record
from benchmark.tuning.task import Task

#: Seconds for which a file that another program has just locked is asked for again.
PATIENCE = 5
#: States of a trial that has ended, and what they are called here.
ENDED = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "diverged"}
ADVICE = "put back a copy, or move the file away to tune anew (runs that are there are not run again)"


def optuna_library() -> Any:
    """Optuna, without its remarks.

    Raises:
        ConfigurationError: it is missing.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigurationError("tuning needs Optuna: pip install 'federated-prompt-benchmark[tune]'") from error
    optuna.logging.set_verbosity(logging.ERROR)
    return optuna


def open_study(path: Path, task: Task, runs_dir: Path, pruner: Any) -> tuple[Any, Any]:
    """Open a task's study, or begin it where there is no file, and check all that it holds.

    Args:
        path: of the file.
        task: what is tuned.
        runs_dir: of the runs, with whose records the trials are compared.
        pruner: of Optuna.

    Returns:
        Optuna's storage and study.

    Raises:
        ConfigurationError: the file is none of a study, is damaged, locked or cannot be written; it is the study of
            another task; or a trial is not as one that has ended here. The file stays as it was.
    """
    optuna = optuna_library()
    _check_database(path)
    with told(path):
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": PATIENCE}})
    try:
        with told(path):
            direction = "minimize" if lower_is_better(task.metric) else "maximize"
            study = optuna.create_study(
                storage=storage, study_name=task.name, direction=direction, pruner=pruner, load_if_exists=True
            )
            found = [each.name.lower() for each in study.directions]
            if found != [direction]:
                raise ConfigurationError(
                    f"the study {path} is to {' and '.join(found) or 'do nothing'}, expected to {direction} the "
                    f"{task.metric}; {ADVICE}"
                )
            trials = study.get_trials(deepcopy=False)
            _check_facts(study, path, task, any(trial.state.is_finished() for trial in trials))
            for trial in trials:
                wrong = _wrong(trial, task, runs_dir)
                if wrong:
                    raise ConfigurationError(f"the study {path}: trial {trial.number} has {wrong}; {ADVICE}")
    except BaseException:
        storage.engine.dispose()
        raise
    return storage, study


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Say in one line what is wrong with a study's file, whichever library meets it.

    Raises:
        ConfigurationError: instead of the library's error.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:  # of SQLite, SQLAlchemy, alembic, Optuna, JSON and whatever reads wrong values
        said = [" ".join(str(each).split()) for each in causes(error)]
        if any("database is locked" in each for each in said):
            raise ConfigurationError(
                f"the study {path} is locked by another program, such as a dashboard; end that, then try again"
            ) from error
        raise ConfigurationError(
            f"the study {path} cannot be used ({type(error).__name__}: {said[0][:200]}); {ADVICE}"
        ) from error


def score_of(record: RunRecord, task: Task) -> float | None:
    """Return the score of a trial: the metric on split ``val``, averaged over clients, in the last round.

    None is returned where the average is not finite, or the run has no value of the metric: such a trial has diverged.
    """
    of_val = record.summary.get(task.point, {}).get("val", {})
    average = of_val[task.metric]["last"]["average"] if task.metric in of_val else None
    return None if average is None else float(average)


def _check_database(path: Path) -> None:
    """Refuse what is no SQLite database that is whole and can be written now."""
    with told(path):
        try:
            kind = path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISREG(kind):
            what = "a folder" if stat.S_ISDIR(kind) else "a link" if stat.S_ISLNK(kind) else "no regular file"
            raise ConfigurationError(f"the study {path} is {what}; expected a file of SQLite: move it away")
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", timeout=PATIENCE, uri=True)) as database:
            (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
            if found != "ok":
                raise ConfigurationError(f"the study {path} is damaged ({' '.join(found.split())[:100]}); {ADVICE}")
            database.execute("BEGIN IMMEDIATE")
            database.rollback()


def _check_facts(study: Any, path: Path, task: Task, has_trials: bool) -> None:
    """Refuse a study of another task; of a new one, note what it is of."""
    facts, before = task.facts, study.user_attrs.get("tuned")
    if before is None and not has_trials:
        study.set_user_attr("tuned", facts)
        return
    if not isinstance(before, dict):
        raise ConfigurationError(f"the study {path} does not say what it tunes; {ADVICE}")
    changed = [name for name in facts if before.get(name) != facts[name]]
    if changed:
        raise ConfigurationError(
            f"the study {path} has another {' and '.join(changed)}: "
            f"{str({name: before.get(name) for name in changed})[:200]} there, "
            f"{str({name: facts[name] for name in changed})[:200]} here; remove the file to tune anew (runs that "
            "are there are not run again)"
        )
    if not isinstance(study.user_attrs.get("images"), str | None):
        raise ConfigurationError(f"the study {path} does not say of which images it is; {ADVICE}")


def _wrong(trial: Any, task: Task, runs_dir: Path) -> str:
    """Return the first thing in a stored trial that no trial of the task can have; empty if nothing is wrong."""
    rounds = set(trial.intermediate_values) - set(range(1, task.rounds + 1))
    if rounds:
        return f"scores of round {min(rounds)}, expected 1 to {task.rounds}"
    if not trial.state.is_finished():
        return ""
    sizes = {choice.option: len(choice.values) for choice in task.choices}
    if set(trial.params) != set(sizes):
        return f"values of {', '.join(trial.params) or 'nothing'}, expected {', '.join(sizes)}"
    for option, position in trial.params.items():
        if position not in range(sizes[option]):
            return f"the value {position!r} of {option}, expected a position from 0 to {sizes[option] - 1}"
    run, seconds = trial.user_attrs.get("run"), trial.user_attrs.get("seconds")
    expected = task.trial(trial.params).name
    if run != expected:
        return f"the run {str(run)[:80]}, expected {expected}"
    if not _is_number(seconds) or seconds < 0:
        return f"seconds {str(seconds)[:80]}, expected a number from 0 on"
    if trial.state.name != "COMPLETE":
        return ""
    if not _is_number(trial.value):
        return f"the score {trial.value}, expected a number"
    if is_finished(runs_dir / run):
        recorded = score_of(read_record(runs_dir / run), task)
        if recorded is None or not math.isclose(recorded, trial.value, rel_tol=1e-9):
            return f"the score {trial.value}, and the record of its run {runs_dir / run} has {recorded}"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
