"""What every case of the speed measurements shares: synthetic images, a timed fit, the machine's own peak, the table.

Only ratios within one run on one machine mean anything elsewhere. Each figure is the best of its repetitions: what
disturbs a measurement only ever makes it slower.
"""

import logging
import resource
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from tabulate import tabulate

from benchmark.cli import TRAINER_DEFAULTS
from benchmark.method import FederatedMethod
from benchmark.results import environment, write_json, write_text
from datamodules.base import FederatedDataModule
from datamodules.source import ImagePool, ImageSource


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        what: what was timed.
        work: how much of it, in words: ``"10 clients x 10 steps of 16 images"``.
        seconds: for that work.
        ratio: these seconds divided by those of the case's reference; None for a row without one.
        share_of_peak: floating-point operations per second over the measured peak of a matrix product; None if they
            were not counted.
        memory: peak bytes, of the device where it is a GPU, else of this process up to here; None if another process
            did the work.
        note: what a reader must know.
    """

    what: str
    work: str
    seconds: float
    ratio: float | None = None
    share_of_peak: float | None = None
    memory: int | None = None
    note: str = ""


class RandomImages(ImageSource):
    """Noise in the shape of a data set: as good as photographs for timing.

    Args:
        train: training images in all.
        test: test images in all.
        size: side in pixels.
        classes: number of classes; labels cycle, so that every client can hold every class.
    """

    def __init__(self, train: int, test: int, size: int = 32, classes: int = 10) -> None:
        self.train, self.test, self.size = train, test, size
        self.class_names = tuple(str(c) for c in range(classes))  # type: ignore[misc]

    def load(self) -> ImagePool:
        """The pool: training images first."""
        n = self.train + self.test
        rng = np.random.default_rng(0)
        return ImagePool(
            images=torch.from_numpy(rng.integers(0, 256, (n, 3, self.size, self.size), dtype=np.uint8)),
            labels=torch.arange(n) % len(self.class_names),
            test=torch.arange(n) >= self.train,
            domains=torch.zeros(n, dtype=torch.int64),
            group=torch.arange(n),
        )


class _Clock(Callback):
    """Seconds of every round's training, aggregation included, and of every evaluation."""

    def __init__(self) -> None:
        self.training: list[float] = []
        self.evaluation: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.began = now()

    def _trained(self) -> None:
        self.training.append(now() - self.began)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._trained()
        self.validation_began = now()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.evaluation.append(now() - self.validation_began)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if len(self.training) <= trainer.current_epoch:  # no evaluation in this round
            self._trained()


@dataclass(frozen=True)
class FitTimes:
    """What a fit took.

    Attributes:
        round: seconds of the fastest round after the first: local training, from its first hook to aggregation.
        rounds: the same of every round.
        evaluation: seconds of the fastest evaluation of all clients; None if there was none.
        whole: seconds of the whole fit, set-up included.
        memory: peak bytes, as in ``Row``.
    """

    round: float
    rounds: list[float]
    evaluation: float | None
    whole: float
    memory: int


def fit(
    method: FederatedMethod,
    data: FederatedDataModule,
    rounds: int,
    evaluate_every: int = 0,
    precision: str = "32-true",
    callbacks: Sequence[Callback] = (),
) -> FitTimes:
    """Train ``rounds`` rounds, at least two, without loggers and checkpoints, and time them.

    Args:
        method: a method, not yet trained.
        data: its data.
        rounds: number of rounds; the first one also warms up.
        evaluate_every: evaluate all clients every so many rounds; 0 never does.
        precision: the Trainer's, ``"32-true"`` or ``"bf16-mixed"``.
        callbacks: further callbacks.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    clock = _Clock()
    settings: dict[str, Any] = {
        **TRAINER_DEFAULTS,
        "max_epochs": rounds,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 1.0 if evaluate_every else 0,
        "check_val_every_n_epoch": max(evaluate_every, 1),
        "precision": precision,
    }
    trainer = Trainer(
        **settings,
        accelerator=device(),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=[clock, *callbacks],
    )
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = now()
    trainer.fit(method, datamodule=data)
    return FitTimes(
        min(clock.training[1:]), clock.training, min(clock.evaluation, default=None), now() - began, peak_memory()
    )


@cache
def device() -> str:
    """``"cuda"`` where there is a GPU, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def now() -> float:
    if device() == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(work: Any, repetitions: int = 3, warm_up: int = 1) -> float:
    """Seconds of the fastest call of ``work()``, after ``warm_up`` calls that are not counted."""
    best = float("inf")
    for repetition in range(warm_up + repetitions):
        began = now()
        work()
        if repetition >= warm_up:
            best = min(best, now() - began)
    return best


def peak_memory() -> int:
    """Peak bytes: of the GPU since the last fit began, else of this process since it began."""
    if device() == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def matmul_peak(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix product: what the machine reaches, not what it claims."""
    size = 8192 if device() == "cuda" else 1536
    a = torch.randn(size, size, device=device(), dtype=dtype)
    return 2 * size**3 / seconds(lambda: a @ a, repetitions=10, warm_up=3)


def report(case: str, title: str, rows: Sequence[Row], folder: Path, settings: dict[str, Any] | None = None) -> None:
    """Print the rows and write them to ``folder/case.md`` and, with the hardware, ``folder/case.json``.

    Args:
        case: name of the file.
        title: one line on what was done.
        rows: the measurements.
        folder: where to write.
        settings: what else belongs to the record.
    """
    names = ("what", "work", "seconds", "ratio", "of peak", "MB", "note")
    cells = [
        (
            row.what,
            row.work,
            f"{row.seconds:.4g}",
            "" if row.ratio is None else f"{row.ratio:.3f}",
            "" if row.share_of_peak is None else f"{100 * row.share_of_peak:.0f} %",
            "" if row.memory is None else f"{row.memory / 2**20:.0f}",
            row.note,
        )
        for row in rows
    ]
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="right" if name in ("seconds", "ratio", "of peak", "MB") else "left")
    for line in cells:
        table.add_row(*line)
    Console(width=160).print(table)
    folder.mkdir(parents=True, exist_ok=True)
    body = tabulate(cells, names, tablefmt="pipe", disable_numparse=True)
    write_text(folder / f"{case}.md", f"# {title}\n\n{body}\n")
    record = {"title": title, "rows": [asdict(row) for row in rows], **(settings or {})}
    write_json(
        folder / f"{case}.json", {**record, "device": device(), "threads": torch.get_num_threads(), **environment()}
    )
