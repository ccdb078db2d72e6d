"""Tell the Trainer's loggers the configuration, every round, the clients, the partition, and the record."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from benchmark.metrics import EVALUATED, POOLED_CLIENT
from benchmark.records.record import RunRecord
from benchmark.records.record_file import FILES
from benchmark.run.scores import Scores, logged_name, logged_numbers
from datamodules.heatmap import manifest_heatmap
from datamodules.split_record import SplitRecord

if TYPE_CHECKING:  # slow to import
    import pandas as pd

Numbers = dict[str, float]

#: Clients that a table of each of them has at most.
LARGEST_TABLE = 10_000


class Tracking:
    """Tells some loggers of a run; the x-axis is the round.

    Args:
        loggers: the Trainer's.
        run_dir: the run's, if it has one.
    """

    def __init__(self, loggers: Sequence[Logger], run_dir: Path | None) -> None:
        self.loggers = loggers
        self.run_dir = run_dir
        self._settings: dict[str, Any] = {}

    def begin(
        self, config: dict[str, Any] | None, names: dict[str, Any], split: SplitRecord, told: int | None = None
    ) -> None:
        """Tell of the whole configuration, by dotted names, and draw the partition.

        Args:
            config: the resolved one, if there is one.
            names: what runs are grouped by: method, server, data set, setting, seed.
            split: the record of the partition.
            told: the last round that loggers were told of by another process; None where the run begins.
        """
        settings = flattened(config or {})
        # The loggers' own are not the run's.
        self._settings = {k: v for k, v in settings.items() if not k.startswith("trainer.logger")} | names
        for logger in self.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.define_metric("round")
                logger.experiment.define_metric("*", step_metric="round")
            logger.log_hyperparams(self._settings)
        if self.run_dir is not None and any(isinstance(g, WandbLogger | TensorBoardLogger) for g in self.loggers):
            picture = self.run_dir / "partition.png"
            if told is None or not picture.exists():
                manifest_heatmap(split.manifest, picture, dataset=names["dataset"])
                for logger in self.loggers:
                    _show(logger, picture)
        for logger in self.loggers:
            if isinstance(logger, WandbLogger) and told is not None:
                _skip_rows(logger, told + 2)  # after those of the picture and of rounds 0 to `told`

    def round(self, number: int, numbers: Numbers, found: Scores, client_names: Sequence[str]) -> None:
        """Tell of a round.

        Args:
            number: its.
            numbers: averages over clients, and costs.
            found: what each client has, if it was evaluated.
            client_names: N.
        """
        of_clients = any(isinstance(logger, WandbLogger | TensorBoardLogger) for logger in self.loggers)
        clients = _by_metric(found) if of_clients and len(client_names) <= LARGEST_TABLE else {}
        repeatable = {name: value for name, value in numbers.items() if not name.startswith("seconds/")}
        for logger in self.loggers:
            if isinstance(logger, WandbLogger):
                told: dict[str, Any] = {**numbers, "round": number}
                if clients:
                    told["clients"] = _table(clients, client_names)
                logger.log_metrics(told, step=number)
            elif isinstance(logger, CSVLogger):  # whose file is the same after a resume
                logger.log_metrics({**repeatable}, step=number)
            else:
                logger.log_metrics(numbers, step=number)
            if isinstance(logger, TensorBoardLogger):
                for name, values in clients.items():
                    if known := [value for value in values if math.isfinite(value)]:
                        logger.experiment.add_histogram(f"clients/{name}", torch.tensor(known), number)

    def rounds_before(
        self, traffic: Sequence[Sequence[int]], metrics: "pd.DataFrame | None", facts: Mapping[str, Mapping[int, float]]
    ) -> None:
        """Tell of the rounds before a resume those loggers that begin a new file in every process.

        Args:
            traffic: of each round, see :class:`benchmark.engine.communication.Traffic`.
            metrics: the long table of the evaluations so far; None where there was none.
            facts: of rule and delivery, per name and round (``Server.facts``).
        """
        before = {number: sent(row) for number, row in enumerate(traffic, start=1)}
        rounds = {} if metrics is None else {cast(int, number): table for number, table in metrics.groupby("round")}
        for number, table in rounds.items():
            averages = before.setdefault(number, {})
            of_clients = table[table["client"] != POOLED_CLIENT].pivot(
                index="client", columns=["point", "split", "metric"], values="value"
            )
            found = {
                cast("tuple[str, str, str]", key): torch.tensor(values.to_numpy()) for key, values in of_clients.items()
            }
            for (point, split, metric), values in found.items():
                evaluated = found.get((point, split, EVALUATED))
                averages |= logged_numbers(point, split, metric, values, evaluated)
            averages |= {f"server/{name}": of[number] for name, of in facts.items() if number in of}
        for logger in self.loggers:
            if isinstance(logger, CSVLogger):
                for number in sorted(before):
                    logger.log_metrics({**before[number]}, step=number)

    def end(self, record: RunRecord) -> None:
        """Tell of a finished run: the record's summary, and the record itself with the files it holds the hashes of."""
        assert self.run_dir is not None
        summary = {
            f"{which}/{split}/{point}/{metric}/{statistic}": value
            for point, splits in record.summary.items()
            for split, metrics in splits.items()
            for metric, entry in metrics.items()
            for which, values in entry.items()
            for statistic, value in flattened(values).items()
            if isinstance(value, int | float)
        }
        for logger in self.loggers:
            if isinstance(logger, WandbLogger):
                import wandb

                logger.experiment.summary.update(summary)
                artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", self.run_dir.name), type="record")
                for name in (*FILES, "record.json"):
                    artifact.add_file(str(self.run_dir / name))
                logger.experiment.log_artifact(artifact)
            elif isinstance(logger, TensorBoardLogger):
                # What TensorBoard compares runs by; their curves have names of their own.
                scores = {name: value for name, value in summary.items() if re.fullmatch(r"last/.*/average", name)}
                logger.log_hyperparams(self._settings, scores)
                logger.experiment.add_text("record", f"```json\n{(self.run_dir / 'record.json').read_text()}\n```")


