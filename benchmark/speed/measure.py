"""Share among all speed measurements: synthetic images, a timed fit, the machine's own peak, the table.

Only ratios within one run on one machine mean anything elsewhere. Each figure is the best of its repetitions: what
disturbs a measurement only ever makes it slower.
"""

import contextlib
import logging
import math
import os
import resource
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
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

from benchmark.contract import Stage
from benchmark.engine.device.allocator import NoSearchForGarbage, keep_freed_memory
from benchmark.engine.device.repeatable import repeatable_kernels
from benchmark.engine.repeat.recorded_step import BEFORE_RECORDING, SMALL_STEP, TIMED
from benchmark.errors import ConfigurationError
from benchmark.files import write_json, write_text
from benchmark.method import FederatedMethod
from benchmark.records.environment import environment
from benchmark.run.cli import TRAINER_DEFAULTS
from datamodules.federated import FederatedDataModule
from datamodules.source import ImagePool, ImageSource

#: of a table of measurements
COLUMNS = ("what", "work", "seconds", "ratio", "of peak", "MB", "note")


@dataclass(frozen=True)
class Timing:
    """One measurement.

    Attributes:
        what: what was timed.
        work: how much of it, in words: ``"10 clients x 10 steps of 16 images"``.
        seconds: for that work.
        ratio: these seconds divided by those of the case's reference; None for a row without one.
        share_of_peak: floating-point operations per second over the measured peak of a matrix product; None if they
            were not counted.
        memory: peak bytes, of the device where it is a GPU, else of the process that did the work, up to here; None if
            it was not read.
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
        self.class_names = tuple(str(c) for c in range(classes))

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


class Laps(Callback):
    """Times whole rounds, from the end of one to the end of the next, evaluations taken out.

    So selection, plan, local training and aggregation are in, and nothing that a round costs can escape.

    Attributes:
        started: when the first round began, as ``time.perf_counter`` counts; what came before is set-up.
        rounds: seconds of every round.
        evaluations: seconds of every evaluation of all clients.
        steps: optimizer steps of all clients in every round.
        losses: mean over the round's clients of their mean training loss, of every round.
        memory: peak bytes when training ended, as in ``Timing``.
        steps_of_all: steps of the last round in all ranks together.
        width: clients stepped together.
    """

    def __init__(self) -> None:
        self.started = 0.0
        self.rounds: list[float] = []
        self.evaluations: list[float] = []
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.memory = 0
        self.steps_of_all = 0
        self.width = 0
        self._steps = 0
        self._began = 0.0
        self._evaluated = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """The first round begins."""
        self.started = self._began = now()

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Be told of every step."""
        pl_module.simulation.local_steps.on_step.append(self._stepped)

    def _stepped(self, cohort: Any, step: Any) -> None:
        """Count a training step."""
        if step.stage is Stage.TRAIN:
            self._steps += len(step.clients)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """An evaluation begins."""
        self._evaluation_began = now()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """An evaluation ends."""
        self._evaluated = now() - self._evaluation_began
        self.evaluations.append(self._evaluated)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """A round ends, and the next begins."""
        self.rounds.append(now() - self._began - self._evaluated)
        self.steps.append(self._steps)
        self.losses.append(pl_module.simulation.reports.mean("loss"))
        self._steps, self._evaluated, self._began = 0, 0.0, now()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Read the peak, and what the ranks have done together."""
        self.memory = peak_memory()
        self.width = trainer.datamodule.loaders.width  # type: ignore[attr-defined]
        self.steps_of_all = sum(pl_module.simulation.ranks.everybody("steps", self.steps[-1]))

    @property
    def best(self) -> float:
        """Seconds of the fastest round after the first, which warms up."""
        return min(self.rounds[1:])


def fit(
    method: FederatedMethod,
    data: FederatedDataModule,
    rounds: int,
    evaluate_every: int = 0,
    precision: str = "32-true",
    callbacks: Sequence[Callback] = (),
    settings: dict[str, Any] | None = None,
) -> Laps:
    """Train ``rounds`` rounds, at least two, without loggers and checkpoints, and time them.

    Args:
        method: a method, not yet trained.
        data: its data.
        rounds: number of rounds; the first one also warms up.
        evaluate_every: evaluate all clients every so many rounds; 0 never does.
        precision: the Trainer's, ``"32-true"`` or ``"bf16-mixed"``.
        callbacks: further callbacks.
        settings: further settings of the Trainer, by name.
    """
    keep_freed_memory()  # as lightning-cli does, and these kernels, and NoSearchForGarbage
    repeatable_kernels()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    laps = Laps()
    given: dict[str, Any] = {
        **TRAINER_DEFAULTS,
        "max_epochs": rounds,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 1.0 if evaluate_every else 0,
        "check_val_every_n_epoch": max(evaluate_every, 1),
        "precision": precision,
        **(settings or {}),
    }
    trainer = Trainer(
        **given,
        accelerator=device(),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=[laps, NoSearchForGarbage(), *callbacks],
    )
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.fit(method, datamodule=data)
    return laps


def rounds_until_repeated(steps: int) -> int:
    """Rounds of so many steps of one kind of which the last one repeats its record in each, and compares in none."""
    others = BEFORE_RECORDING + 2  # the step that is recorded, and the one that the record is tried on
    rounds = 2 + math.ceil((others + 2 * TIMED) / steps)
    # Steps whose number is a power of two are compared.
    while (rounds * steps - others).bit_length() > ((rounds - 1) * steps - others).bit_length():
        rounds += 1
    return rounds


def fit_repeated(
    make: Callable[[], tuple[FederatedMethod, FederatedDataModule]],
    steps: int,
    rounds: int,
    precision: str = "32-true",
) -> Laps:
    """``fit``; where steps are recorded, for as many rounds as it takes until they are repeated.

    Args:
        make: an untrained method and its data.
        steps: of one kind in a round.
        rounds: where steps are taken as they are written, since a CPU's are large.
        precision: the Trainer's.
    """
    laps = fit(*make(), rounds, precision=precision)
    enough = rounds_until_repeated(steps)
    if rounds >= enough or (device() == "cpu" and laps.best / steps > SMALL_STEP):
        return laps
    return fit(*make(), enough, precision=precision)


def last_line_of(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Run a command as a session of its own, which ends with us; the last line that it prints.

    Raises:
        ConfigurationError: it failed.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            printed, said = process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        last = " / ".join(said.strip().splitlines()[-3:])
        raise ConfigurationError(
            f"{' '.join(command)} ended with status {process.returncode}: {last}; run it by itself to see more"
        )
    return printed.splitlines()[-1]


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


def _cells(row: Timing) -> tuple[str, ...]:
    """Return the cells of a row in a table."""
    return (
        row.what,
        row.work,
        f"{row.seconds:.4g}",
        "" if row.ratio is None else f"{row.ratio:.3f}",
        "" if row.share_of_peak is None else f"{100 * row.share_of_peak:.0f} %",
        "" if row.memory is None else f"{row.memory / 2**20:.0f}",
        row.note,
    )


def rows_table(title: str, rows: Sequence[tuple[str, Timing]]) -> Table:
    """A table for the screen of (case, row); without a column of cases if none has a name."""
    table = Table(title=title, title_justify="left")
    cases = any(case for case, _ in rows)
    for name in ("case",) * cases + COLUMNS:
        table.add_column(name, justify="right" if name in ("seconds", "ratio", "of peak", "MB") else "left")
    for case, row in rows:
        table.add_row(*(case,) * cases, *_cells(row))
    return table


def report(case: str, title: str, rows: Sequence[Timing], folder: Path, settings: dict[str, Any] | None = None) -> None:
    """Print the rows and write them to ``folder/case.md`` and, with the hardware, ``folder/case.json``.

    Args:
        case: name of the file.
        title: one line on what was done.
        rows: the measurements.
        folder: where to write.
        settings: what else belongs to the record.
    """
    Console(width=160).print(rows_table(title, [("", row) for row in rows]))
    folder.mkdir(parents=True, exist_ok=True)
    body = tabulate([_cells(row) for row in rows], list(COLUMNS), tablefmt="pipe", disable_numparse=True)
    write_text(folder / f"{case}.md", f"# {title}\n\n{body}\n")
    record = {"title": title, "rows": [asdict(row) for row in rows], **(settings or {})}
    write_json(
        folder / f"{case}.json", {**record, "device": device(), "threads": torch.get_num_threads(), **environment()}
    )
