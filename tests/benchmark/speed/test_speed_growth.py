"""Growth with clients and classes, and the clock of whole rounds."""

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from processes import Forked
from waiting import until

from benchmark.errors import ConfigurationError
from benchmark.server import ServerRule
from benchmark.speed import growth, measure
from benchmark.speed.measure import RandomImages, fit
from datamodules.federated import FederatedDataModule
from datamodules.partition import IID
from methods.fedper import FedPer

ROOT = Path(__file__).resolve().parents[3]


def test_growth_measures_state_and_checkpoint() -> None:
    found = growth.grow(12, rounds=2, evaluate=True)
    assert growth.grow(12, rounds=2).evaluation is None
    # a head is 32 * 10 + 10 numbers, and whether the client has taken part is another
    assert found.state_bytes == 12 * (330 + 1) * 4
    assert found.checkpoint_bytes > found.state_bytes
    assert found.evaluation is not None
    assert min(found.round, found.set_up, found.checkpoint, found.evaluation, found.record) > 0
    assert found.memory > 2**26
    assert growth.Grown(**json.loads(json.dumps(asdict(found)))) == found


def test_rows_compare_with_the_first_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def apart(clients: int) -> growth.Grown:
        return growth.Grown(
            2.0, clients / 10, clients / 20, clients / 5, clients * 2**20, clients * 2**21, 7, clients / 2
        )

    monkeypatch.setattr(growth, "grow_apart", apart)
    rows = growth.client_rows((10, 1000))
    assert [(row.what, row.work, row.ratio, row.note) for row in rows] == [
        ("round", "10 of 10 clients", 1.0, "personal state 10.00 MB"),
        ("round", "10 of 1,000 clients", 1.0, "personal state 1000.00 MB"),
        ("set-up", "10 clients", 1.0, ""),
        ("set-up", "1,000 clients", 100.0, ""),
        ("recording the split", "10 clients", 1.0, ""),
        ("recording the split", "1,000 clients", 100.0, ""),
        ("evaluation", "10 clients", 1.0, ""),
        ("evaluation", "1,000 clients", 100.0, ""),
        ("writing a checkpoint", "10 clients", 1.0, "20.00 MB"),
        ("writing a checkpoint", "1,000 clients", 100.0, "2000.00 MB"),
    ]
    assert [row.memory for row in rows] == [7, 7, *[None] * 8]


def test_rows_with_many_participants_compare_with_the_first_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def apart(clients: int, participants: int) -> growth.Grown:
        asked.append((clients, participants))
        return growth.Grown(clients / 100, clients / 10, 1.0, None, 1, 1, 7, clients / 5)

    monkeypatch.setattr(growth, "grow_apart", apart)
    rows = growth.wide_rows((100, 1000), 50)
    assert asked == [(100, 50), (1000, 50)]
    assert [(row.what, row.work, row.ratio) for row in rows] == [
        ("round", "50 of 100 clients", 1.0),
        ("round", "50 of 1,000 clients", 10.0),
        ("set-up", "100 clients, 50 a round", 1.0),
        ("set-up", "1,000 clients, 50 a round", 10.0),
        ("recording the split", "100 clients, 50 a round", 1.0),
        ("recording the split", "1,000 clients, 50 a round", 10.0),
    ]


def test_a_process_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nprintf 'a\\nb\\nc\\nkilled' >&2\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ConfigurationError, match=r"growth 100 --evaluate ended with status -9: b / c / killed; run it"):
        growth.grow_apart(100)


def test_a_process_ends_with_whoever_waits_for_it(tmp_path: Path) -> None:
    """With what it has started: the other ranks of a measurement, for example."""
    code = (
        "from benchmark.speed.measure import last_line_of\n"
        "last_line_of(['sh', '-c', 'sleep 1; sleep 60 & echo $! > pid; wait'])"  # a second, so that it is waited for
    )
    process = Forked([sys.executable, "-c", code], tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})
    until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text(), 60)
    process.send_signal(signal.SIGINT)
    process.communicate(20)
    stat = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    until(lambda: not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z", 20)


def test_rows_of_prompts_by_number_of_classes() -> None:
    rows = growth.class_rows((2, 5), clients=2, images=16, rounds=2)
    assert [(row.what, row.work) for row in rows] == [
        ("PromptFL, 2 classes", "2 clients x 1 steps of 16 images"),
        ("PromptFL, 5 classes", "2 clients x 1 steps of 16 images"),
    ]
    assert rows[0].ratio == 1.0
    assert rows[1].ratio == pytest.approx(rows[1].seconds / rows[0].seconds)


class Slow(Callback):
    """Lets the clock run on at known places."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock = clock

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.clock.now += 1

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.clock.now += 1000


def test_a_lap_holds_plan_and_aggregation_but_no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    aggregate, select = ServerRule.aggregate, ServerRule.select

    def slow_aggregate(self: ServerRule, *arguments: Any) -> Any:
        clock.now += 20
        return aggregate(self, *arguments)

    def slow_select(self: ServerRule, round: int) -> list[int]:
        clock.now += 300
        return select(self, round)

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(ServerRule, "aggregate", slow_aggregate)
    monkeypatch.setattr(ServerRule, "select", slow_select)
    # 5 clients with 6 images in batches of 4: two steps each
    data = FederatedDataModule(RandomImages(30, 5, growth.SIZE), IID(5), batch_size=4, clients_per_round=3)
    method = FedPer(10, 5, growth.SmallBackbone(), training=growth.TRAINING)
    watch = fit(method, data, 3, evaluate_every=1, callbacks=[Slow(clock)])
    assert watch.started == 300  # the first round's plan is part of the set-up
    assert watch.rounds == [21, 321, 321]
    assert watch.best == 321
    assert watch.steps == [6, 6, 6]
    assert all(loss > 0 for loss in watch.losses)