def flattened(value: Any, name: str = "") -> dict[str, Any]:
    """Nested mappings, and lists of them, as one mapping by dotted names."""
    entries: Any = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        entries = enumerate(value)
    if not entries:
        return {name: value} if name else {}
    return {k: v for key, entry in entries for k, v in flattened(entry, f"{name}.{key}".lstrip(".")).items()}


def sent(row: Sequence[int]) -> Numbers:
    """Return what travelled in a round, of all its clients together.

    Args:
        row: see :class:`benchmark.engine.communication.Traffic`.
    """
    names = ("clients", "down_bytes", "up_bytes")
    return {f"communication/{name}": float(number) for name, number in zip(names, row, strict=False)}


def _by_metric(found: Scores) -> dict[str, list[float]]:
    """Return the values of all clients by name of the metric."""
    return {logged_name(point, split, metric): values.tolist() for (_, point, split, metric), values in found.items()}


def _table(clients: Mapping[str, list[float]], names: Sequence[str]) -> Any:
    """W&B's table of clients x metrics; empty where a client did not take part."""
    import wandb

    rows = zip(*clients.values(), strict=True)
    data: list[Iterable[Any]] = [
        [client, name, *(None if math.isnan(value) else value for value in row)]
        for client, (name, row) in enumerate(zip(names, rows, strict=True))
    ]
    return wandb.Table(columns=["client", "name", *clients], data=data)


def _skip_rows(logger: WandbLogger, row: int) -> None:
    """Have W&B's history go on at a row: offline, each process would count from 0 and write over the first rows."""
    if logger.experiment.step < row:
        logger.experiment.log({}, step=row, commit=False)


def _show(logger: Logger, picture: Path) -> None:
    """Give a logger that takes pictures the partition's."""
    if isinstance(logger, WandbLogger):
        logger.log_image("partition", [str(picture)])
    elif isinstance(logger, TensorBoardLogger):
        import numpy as np
        from PIL import Image

        with Image.open(picture) as image:
            logger.experiment.add_image("partition", np.asarray(image.convert("RGB")), dataformats="HWC")
