"""Tuning: the spaces of all methods, studies against a rule written out, kills, and that no test image is looked at."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from pydoc import locate
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from federation import Ragged, TinyImages, build, fit
from finished_run import write_finished_run
from hand_made_study import CHOICES, ROUNDS, after, curve, finish, opened, rows, run, states, task, write_round
from recorded_results import record_of
from refusal import refused

from benchmark.cells.identity import Cell, content_hash
from benchmark.cells.outcome import Outcome
from benchmark.cells.queue import run_cells
from benchmark.cells.work import Work
from benchmark.commands import main
from benchmark.errors import ConfigurationError
from benchmark.records.keeping import keep_record
from benchmark.records.record_file import read_record
from benchmark.run.command import resolved
from benchmark.tables.lines import Line
from benchmark.tables.run_table import chosen_table
from benchmark.tuning import tune
from benchmark.tuning.blocks import tuning_block
from benchmark.tuning.space import Choice, read_space, with_own_values
from benchmark.tuning.study import COMPLETE_TRIALS, Studies, Study
from benchmark.tuning.task import Trial
from benchmark.tuning.trials_file import Tuned, kept_trials, trials_csv
from benchmark.tuning.tune import tune_table
from datamodules.federated import FederatedDataModule
from datamodules.source import ImagePool
from methods.text_prompt import TextPromptMethod

pytest.importorskip("optuna")
from sqlalchemy import Engine, event

ROOT = Path(__file__).resolve().parents[3]
METHODS = sorted(path.stem for path in (ROOT / "configs" / "methods").glob("*.yaml"))


@pytest.fixture(autouse=True, scope="module")
def _studies_do_not_wait_for_the_disk() -> Iterator[None]:
    """Nothing here outlives a power cut, for which each of a study's hundreds of notes waits four times."""

    def connected(connection: Any, _: Any) -> None:
        connection.executescript("PRAGMA synchronous=OFF; PRAGMA journal_mode=MEMORY;")

    event.listen(Engine, "connect", connected)
    yield
    event.remove(Engine, "connect", connected)


# --- search spaces ---


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_space_of_options_that_it_takes(method: str) -> None:
    path = f"configs/methods/{method}.yaml"
    model = yaml.safe_load((ROOT / path).read_text())["model"]
    kind = locate(model if isinstance(model, str) else model["class_path"])
    configs = [path, f"configs/suites/{'digits_clip' if issubclass(kind, TextPromptMethod) else 'digits'}.yaml"]
    space = read_space(configs, method)
    assert bool(space) == (method not in ("zeroshotclip", "nearestclassmean"))
    given = [part for name in configs for part in ("--config", name)]
    choices = with_own_values(space, resolved(given), method)
    assert all(len(choice.values) > 1 for choice in choices)
    last = [choice.argument(len(choice.values) - 1) for choice in choices]
    taken = with_own_values(space, resolved([*given, *last]), method)
    assert [choice.values[choice.own] for choice in taken] == [choice.values[-1] for choice in choices]


def test_the_rows_own_values_join_its_space() -> None:
    config = {"model": {"lr": 0.02, "name": None, "size": 4}}
    choices = with_own_values({"model.lr": [0.1, 0.01], "model.name": [1, 2], "model.size": [4, 8]}, config, "A")
    assert [choice.values for choice in choices] == [(0.01, 0.02, 0.1), (None, 1, 2), (4, 8)]
    assert [choice.own for choice in choices] == [1, 0, 0]
    assert [choice.ordered for choice in choices] == [True, False, True]
    assert choices[1].argument(0) == "--model.name=null"
    with pytest.raises(ConfigurationError, match=r"row A: its search space has the option model.rate"):
        with_own_values({"model.rate": [1]}, config, "A")


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (None, "row A has no search space: none of method.yaml, run.yaml has search; write into the method's file"),
        ("[1]", "method.yaml: search: expected options and their values, got [1]"),
        ("", "method.yaml: search: expected options and their values, got None"),
        (
            "{lr: {values: [0.1]}}",
            "method.yaml: search: lr: expected a list of different values, got {'values': [0.1]}",
        ),
        ("{lr: []}", "search: lr: expected a list of different values, got []"),
        ("{lr: [0.1, 0.1]}", "search: lr: expected a list of different values"),
        ("{lr: {min: 0.1, max: 1}}", "search: lr: expected a list of different values"),
    ],
)
def test_a_space_of_another_form_is_refused(
    space: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("method.yaml").write_text("model: methods.FedAvg\n" + (f"search: {space}\n" if space is not None else ""))
    Path("run.yaml").write_text("seed_everything: 1\n")
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        read_space(["method.yaml", "run.yaml"], "A")


def test_ones_own_space_goes_before_the_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        f"base: [{ROOT}/configs/methods/fedavg.yaml]\nsearch: {{model.init_args.training.lr: [0.5, 0.7]}}\n"
    )
    assert "model.init_args.training.lr" in read_space(["configs/methods/fedavg.yaml"], "A")
    assert read_space(["mine.yaml"], "A") == {"model.init_args.training.lr": [0.5, 0.7]}
    assert "search" not in yaml.safe_dump(resolved(["--config", "mine.yaml", "--config", "suites/digits"]))


