"""The progress messages of a run, in a terminal and in a log, and its estimate of the remaining time."""

import logging
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from federation import CONF

from benchmark.records.words import POINT_WORDS
from benchmark.run import display
from benchmark.run.checkpoint import read_checkpoint
from benchmark.run.cli import main
from benchmark.run.display import Lines, RoundRow, Screen
from benchmark.run.ending import score_lines
from benchmark.run.pace import Pace, clock
from benchmark.run.phases import phases_printed
from benchmark.run.progress import _scores

BASE = [f"--config={CONF / 'base.yaml'}", f"--config={CONF / 'HeadTune.yaml'}", "--trainer.max_epochs=3"]


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Read it."""
        return self.now


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_what_is_left_is_the_steps_and_evaluations_to_come(by_hand: Clock) -> None:
    pace = Pace(rounds=4, every=2)
    pace.begin_evaluation()
    by_hand.now += 100  # features are made, once
    pace.begin_batches()
    by_hand.now += 6
    pace.end_evaluation()
    assert pace.left is None
    pace.begin_round(1, 10)
    by_hand.now += 5
    pace.step += 5
    # a second a step; evaluations of 6 s after rounds 2 and 4
    assert pace.left == pytest.approx(5 + 3 * 10 + 2 * 6)
    assert pace.done == pytest.approx(5 / 40)
    pace.step += 5
    by_hand.now += 5
    assert pace.end_round() == 10
    assert pace.left == pytest.approx(3 * 10 + 2 * 6)
    pace.begin_round(2, 10)
    by_hand.now += 10
    pace.step += 10
    pace.begin_evaluation()
    by_hand.now += 1
    pace.begin_batches()
    by_hand.now += 1
    assert pace.left == pytest.approx(4 + 2 * 10 + 6)
    by_hand.now += 6
    pace.end_evaluation()
    assert pace.end_round() == 18
    assert pace.left == pytest.approx(2 * 10 + 8)  # as long as the last evaluation
    assert pace.done == 0.5
    assert clock(5025) == "1:23:45"


def test_a_run_that_goes_on_counts_its_features_once(by_hand: Clock) -> None:
    pace = Pace(rounds=3, every=5)
    pace.begin_round(2, 10)
    by_hand.now += 50
    pace.begin_batches()
    by_hand.now += 10
    pace.step += 10
    assert pace.end_round() == 60
    assert pace.left == pytest.approx(10)


def test_a_log_of_many_rounds_has_few_lines_and_tells_of_long_waits(
    by_hand: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    pace = Pace(rounds=1500)
    lines = Lines(pace)
    for number in range(1, 1501):
        pace.begin_round(number, 10)
        lines.look()
        lines.finished(RoundRow(number, 0.5, {}, 1.0, None if number > 1 else 1.23456))
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("round 1/1500  loss 0.5000  not evaluated  epsilon 1.23")
    said = [line.split()[1] for line in out]
    assert said == ["1/1500", *(f"{number}/1500" for number in range(15, 1501, 15))]
    pace.begin_round(1501, 1234)
    pace.step, pace.loss, pace.clients = 1200, 0.25, (3, 4)
    by_hand.now += 61
    lines.look()
    lines.look()
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "round 1501/1500  local training, step 1,200 of 1,234  loss 0.2500  clients 3, 4"


def test_the_display_changes_no_number_and_a_log_has_no_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["--trainer.enable_progress_bar=true", "--data.clients_at_once=2"]
    main(["fit", *BASE, "--data.clients_at_once=2", "--run_dir=silent"])
    main(["fit", *BASE, *more, "--run_dir=lines"])
    written = capsys.readouterr().out
    with patch.object(display, "in_terminal", return_value=True), patch.dict(os.environ, {"COLUMNS": "80"}):
        main(["fit", *BASE, *more, "--run_dir=screen"])
    shown = capsys.readouterr().out
    metrics = [Path(run, "metrics.parquet").read_bytes() for run in ("silent", "lines", "screen")]
    assert metrics[0] == metrics[1] == metrics[2]
    held = [read_checkpoint(f"{run}/checkpoints/last.ckpt")["state_dict"] for run in ("silent", "lines", "screen")]
    for name, value in held[0].items():
        assert torch.equal(value, held[1][name])
        assert torch.equal(value, held[2][name])
    assert not [character for character in written if ord(character) < 32 and character != "\n"]
    assert "\x1b[" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert max(map(len, plain.partition("test accuracy")[0].splitlines())) <= 80
    last = plain[plain.rindex("round    ") :].partition("accuracy in %")[0].splitlines()
    assert [line.split()[0] for line in last[2:] if line.strip()] == ["0", "1", "2", "3"]


def test_a_run_first_prints_its_directory_and_last_accuracies_and_next_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [
        "--trainer.enable_progress_bar=true",
        "--trainer.check_val_every_n_epoch=3",
        "--data.clients_at_once=auto",
    ]
    main(["fit", *BASE, *options, "--run_dir=a run"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["run directory: a run", "method: HeadTune", "reading TinyImages"]
    assert lines[3].startswith("  176 images of 8 classes; 11 clients with 1 to 10 training images")
    assert any(line.startswith("up to ") for line in lines)
    assert any(line.startswith("keeping what frozen parts make of 125 images") for line in lines)
    assert any(line.startswith("before training  accuracy after aggregation ") for line in lines)
    (second,) = [line for line in lines if line.startswith("round 2/3  ")]
    assert re.fullmatch(r"round 2/3  loss \d\.\d{4}  not evaluated  0:00:\d\d left", second)
    (third,) = [line for line in lines if line.startswith("round 3/3  ")]
    accuracy = re.search(r"accuracy after aggregation (\d+\.\d\d) %", third)
    assert accuracy
    end = lines[lines.index("record: a run/record.json") - 1 :]
    assert end[0].startswith(f"test accuracy after round 3: after aggregation {accuracy[1]} % (worst client ")
    assert [line.split("  #")[0].strip() for line in end[2:]] == [
        "benchmark show 'a run'",
        "lightning-cli test --run_dir='a run'",
        "benchmark partition 'a run'/manifest.json partition.png",
    ]


def test_a_finished_run_says_all_splits_and_the_harmonic_mean_of_base_to_novel() -> None:
    def scores(average: float, worst: float) -> dict[str, Any]:
        accuracy = {"clients": 3, "last": {"average": average, "worst": worst}}
        return {"accuracy": accuracy, "loss": {"last": {}}}

    of = {"train": {"loss": {}}, "test": scores(0.8, 0.7), "base": scores(0.4, 0.3), "novel": scores(0.2, 0.0)}
    local = {"test": scores(0.9, 0.6), "base": scores(0.5, 0.5), "novel": scores(0.0, 0.0)}
    assert score_lines({"server": of, "local": local}, 7) == [
        "test accuracy after round 7: after aggregation 80.00 % (worst client 70.00 %), "
        "after local training 90.00 % (worst client 60.00 %)",
        "base accuracy after round 7: after aggregation 40.00 % (worst client 30.00 %), "
        "after local training 50.00 % (worst client 50.00 %)",
        "novel accuracy after round 7: after aggregation 20.00 % (worst client 0.00 %), "
        "after local training 0.00 % (worst client 0.00 %)",
        "harmonic mean of test, base and novel: after aggregation 34.29 %, after local training 0.00 %",
    ]
    del of["novel"]
    of["val"] = scores(0.1, 0.1)
    assert [line.split()[0] for line in score_lines({"server": of}, 1)] == ["val", "test", "base"]


def test_a_table_of_rounds_has_as_many_scores_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    titles = [f"{split}{point}" for split in ("", "base ", "base_excl_local ") for point in POINT_WORDS.values()]
    for columns, shown in ((80, 3), (200, 6), (30, 0)):
        monkeypatch.setenv("COLUMNS", str(columns))
        screen = Screen(Pace(rounds=10))
        screen.finished(RoundRow(10, 0.5, dict.fromkeys(titles, 12.345), 3661.0))
        with screen.console.capture() as capture:
            screen.console.print(screen._all())
        lines = re.sub(r"\x1b\[[0-9;]*m", "", capture.get()).splitlines()
        assert max(map(len, lines)) <= columns
        assert sum(line.count("12.3") for line in lines) == shown
        assert "…" not in capture.get()


def test_what_methods_and_rules_report_is_no_score() -> None:
    names = [
        "train/accuracy",
        "server/accuracy",
        "train/a/accuracy",
        "train/test/local/accuracy",
        "train/local/accuracy",
    ]
    found = dict.fromkeys([*names, "val/local/accuracy", "test/server/accuracy"], torch.tensor(0.5))
    shown = _scores(SimpleNamespace(callback_metrics=found))  # type: ignore[arg-type]
    assert shown == {"after aggregation": 50.0, "val after local training": 50.0}


@pytest.mark.parametrize(("kind", "terminal"), [("xterm-256color", True), ("dumb", False)])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(kind: str, terminal: bool) -> None:
    with patch.object(sys.stdout, "isatty", lambda: True), patch.dict(os.environ, {"TERM": kind}):
        assert display.in_terminal() is terminal


def test_a_remark_is_printed_once_where_a_library_sets_logging_up_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    with phases_printed():
        logging.error("a library's own")
        assert logging.root.handlers
        logging.getLogger("benchmark.engine").info("reading images")
    assert logging.getLogger("benchmark").propagate
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("reading images") == 1


def test_who_has_set_logging_up_gets_remarks_too(caplog: pytest.LogCaptureFixture) -> None:
    with phases_printed():
        logging.getLogger("datamodules.source").info("reading images")
    assert caplog.messages == ["reading images"]
