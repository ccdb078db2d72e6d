"""A long run as its users start it: whether its last rounds cost what its first ones did, and its memory stays flat.

300 rounds of ``lightning-cli`` with 1,000 clients, tiny images and a small network, evaluated every ten rounds, each
round with its checkpoint; then planning and evaluating 10,000 and 100,000 clients.
"""

import json
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch.callbacks import Callback

from benchmark.config.overview import PROGRAM
from benchmark.errors import ConfigurationError
from benchmark.speed.growth import SIZE, TRAINING, SmallBackbone
from benchmark.speed.measure import RandomImages, Timing, fit, seconds
from datamodules.federated import FederatedDataModule
from datamodules.partition import IID
from datamodules.transform import ImageTransform
from methods.fedper import FedPer

#: the data set, in a module of its own as a user's is
MODULE = "from benchmark.speed.measure import RandomImages\n\n\nclass Noise(RandomImages):\n    pass\n"

CLIENTS, ROUNDS, EVERY, PARTICIPANTS = 1_000, 300, 10, 10
EVALUATED = (10_000, 100_000)


class RoundWatch(Callback):
    """Writes down what every round took, from its start to the next one's, and the process's peak memory by then.

    Args:
        path: of the JSON, a list of ``[seconds, CPU seconds, peak bytes]``, one a round.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.rounds: list[tuple[float, float, int]] = []
        self._began = (0.0, 0.0)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """The round before ends, its checkpoint included, and the next begins."""
        now = (time.perf_counter(), time.process_time())
        if trainer.current_epoch:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self.rounds.append((now[0] - self._began[0], now[1] - self._began[1], peak))
        self._began = now

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last round ends."""
        self.on_train_epoch_start(trainer, pl_module)
        self.path.write_text(json.dumps(self.rounds))


def arguments(clients: int, rounds: int, run_dir: Path, watched: Path) -> list[str]:
    """Of ``lightning-cli``, for FedPer with so many clients."""
    return [
        *("fit", f"--run_dir={run_dir}", "--model=FedPer", "--trainer.accelerator=cpu"),
        *("--model.backbone=benchmark.speed.growth.SmallBackbone", "--model.training.lr=0.001"),
        *("--model.training.epochs=1", "--data.source=noise.Noise"),
        *(f"--data.source.train={2 * clients}", f"--data.source.test={clients}", f"--data.source.size={SIZE}"),
        *("--data.partition=IID", f"--data.partition.num_clients={clients}", "--data.batch_size=2"),
        *(f"--data.clients_per_round={PARTICIPANTS}", f"--data.clients_at_once={PARTICIPANTS}"),
        *(f"--trainer.max_epochs={rounds}", f"--trainer.check_val_every_n_epoch={EVERY}"),
        *("--trainer.enable_progress_bar=false", "--trainer.callbacks=benchmark.speed.product.RoundWatch"),
        f"--trainer.callbacks.path={watched}",
    ]


def long_run(clients: int, rounds: int) -> list[tuple[float, float, int]]:
    """Per round seconds, CPU seconds and peak bytes of a run of ``lightning-cli``.

    Raises:
        ConfigurationError: the run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        watched = Path(folder) / "rounds.json"
        (Path(folder) / "noise.py").write_text(MODULE)
        search = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": search}
        command = [*PROGRAM, *arguments(clients, rounds, Path(folder) / "run", watched)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            last = " / ".join(done.stderr.strip().splitlines()[-3:])
            raise ConfigurationError(f"lightning-cli ended with status {done.returncode}: {last}")
        return [tuple(entry) for entry in json.loads(watched.read_text())]


def round_rows(rounds: list[tuple[float, float, int]]) -> list[Timing]:
    """Medians of rounds of the same kind: those after the first, and the last ones, against them."""
    rows = []
    for kind, numbers, count in (
        ("without evaluation", [r for r in range(2, len(rounds) + 1) if r % EVERY], EVERY - 2),
        ("with evaluation", list(range(EVERY, len(rounds) + 1, EVERY)), 3),
    ):
        first: tuple[float, float] | None = None
        for chosen in (numbers[:count], numbers[-count:]):
            wall, cpu = (median(rounds[r - 1][column] for r in chosen) for column in (0, 1))
            first = first or (wall, cpu)
            rows.append(
                Timing(
                    f"round {kind}",
                    f"rounds {chosen[0]} to {chosen[-1]}, median of {count}",
                    wall,
                    wall / first[0],
                    memory=int(rounds[chosen[-1] - 1][2]),
                    note=f"CPU seconds {cpu:.4g}, ratio {cpu / first[1]:.3f}",
                )
            )
    return rows


def evaluation_rows(numbers: tuple[int, ...]) -> list[Timing]:
    """Planning and evaluating by the number of clients, one test image each; ratios are seconds a client."""
    found: dict[int, tuple[float, float]] = {}
    for clients in numbers:
        data = FederatedDataModule(
            RandomImages(2 * clients, clients, SIZE),
            IID(clients),
            ImageTransform(),
            batch_size=2,
            clients_per_round=PARTICIPANTS,
            clients_at_once=PARTICIPANTS,
        )
        laps = fit(FedPer(10, clients, SmallBackbone(), training=TRAINING), data, 2, evaluate_every=1)
        found[clients] = (seconds(data.val_dataloader), min(laps.evaluations))
    first = numbers[0]
    return [
        Timing(
            what,
            f"{clients:,} clients",
            taken[place],
            (taken[place] / clients) / (found[first][place] / first),
            note="ratio: seconds a client",
        )
        for place, what in enumerate(("planning an evaluation", "evaluating"))
        for clients, taken in found.items()
    ]


def run(folder: Path) -> tuple[str, list[Timing]]:
    """The long run, then the large evaluations."""
    rows = [*round_rows(long_run(CLIENTS, ROUNDS)), *evaluation_rows(EVALUATED)]
    title = (
        f"{ROUNDS} rounds of lightning-cli with {CLIENTS:,} clients, checkpoint included; and many clients evaluated"
    )
    return title, rows