# --- studies, with runs that are written by hand ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    """A study whose trials have all ended, none of them killed; it is only read."""
    study = opened(tmp_path_factory.mktemp("whole"))
    run(study)
    yield study
    study.close()


def test_trials_are_pruned_and_chosen_as_the_rules_written_out_say(whole: Study) -> None:
    study = whole
    assert study.trials[0].values == {"model.lr": 0.03, "model.momentum": 0.0, "model.kind": "c"}
    complete: list[list[float]] = []
    for trial in study.trials:
        cell = study.task.trial({c.option: c.values.index(trial.values[c.option]) for c in CHOICES})
        assert (trial.run, trial.seconds) == (cell.name, 1.0 if trial.state == "pruned" and trial.number % 2 else 3.0)
        scores, pruned = curve(cell), 0
        for number in range(ROUNDS // 3, ROUNDS):  # the first third is for everybody
            enough = len(complete) >= COMPLETE_TRIALS
            if enough and max(scores[1 : number + 1]) < median(each[number] for each in complete) - 1e-12:
                pruned = number
                break
        assert (trial.state, trial.rounds) == (("pruned", pruned) if pruned else ("complete", ROUNDS))
        if not pruned:
            complete.append(scores)
            assert trial.score == pytest.approx(scores[-1])
    assert {trial.state for trial in study.trials} == {"complete", "pruned"}
    best = max(complete, key=lambda scores: scores[-1])
    chosen = study.task.best(study.trials)
    assert chosen is not None
    assert chosen.score == pytest.approx(best[-1])
    *values, facts = study.task.chosen(study.trials)
    assert values == [f"--{option}={json.dumps(value)}" for option, value in chosen.values.items()]
    assert json.loads(facts.removeprefix("--tuning=")) == {
        "trials": 10,
        "chosen_on": "val",
        "study": study.task.hash,
    }


def test_trials_that_are_read_again_choose_as_they_did(tmp_path: Path) -> None:
    """Scores that differ by no more than their rounding are equal, and the first of equals is chosen."""
    names = {choice.option: choice.values[0] for choice in CHOICES}
    scores = (0.5, 0.9, 0.9 + 1e-12, 0.7)
    made = [Trial(n, "complete", names, ROUNDS, 1.0, score, f"alpha-{n}") for n, score in enumerate(scores)]
    tuned = Tuned.by(task(trials=4), made)
    (tmp_path / "trials.csv").write_text(trials_csv([tuned]))
    again = kept_trials(tmp_path / "trials.csv", [tuned.task])[tuned.task.name]
    assert tuned.best is not None
    assert tuned.best.number == 1
    assert Tuned.by(tuned.task, again).arguments == tuned.arguments
    best = tuned.task.best(again)
    assert best is not None
    assert best.number == 1


def combinations(study: Study) -> list[tuple[float, float]]:
    return [(trial.values["model.lr"], trial.values["model.momentum"]) for trial in study.trials]


@pytest.mark.parametrize("killed", ["nowhere", "in a trial", "before a trial that is noted", "with fewer trials"])
def test_each_combination_is_tried_once_where_the_trials_suffice(
    killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = (
        Choice("model.lr", (0.01, 0.1, 1.0), 1),
        Choice("model.momentum", (0.0, 0.9), 0),
        replace(CHOICES[2], values=("c",), own=0),
    )
    study = opened(tmp_path, trials=4 if killed == "with fewer trials" else 6, choices=choices)
    cell = study.next()
    for _ in range(3 if killed == "with fewer trials" else 2):
        assert cell is not None
        cell = after(study, cell)
    if killed == "before a trial that is noted":
        assert cell is not None
        with monkeypatch.context() as patched:
            patched.setattr(study.optuna, "ask", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                after(study, cell)
    if killed != "nowhere":
        study.close()
        study = opened(tmp_path, trials=6, choices=choices)
    run(study)
    found = combinations(study)
    assert found[0] == (0.1, 0.0)  # the row's own
    assert sorted({*found}) == [(lr, momentum) for lr in (0.01, 0.1, 1.0) for momentum in (0.0, 0.9)]
    if killed == "with fewer trials":  # of which one was drawn twice
        assert (len(found), study.total, study.done) == (7, 7, True)
        (tmp_path / "trials.csv").write_text(trials_csv([Tuned.by(study.task, study.trials)]))
        assert len(kept_trials(tmp_path / "trials.csv", [study.task])[study.task.name]) == 7
        (tmp_path / "trials.csv").write_text(trials_csv([Tuned.by(study.task, study.trials[:6])]))
        assert kept_trials(tmp_path / "trials.csv", [study.task]) == {}  # one is still to be tried
    else:
        assert len(found) == 6
        assert found[1:] == [(0.01, 0.0), (0.01, 0.9), (0.1, 0.9), (1.0, 0.0), (1.0, 0.9)]
    study.close()


@pytest.mark.parametrize("kept", [False, True])
def test_a_study_sees_the_rounds_of_a_run_that_was_there(kept: bool, tmp_path: Path) -> None:
    study = opened(tmp_path, trials=1)
    cell = study.next()
    assert cell is not None
    outcome = finish((tmp_path / "kept" if kept else study.runs_dir) / cell.name, curve(cell))
    Studies([study]).after(cell, outcome, 1.0)
    (trial,) = study.optuna.trials
    assert sorted(trial.intermediate_values) == list(range(1, ROUNDS))
    study.close()


def test_a_killed_study_goes_on_to_the_same_trials_and_more_of_them_continue_it(whole: Study, tmp_path: Path) -> None:
    first = opened(tmp_path / "killed")
    cell = first.next()
    for _ in range(5):
        assert cell is not None
        cell = after(first, cell)
    assert cell is not None
    write_round(first.runs_dir / cell.name, curve(cell), 1)
    assert first.watch() == 0
    first.close()  # killed here: the sixth trial has begun and has ended its first round
    again = opened(tmp_path / "killed", trials=7)
    assert again.next() == cell
    run(again)
    again.close()
    more = opened(tmp_path / "killed")
    assert (len(more.trials), more.done) == (7, False)
    run(more)
    assert states(more) == states(whole)
    assert states(opened(tmp_path / "other", "beta-digits-s0")) == []
    more.close()


def test_a_verdict_that_a_kill_left_undone_is_given_again(whole: Study, tmp_path: Path) -> None:
    killed = opened(tmp_path / "killed")
    (given_up, *_) = [trial.number for trial in whole.trials if trial.state == "pruned" and trial.number % 2]
    cell = killed.next()
    for _ in range(given_up):
        assert cell is not None
        cell = after(killed, cell)
    assert cell is not None
    for number in range(1, whole.trials[given_up].rounds + 1):
        write_round(killed.runs_dir / cell.name, curve(cell), number)
    assert killed.watch() == whole.trials[given_up].rounds
    killed.close()  # killed here: the score is noted, the run goes on and comes to its end
    again = opened(tmp_path / "killed")
    assert again.next() == cell
    assert Studies([again]).reason_to_end(cell) == f"pruned after round {whole.trials[given_up].rounds}"
    run(again)
    assert states(again) == states(whole)
    again.close()


def test_what_a_study_is_of_must_not_change(tmp_path: Path) -> None:
    study = opened(tmp_path)
    with pytest.raises(ConfigurationError, match=r"alpha-digits-s0 is being tuned by process \d+ on .*; wait"):
        opened(tmp_path)
    study.close()
    with pytest.raises(ConfigurationError, match=r"alpha-digits-s0\.db has another space: .* remove the file to tune"):
        opened(tmp_path, choices=CHOICES[:2])
    opened(tmp_path, trials=20).close()


def test_trials_are_of_the_same_images(tmp_path: Path) -> None:
    study = opened(tmp_path, trials=3)
    cell = study.next()
    for images in ("a" * 64, "a" * 64, "b" * 64):
        assert cell is not None
        last = cell.name
        outcome = finish(study.runs_dir / last, curve(cell), images_sha256=images)
        cell = next(iter(Studies([study]).after(cell, outcome, 1.0)), None)
    assert (len(study.trials), study.done) == (2, False)
    assert study.error.startswith(f"{study.runs_dir / last} is a run on other images than the trials before it; remove")
    study.close()


def test_a_study_with_trials_of_other_code_begins_anew_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_method.py").write_text("rate = 0.1\n")
    digest = hashlib.sha256(b"rate = 0.1\n").hexdigest()

    def begun(present_code: bool) -> Study:
        return Study(task(trials=2), tmp_path / "studies", tmp_path / "runs", present_code)

    study = begun(True)
    cell = study.next()
    while cell is not None:
        outcome = finish(study.runs_dir / cell.name, curve(cell), code={"my_method": digest})
        cell = next(iter(Studies([study]).after(cell, outcome, 1.0)), None)
    assert [record.code for record in study.records] == [{"my_method": digest}] * 2
    study.close()
    for source, present_code, there in (("0.1", True, 2), ("1000", False, 2), ("1000", True, 0)):
        (tmp_path / "my_method.py").write_text(f"rate = {source}\n")
        study = begun(present_code)
        assert len(study.trials) == there
        study.close()
    assert len(list((tmp_path / "studies").glob("*.db"))) == 1
    assert len(list((tmp_path / "studies").iterdir())) == 3  # with the lock and the older study


def test_a_run_that_diverged_is_a_trial_and_one_that_failed_is_done_again(tmp_path: Path) -> None:
    study = opened(tmp_path, trials=2)
    course = Studies([study])
    cell = study.next()
    assert cell is not None
    assert course.after(cell, Outcome(None, "no space left on device", Path("log.txt")), 1.0) == []
    assert study.error == f"{cell.name}: no space left on device (log: log.txt)"
    study.close()
    study = opened(tmp_path, trials=2)
    course = Studies([study])
    assert course.first() == [cell]
    following = course.after(cell, Outcome(None, "error: training diverged: losses were not finite"), 2.0)
    assert [trial.state for trial in study.trials] == ["diverged"]
    assert course.after(following[0], Outcome(None, "values that were not finite"), 2.0) == []
    assert (course.total, study.done, study.task.best(study.trials)) == (2, True, None)
    with pytest.raises(ConfigurationError, match="none of the 2 trials of Alpha came to its end"):
        study.task.chosen(study.trials)
    study.close()


@pytest.mark.parametrize("metric", ["loss", "auroc"])
def test_a_finished_run_without_a_finite_score_is_a_trial_that_diverged(metric: str, tmp_path: Path) -> None:
    """Its loss on the images of a client is not finite, or the metric is defined for no client."""
    study = Study(replace(task(trials=2), metric=metric), tmp_path / "studies", tmp_path / "runs")
    for _ in range(2):
        cell = study.cell or study.next()
        assert cell is not None
        scores = [float("nan") if metric == "loss" and n == ROUNDS else 0.5 for n in range(ROUNDS + 1)]
        parts = [
            rows(n, score).assign(metric=metric if metric == "loss" else "accuracy") for n, score in enumerate(scores)
        ]
        record = record_of("ab", 0, method="Alpha", dataset="Rooms", rounds=ROUNDS, rounds_trained=ROUNDS)
        write_finished_run(study.runs_dir / cell.name, record, pd.concat(parts))
        Studies([study]).after(cell, Outcome(study.runs_dir / cell.name), 1.0)
        assert study.error == ""
    assert [trial.state for trial in study.trials] == ["diverged", "diverged"]
    study.close()


def test_without_optuna_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'federated-prompt-benchmark\[tune\]'"):
        opened(tmp_path)


# --- the course of cells ---


def test_cells_follow_each_other_and_one_that_is_given_up_is_ended(tmp_path: Path, capsys: Any) -> None:
    program = tmp_path / "run.py"
    program.write_text("import time; print('at work', flush=True); time.sleep(60)")
    name = f"-{content_hash((), ())}"
    ended: list[tuple[str, str, bool]] = []

    class Chain:
        total = 3

        def reason_to_end(self, cell: Cell) -> str:
            begun = (tmp_path / "runs" / cell.name / "log.txt").read_text().endswith("at work\n")
            return "given up" if begun else ""

        def after(self, cell: Cell, outcome: Outcome, seconds: float) -> list[Cell]:
            ended.append((cell.name, outcome.error, outcome.ended_early))
            return [Cell(f"{len(ended)}{name}", (), (), 0)] if len(ended) < 3 else []

    work = Work(tmp_path / "runs", program=(sys.executable, str(program)))
    outcomes = run_cells([Cell(f"0{name}", (), (), 0)], work, 2, course=Chain())
    assert ended == [(f"{n}{name}", "given up", True) for n in range(3)]
    assert all(outcome.ended_early for outcome in outcomes.values())
    assert f"[3/3] 2{name} ended early: given up" in capsys.readouterr().out


def test_whoever_is_asked_to_end_while_a_run_is_given_up_ends(tmp_path: Path) -> None:
    program = tmp_path / "run.py"
    program.write_text(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('at work', flush=True); "
        "time.sleep(60)"
    )
    cell = Cell(f"0-{content_hash((), ())}", (), (), 0)
    log = tmp_path / "runs" / cell.name / "log.txt"
    asked: list[threading.Timer] = []

    class Course:
        total = 1

        def reason_to_end(self, cell: Cell) -> str:
            if not log.read_text().endswith("at work\n"):
                return ""
            asked.append(threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)))
            asked[-1].start()
            return "given up"

        def after(self, cell: Cell, outcome: Outcome, seconds: float) -> list[Cell]:
            raise AssertionError("went on")

    with pytest.raises(KeyboardInterrupt):
        run_cells([cell], Work(tmp_path / "runs", program=(sys.executable, str(program))), course=Course())
    assert len(asked) == 1


# --- a table ---

#: Writes a run that was prepared: a trial by its rate, else by seed.
FAKE_RUN = """
import pathlib, shutil, sys
given = dict(entry.removeprefix("--").split("=", 1) for entry in sys.argv if "=" in entry)
run_dir = pathlib.Path(sys.argv[sys.argv.index("--run_dir") + 1])
seed = sys.argv[sys.argv.index("--seed_everything") + 1]
trial = given.get("data.val_only") == "true"
name = given["model.init_args.training.lr"] if trial else seed
with open("calls.txt", "a") as stream:
    stream.write(f"{'trial' if trial else 'test'} {name} {given.get('tuning', '')}\\n")
for path in (pathlib.Path("finished") / name).iterdir():
    shutil.copy(path, run_dir / path.name)
"""
TABLE = {
    "title": "Two methods",
    "baseline": "FedVPT",
    "presets": {"demo": {"seeds": [3], "data": [{"name": "digits", "label": "Digits", "suite": "digits"}]}},
    "rows": [
        {"label": "FedVPT", "method": "fedvpt", "point": "server"},
        {"label": "FedAvg", "method": "fedavg", "point": "server"},
    ],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs that were prepared."""
    folder = tmp_path_factory.mktemp("finished")
    for seed in (0, 1):
        path = folder / str(seed)
        finish(path, [0.5 + 0.1 * seed] * (ROUNDS + 1), seed)
        found = pd.concat([rows(n, 0.5 + 0.1 * seed) for n in range(ROUNDS + 1)]).assign(split="test")
        write_finished_run(path, read_record(path), found)
    for lr in (0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.25):
        finish(folder / json.dumps(lr), [lr] * (ROUNDS + 1))
    return folder


@pytest.fixture
def root(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text(yaml.safe_dump(TABLE))
    Path("fake_run.py").write_text(FAKE_RUN)
    Path("calls.txt").touch()
    shutil.copytree(finished, "finished")
    return tmp_path


@cache
def _configuration(arguments: tuple[str, ...]) -> dict[str, Any]:
    return resolved(arguments)


@pytest.fixture
def _rows_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that name this project's files alone make the same configuration in all tests."""

    def known(arguments: Sequence[str]) -> dict[str, Any]:
        files = [Path(each.rpartition("=")[2]) for each in arguments if each.endswith(".yaml")]
        assert files
        assert not any(file.exists() for file in files), "a test's own file may change; the shipped ones are elsewhere"
        return deepcopy(_configuration(tuple(arguments)))

    monkeypatch.setattr(tune, "resolved", known)


@pytest.mark.usefixtures("_rows_are_read_once")
def test_a_table_is_tuned_row_by_row_and_then_tested_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tune_table(
        "two.yaml", trials=4, rounds=ROUNDS, seeds=[0, 1], jobs=2, program=(sys.executable, "fake_run.py")
    )
    assert (result.table.failed, result.table.problems, result.stopped) == ({}, [], {})
    calls = [line.split(" ", 2) for line in Path("calls.txt").read_text().splitlines()]
    kinds = [call[0] for call in calls]
    assert kinds == sorted(kinds, reverse=True)  # no test image before the last trial has ended
    assert kinds.count("test") == 2 * 2 * 2
    trials = pd.read_csv(result.trials)
    assert trials.groupby("method").size().to_dict() == {"FedAvg": 4, "FedVPT": 4}
    chosen = trials[trials["chosen"]].set_index("method")
    for method, part in trials.groupby("method"):
        rates = [json.loads(values)["model.init_args.training.lr"] for values in part["values"]]
        assert json.loads(chosen.loc[method, "values"])["model.init_args.training.lr"] == max(rates)
    assert sorted(json.loads(call[2])["study"] for call in calls if call[0] == "test" and call[2]) == sorted(
        list(chosen["study"]) * 2
    )
    text = result.table.markdown.read_text()
    assert "the best of 4 trials of 4 rounds with seed 0" in text
    assert "against FedVPT, tuned, paired" in text
    line = next(line for line in text.split("## Tuning")[1].splitlines() if line.startswith("| FedVPT"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert (cells[1], cells[5:]) == ("4", ["55.00 ± 7.07", "55.00 ± 7.07", "+0.00"])
    printed = [line.strip() for line in capsys.readouterr().out.splitlines() if " -> " in line]
    assert len(printed) == 8
    for method, part in trials.groupby("method"):
        lines = [line for line in printed if line.startswith(f"{method} on ")]
        for number, (line, row) in enumerate(zip(lines, part.to_dict("records"), strict=True), start=1):
            rate = json.loads(row["values"])["model.init_args.training.lr"]
            assert f", trial {number} of 4: " in line
            assert f"lr {rate}" in line
            assert (
                "-> pruned after round " if row["state"] == "pruned" else f"-> val accuracy {row['val']:.2f} "
            ) in line
        assert f"(best {part['val'].max():.2f})" in lines[-1]
    before = Path("calls.txt").read_text()
    again = tune_table("two.yaml", trials=4, rounds=ROUNDS, seeds=[0, 1], program=(sys.executable, "fake_run.py"))
    assert again.table.markdown.read_text() == text
    assert Path("calls.txt").read_text() == before


@pytest.mark.usefixtures("_rows_are_read_once")
def test_trials_alone_look_at_no_test_image(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = {"search": {"demo": {"model.init_args.training.lr": [0.05, 0.1, 0.25]}}}
    Path("two.yaml").write_text(yaml.safe_dump(TABLE | {"rows": [TABLE["rows"][0] | space]}))
    result = tune_table(
        "two.yaml", trials=5, rounds=ROUNDS, trials_only=True, program=(sys.executable, "fake_run.py")
    )  # of three rates
    assert (result.table, result.stopped) == (None, {})
    trials = pd.read_csv(result.trials)
    values = [json.loads(each) for each in trials["values"]]
    assert values == [{"model.init_args.training.lr": lr} for lr in (0.1, 0.05, 0.25)]  # the row's own comes first
    assert list(trials["chosen"]) == [False, False, True]
    assert [line.split()[0] for line in Path("calls.txt").read_text().splitlines()] == ["trial"] * 3
    assert not list(Path("results/tables").iterdir())
    capsys.readouterr()
    again = ["tune", "two.yaml", "--trials=7", f"--rounds={ROUNDS}", "--kept", "--trials_only"]
    assert main(again) == 0
    assert capsys.readouterr().out == "all trials: results/tuning/two_demo.csv\n"


@pytest.mark.usefixtures("_rows_are_read_once")
def test_kept_trials_are_as_good_as_made_ones(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"trials": 3, "rounds": ROUNDS, "program": (sys.executable, "fake_run.py")}
    first = tune_table("two.yaml", seeds=[0], **given)
    text, trials = first.table.markdown.read_text(), first.trials.read_text()
    for folder in list(Path("runs").iterdir()):
        if "-s0-" in folder.name and read_record(folder).summary["server"].get("test"):
            keep_record(folder, "results/runs")
    shutil.rmtree("runs")
    before = len(Path("calls.txt").read_text().splitlines())
    again = tune_table("two.yaml", seeds=[0], kept=True, **given)
    assert (again.table.markdown.read_text(), again.trials.read_text()) == (text, trials)
    assert len(Path("calls.txt").read_text().splitlines()) == before
    tune_table("two.yaml", seeds=[0, 1], kept=True, **given)  # another seed of the same values
    assert [line.split()[:2] for line in Path("calls.txt").read_text().splitlines()[before:]] == [["test", "1"]] * 4
    before += 4
    capsys.readouterr()
    fewer = ["tune", "two.yaml", "--trials=2", f"--rounds={ROUNDS}", "--kept", "--seeds", "0"]
    assert "results/tuning/two_demo.csv has 3 trials of FedVPT, and 2 are asked for" in refused(capsys, main, fewer)
    tune_table("two.yaml", seeds=[0], kept=True, **given | {"trials": 4})  # more trials are all made
    assert "other studies" not in capsys.readouterr().out
    tune_table("two.yaml", seeds=[1], kept=True, **given)  # tuned with another seed, which is said
    said = "2 rows have trials of other studies in results/tuning/two_demo.csv (FedVPT, FedAvg): by another seed,"
    assert said in capsys.readouterr().out
    assert sum(line.startswith("trial") for line in Path("calls.txt").read_text().splitlines()[before:]) > 0
    Path(first.trials).write_text("method,study\nFedVPT,1\n")
    said = refused(capsys, main, ["tune", "two.yaml", "--trials=3", f"--rounds={ROUNDS}", "--kept"])
    assert "results/tuning/two_demo.csv is no CSV of trials" in said


@pytest.mark.usefixtures("_rows_are_read_once")
def test_a_row_that_cannot_be_tuned_is_still_shown_untuned(root: Path) -> None:
    shutil.rmtree(root / "finished" / "0.1")  # FedVPT's own rate, and so its first trial
    result = tune_table("two.yaml", trials=1, rounds=ROUNDS, seeds=[0], program=(sys.executable, "fake_run.py"))
    assert [name.split("-")[0] for name in result.stopped] == ["fedvpt"]
    assert list(result.table.failed) == [name for name in result.table.failed if name.endswith("-not-tuned")]
    shown = {line.split("|")[1].strip(): line for line in result.table.markdown.read_text().splitlines() if "|" in line}
    assert "failed" in next(line for name, line in shown.items() if name == "FedVPT, tuned")
    first = result.table.markdown.read_text().split("## Tuning")[0]
    untuned = next(line for line in first.splitlines() if line.startswith("| FedVPT "))
    assert "failed" not in untuned
    assert "50.00" in untuned


def test_a_data_group_with_nothing_to_tune_stands_beside_one_that_has(root: Path) -> None:
    Path("configs/suites").mkdir(parents=True)
    Path("configs/suites/fixed.yaml").write_text(f"base: [{ROOT}/configs/suites/digits.yaml]\nsearch: {{}}\n")
    groups = [
        {"name": "digits", "label": "Digits", "suite": "digits"},
        {"name": "fixed", "label": "Fixed", "suite": "fixed"},
    ]
    Path("two.yaml").write_text(yaml.safe_dump(TABLE | {"presets": {"demo": {"seeds": [0], "data": groups}}}))
    result = tune_table("two.yaml", trials=1, rounds=ROUNDS, seeds=[0], program=(sys.executable, "fake_run.py"))
    assert (result.table.failed, result.stopped) == ({}, {})
    said = result.table.markdown.read_text().split("## Tuning")[1]
    assert said.count("nothing to tune") == 2


def test_a_trial_that_is_drawn_again_is_counted_and_its_seconds_are_not(tmp_path: Path) -> None:
    choices = (Choice("model.lr", (0.03, 0.1), 0), *(replace(c, values=c.values[:1], own=0) for c in CHOICES[1:]))
    study = opened(tmp_path, trials=4, choices=choices)
    cell = study.next()
    while cell is not None:
        cell = next(iter(Studies([study]).after(cell, finish(study.runs_dir / cell.name, curve(cell)), 1.0)), None)
    tuned = {("digits", "Alpha"): Tuned.by(study.task, study.trials)}
    table, preset = chosen_table(str(ROOT / "configs/tables/frozen_rows.yaml"), "demo", None, None, None)
    line = Line(0, replace(preset.data[0], name="digits"), "Digits", [], "Alpha", "", "server", 1)
    (row,) = tuning_block(tuned, [line], table, ", tuned").frame.to_dict("records")
    assert (row["Trials"], row["Seconds"]) == ("4 (2 repeated)", "6")
    study.close()


@pytest.mark.usefixtures("_rows_are_read_once")
def test_trials_do_not_depend_on_how_many_go_on_at_once(root: Path) -> None:
    found = []
    for jobs in (1, 4):
        given = {"trials": 3, "rounds": ROUNDS, "seeds": [0], "jobs": jobs, "runs_dir": f"runs{jobs}"}
        result = tune_table("two.yaml", program=(sys.executable, "fake_run.py"), **given)
        found.append(pd.read_csv(result.trials).drop(columns="seconds"))
    pd.testing.assert_frame_equal(*found)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["two.yaml", "--trials", "0"], "trials and rounds are at least 1, got 0"),
        (["two.yaml", "--rounds", "0"], "trials and rounds are at least 1, got 0"),
        (["two.yaml", "--val_fraction", "1"], "val_fraction is 1.0, expected a number above 0 and below 1"),
        (["two.yaml", "--jobs", "0"], "jobs is 0, expected at least 1"),
        (["three"], "there is no table configs/tables/three.yaml; tables here: "),
        (["two.yaml", "--preset", "paper"], "table two.yaml has no preset 'paper'"),
        (["bare.yaml"], "row Own has no search space: none of own.yaml has search"),
        (
            ["listed.yaml"],
            "row FedVPT: search: model.init_args.training.lr: expected a list of different values, got []",
        ),
        (["strange.yaml"], "row FedVPT has search for paper, which is no preset"),
        (["unlike.yaml"], "train for 10 and 20 rounds; give --rounds"),
        (
            ["sparse.yaml", "--rounds", "12"],
            "evaluated after every 5 rounds, so that nothing would be known of the last",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(
    root: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.yaml").write_text("model: methods.FedAvg\n")
    own = TABLE | {"rows": [{"label": "Own", "name": "own", "configs": ["own.yaml"], "point": "server"}]}
    Path("bare.yaml").write_text(yaml.safe_dump(own | {"baseline": None}))
    for name, given in (("listed", {"demo": {"model.init_args.training.lr": []}}), ("strange", {"paper": {}})):
        Path(f"{name}.yaml").write_text(yaml.safe_dump(TABLE | {"rows": [TABLE["rows"][0] | {"search": given}]}))
    longer = {"demo": ["--trainer.max_epochs=20"]}
    unlike = [TABLE["rows"][0], TABLE["rows"][1] | {"overrides": longer}]
    Path("unlike.yaml").write_text(yaml.safe_dump(TABLE | {"rows": unlike}))
    sparse = [TABLE["rows"][0] | {"overrides": {"demo": ["--trainer.check_val_every_n_epoch=5"]}}]
    Path("sparse.yaml").write_text(yaml.safe_dump(TABLE | {"rows": sparse}))
    assert said in refused(capsys, main, ["tune", *arguments])
    assert Path("calls.txt").read_text() == ""


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("[0.01, -1]", "the value -1 is refused (model.init_args.training.lr: expected a number from 0 on, got -1)"),
        ("[0.01, .nan]", "the value NaN is refused (model.init_args.training.lr: expected a number from 0 on"),
        ("[0.01, x]", 'the value "x" is refused (model.init_args.training.lr: expected a number from 0 on'),
        ("[null, 0.01]", "the value null is refused (model.init_args.training.lr: expected a number from 0 on"),
        ("[0.01, [1]]", "the value [1] is refused (model.init_args.training.lr: "),
        ("[2020-01-01, 0.1]", 'the value "2020-01-01" is refused (model.init_args.training.lr: '),
    ],
)
def test_a_value_that_a_run_would_refuse_is_named_before_any_trial(root: Path, values: str, said: str) -> None:
    Path("own.yaml").write_text(
        f"base: [{ROOT}/configs/methods/fedavg.yaml]\nsearch: {{model.init_args.training.lr: {values}}}\n"
    )
    own = {
        "label": "Own",
        "name": "own",
        "configs": ["own.yaml", f"{ROOT}/configs/suites/digits.yaml"],
        "point": "server",
    }
    Path("bad.yaml").write_text(yaml.safe_dump(TABLE | {"rows": [own], "baseline": None}))
    with pytest.raises(ConfigurationError, match=re.escape(f"row Own: search: model.init_args.training.lr: {said}")):
        tune_table("bad.yaml", trials=2, rounds=ROUNDS, program=(sys.executable, "fake_run.py"))
    assert Path("calls.txt").read_text() == ""
    assert not list(Path().glob("runs/.studies/*"))


# --- no test image ---

TUNING = ("--data.val_fraction=0.25", "--data.val_only=true", "--data.partition=IID", "--data.partition.num_clients=3")


def test_only_held_out_training_images_are_known_to_the_engine() -> None:
    method, data = build("FedVPT", *TUNING, "--data.clients_per_round=3")
    fit(method, data, 1)
    assert set(data.federation.holdings.held_out) == {"val"}
    assert set(method.evaluation.scores) == {("server", "val"), ("local", "val")}
    held = np.concatenate([*data.held_out["val"].values(), *data.train_indices.values()])
    assert not set(held) & set(np.concatenate(data.splits.test))
    assert data.test_sizes == tuple(map(len, data.splits.test))
    with pytest.raises(ConfigurationError, match=r"data.val_only scores no test image"):
        data.test_dataloader()
    with pytest.raises(ConfigurationError, match=r"data.val_fraction=0 holds none out; give for example"):
        FederatedDataModule(TinyImages(), Ragged(), val_only=True)


@pytest.mark.parametrize("conf", ["FedAvgFT", "PFedPG"])
def test_other_test_images_change_nothing(conf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherTest(TinyImages):
        def load(self) -> ImagePool:
            pool = super().load()
            images, labels = pool.images.clone(), pool.labels.clone()
            images[pool.test] = 255 - images[pool.test]
            labels[pool.test] = 7 - labels[pool.test]
            return ImagePool(images, labels, pool.test, pool.domains, pool.group)

    def scores(kind: type[TinyImages], *more: str) -> dict[str, torch.Tensor]:
        method, data = build(conf, "--data.val_fraction=0.25", "--data.clients_per_round=3", *more)
        data.source = kind()
        fit(method, data, 1)
        found = {key: value.compute() for key, value in method.evaluation.scores.items()}
        return {f"{key} {metric}": values for key, each in found.items() for metric, values in each.items()}

    held = scores(TinyImages, *TUNING[1:])
    other = scores(OtherTest, *TUNING[1:])
    assert held.keys() == other.keys()
    for key, values in held.items():
        torch.testing.assert_close(values, other[key], rtol=0, atol=0, equal_nan=True)
    both = scores(TinyImages, *TUNING[2:])
    assert set(held) < set(both)
    for key, values in held.items():
        torch.testing.assert_close(values, both[key], rtol=0, atol=0, equal_nan=True)


# --- as its users run it ---


@pytest.mark.slow
def test_a_tuning_that_is_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    Path(tmp_path / "two.yaml").write_text(yaml.safe_dump(TABLE))
    command = [sys.executable, "-m", "benchmark.commands", "tune", "two.yaml", "--trials=2", "--rounds=1", "--seeds=0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    tables = []
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "two.yaml").write_text(yaml.safe_dump(TABLE))
        if name == "killed":
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            assert any("finished" in line for line in process.stdout)
            process.send_signal(signal.SIGKILL)
            process.communicate()
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        tables.append(pd.read_csv(folder / "results" / "tuning" / "two_demo.csv").drop(columns="seconds"))
        tuned = [path.parent for path in folder.glob("runs/*/record.json") if read_record(path.parent).tuning]
        assert len(tuned) == 2
        assert all("val" not in read_record(run).summary["server"] for run in tuned)
    pd.testing.assert_frame_equal(*tables)
