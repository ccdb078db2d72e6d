"""Metrics reach the disk evaluation by evaluation; a run that ends anywhere keeps and continues them."""

import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from federation import build
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy

from benchmark.errors import ConfigurationError
from benchmark.records import environment
from benchmark.records.metrics_table import read_table, rows_sha256, write_parquet
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import verify_record
from benchmark.run import recorder
from benchmark.run.checkpoint import AtomicCheckpointIO, read_checkpoint, round_checkpoint
from benchmark.run.cli import TRAINER_DEFAULTS
from benchmark.run.recorder import Recorder

#: Of few clients: nothing here is about who they are.
FEW = ("--data.partition=federation.Few", "--data.clients_per_round=4")


def train(run: Path, rounds: int, *callbacks: Callback, every: int = 1, resume: Path | None = None) -> Any:
    """Train FedAvg with its run directory; returns the Trainer."""
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text("seed_everything: 3")
    method, data = build("FedAvg", *FEW)
    trainer = Trainer(
        **{**TRAINER_DEFAULTS, "max_epochs": rounds},
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        check_val_every_n_epoch=every,
        callbacks=[Recorder(str(run)), *callbacks, round_checkpoint(run)],
        plugins=[AtomicCheckpointIO()],
    )
    trainer.fit(method, datamodule=data, ckpt_path=None if resume is None else str(resume / "checkpoints/last.ckpt"))
    return trainer


def rounds_of(run: Path) -> list[int]:
    """Rounds whose metrics can be read now."""
    whole = run / "metrics.parquet"
    return sorted(set(read_table(whole if whole.exists() else run / "metrics")["round"]))


class Watch(Callback):
    """After each round: the files of the run's metrics and when each was written, and the size of the checkpoint."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.files: list[dict[str, int]] = []
        self.rounds: list[list[int]] = []
        self.states: list[int] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        found = self.run.rglob("*.parquet")
        self.files.append({str(path.relative_to(self.run)): path.stat().st_mtime_ns for path in found})
        self.rounds.append(rounds_of(self.run))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch:
            state = read_checkpoint(self.run / "checkpoints/last.ckpt")["callbacks"]["Recorder"]
            torch.save(state, stream := io.BytesIO())
            self.states.append(stream.tell())


def test_an_evaluation_adds_a_file_and_touches_no_other(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    train(tmp_path, 6, watch, every=2)
    names = [f"metrics/round-{round:06d}.parquet" for round in (0, 2, 4, 6)]
    assert [sorted(files) for files in watch.files] == [names[: 1 + done // 2] for done in range(1, 7)]
    for before, now in zip(watch.files, watch.files[1:], strict=False):
        assert before.items() <= now.items()
    assert watch.rounds == [[0], [0, 2], [0, 2], [0, 2, 4], [0, 2, 4], [0, 2, 4, 6]]
    assert rounds_of(tmp_path) == [0, 2, 4, 6]
    assert verify_record(tmp_path) == []
    assert not (tmp_path / "metrics").exists()


def test_a_record_names_the_commit_that_the_training_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, revision in ((recorder, "a" * 40), (environment, "b" * 40)):
        monkeypatch.setattr(module, "checkout", lambda said=revision: {"revision": said, "dirty": False})
    train(tmp_path / "run", 1)
    assert read_record(tmp_path / "run").environment["git"] == {"revision": "a" * 40, "dirty": False}


def test_a_record_names_the_gpu_after_the_method_is_back_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def onto_a_gpu(self: SingleDeviceStrategy) -> None:
        ended(self)
        self._root_device = torch.device("cuda", 0)

    ended = SingleDeviceStrategy.teardown
    monkeypatch.setattr(SingleDeviceStrategy, "teardown", onto_a_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    trainer = train(tmp_path / "run", 1)
    assert trainer.lightning_module.device.type == "cpu"
    assert read_record(tmp_path / "run").device == "GPU 0"


def test_a_checkpoint_does_not_grow_with_the_evaluations(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    trainer = train(tmp_path, 6, watch)
    assert len(set(watch.states)) == 1
    assert {round for round, *_ in trainer.callbacks[0].values} == {6}


class End(Callback):
    """Ends the process's work in a round, when this hook has run."""

    def __init__(self, hook: str, round: int) -> None:
        setattr(self, hook, lambda trainer, method: self.end(trainer.current_epoch + 1 == round))

    @staticmethod
    def end(now: bool) -> None:
        if now:
            raise ZeroDivisionError


@pytest.fixture(scope="module")
def whole(every: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Metrics of a run of four rounds that nothing has ended."""
    run = tmp_path_factory.mktemp("whole")
    train(run, 4, every=every)
    return run / "metrics.parquet"


@pytest.mark.parametrize("every", [1, 2], scope="module")
@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end", "on_train_epoch_start"])
def test_a_run_that_ended_anywhere_keeps_and_continues_its_metrics(
    hook: str, every: int, whole: Path, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"
    with pytest.raises(ZeroDivisionError):
        train(ended, 4, End(hook, round=4), every=every)
    evaluated = 4 if hook != "on_train_epoch_start" else 3
    assert rounds_of(ended) == list(range(0, evaluated + 1, every))
    train(ended, 4, every=every, resume=ended)
    assert (ended / "metrics.parquet").read_bytes() == whole.read_bytes()


def test_a_finished_run_is_continued_elsewhere_with_its_metrics(tmp_path: Path) -> None:
    train(tmp_path / "first", 1)
    train(tmp_path / "whole", 2)
    before = (tmp_path / "first/metrics.parquet").read_bytes()
    train(tmp_path / "more", 2, resume=tmp_path / "first")
    assert (tmp_path / "more/metrics.parquet").read_bytes() == (tmp_path / "whole/metrics.parquet").read_bytes()
    assert (tmp_path / "first/metrics.parquet").read_bytes() == before


def test_a_new_run_takes_nothing_of_an_abandoned_one(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, 3, End("on_validation_end", round=1))
    write_parquet(tmp_path / "metrics/round-000009.parquet", read_table(tmp_path / "metrics").assign(round=9))
    train(tmp_path, 1)
    assert rounds_of(tmp_path) == [0, 1]


def test_metrics_in_memory_are_continued_in_memory(tmp_path: Path) -> None:
    train(tmp_path, 1)
    method, data = build("FedAvg", *FEW)
    settings = {**TRAINER_DEFAULTS, "max_epochs": 2, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(**settings, accelerator="cpu", callbacks=[Recorder()])
    with pytest.raises(ConfigurationError, match="files of its run directory, and this run keeps its own in memory"):
        trainer.fit(method, datamodule=data, ckpt_path=str(tmp_path / "checkpoints/last.ckpt"))


def test_the_hash_of_rows_is_of_their_content_alone(tmp_path: Path) -> None:
    rows = [(0, k, "server", "test", m, 0.1 * k) for k in range(3) for m in ("accuracy", "loss")]
    table = pd.DataFrame(rows, columns=["round", "client", "point", "split", "metric", "value"])
    write_parquet(tmp_path / "a.parquet", table)
    same = [table, table[::-1].astype({"split": "category", "round": "int64"}), pd.read_parquet(tmp_path / "a.parquet")]
    assert len({rows_sha256(one) for one in same}) == 1
    others = [
        table.assign(value=table["value"] + 1e-16),
        table.assign(round=1),
        table[:-1],
        table.assign(point="local"),
    ]
    assert len({rows_sha256(one) for one in [table, *others]}) == 5
