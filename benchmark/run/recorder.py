"""Writes the record of a run: metrics of every evaluation as they come, everything else when the run ends."""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from benchmark.engine.refusals.trainer_settings import check_monitored, tell_who_looks_at_test_images
from benchmark.engine.reports import Reports
from benchmark.errors import ConfigurationError
from benchmark.hostile import of_honest
from benchmark.metrics import EVALUATED, HONEST_ACCURACY
from benchmark.own_metrics import own_facts, paths_of
from benchmark.records.environment import checkout, environment
from benchmark.records.evaluations import (
    has_evaluations,
    read_evaluations,
    remove_evaluations,
    remove_merged,
    sha256_of,
    write_evaluation,
)
from benchmark.records.kept_rounds import KeptRounds
from benchmark.records.metrics_table import PARTS, as_read, read_table, rows_sha256
from benchmark.records.record import Git, RunRecord
from benchmark.records.record_file import is_finished, write_record
from benchmark.records.source_code import code_of, combined
from benchmark.run.checkpoint_form import check_counts, check_longer
from benchmark.run.differences import differences
from benchmark.run.early_stop import was_stopped
from benchmark.run.federation_file import FederationFacts
from benchmark.run.predictions import predictions_of, refuse_files, tell_size
from benchmark.run.scores import Key, Scores, logged_numbers, long_table
from benchmark.run.subgroups import write_subgroups
from benchmark.run.tracking import Numbers, Tracking, sent
from benchmark.server import ServerRule

if TYPE_CHECKING:  # slow to import
    import pandas as pd

    from benchmark.method import FederatedMethod
    from datamodules.federated import FederatedDataModule


def _made_with(state: dict[str, Any]) -> dict[str, Any]:
    """The configuration that the state of a checkpoint names; nothing if it had none."""
    try:
        made_with: dict[str, Any] = dict(json.loads(state["config"]) or {})
        return {name: dict(part) if name in ("data", "trainer") else part for name, part in made_with.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError("the checkpoint can't be continued: it does not hold its configuration") from error


def _path(entry: object) -> str:
    """Dotted path of an object's class."""
    return f"{type(entry).__module__}.{type(entry).__qualname__}"


def _wrapped(module: nn.Module) -> Iterator[ServerRule]:
    """The rules that lie in a module, but for those in one of them."""
    for part in module.children():
        if isinstance(part, ServerRule):
            yield part
        else:
            yield from _wrapped(part)


def chain(rule: ServerRule) -> str:
    """Dotted path of a rule's class, with those of the rules that it wraps in brackets."""
    inner = ", ".join(map(chain, _wrapped(rule)))
    return f"{_path(rule)}({inner})" if inner else _path(rule)


class Recorder(Callback):
    """Collects client x round x metric, logs the averages, and writes the run's record.

    With a run directory each evaluation is a file there (:mod:`benchmark.records.evaluations`), and a checkpoint only
    counts and hashes them; without, the checkpoint holds them all. So a resumed run ends with the same table as an
    uninterrupted one.

    Over several ranks each has the last evaluation's scores, for callbacks that ask; the first one alone writes and
    tells loggers.

    Args:
        run_dir: the run's directory; None keeps everything in memory.
        config: the resolved configuration as plain values; a checkpoint of another one is refused.
    """

    def __init__(self, run_dir: str | None = None, config: dict[str, Any] | None = None) -> None:
        self.run_dir = Path(run_dir) if run_dir else None
        self.config = config
        #: per round, point, split and metric one value per client; with a run directory of the last evaluation alone
        self.values: Scores = {}
        #: likewise the values of all clients' images together, of metrics that are pooled from counts
        self.pooled: dict[Key, float] = {}
        #: with a run directory: per evaluated round the sha256 of its rows
        self.evaluations: dict[int, str] = {}
        self.seconds = {"total": 0.0, "training": 0.0, "evaluation": 0.0}
        #: by module the hash of its source, of the rounds so far
        self.code: dict[str, str] = {}
        self._reports: Reports | None = None
        self._loaded: dict[str, Any] | None = None
        self._beside = Path()
        self._began = 0.0
        self._round_began = 0.0
        self._evaluation_began = 0.0
        self._tracking = Tracking((), self.run_dir)
        self._writes = True
        self._peak = 0
        self._kept: KeptRounds | None = None
        self._git: Git | None = None  # as the training began: there may be other commits by its end

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write what is known before training: the partition's manifest, facts of the federation, and subgroups.

        Raises:
            ConfigurationError: the directory holds a finished run, or a column has no subgroups to compare.
        """
        self._writes = trainer.is_global_zero
        self._tracking = Tracking(trainer.loggers if self._writes else (), self.run_dir)
        if self.run_dir and stage == "fit" and self._writes:
            if is_finished(self.run_dir):
                raise ConfigurationError(f"{self.run_dir} holds a finished run; give another directory")
            data = cast("FederatedDataModule", trainer.datamodule)  # type: ignore[attr-defined]
            write_subgroups(self.run_dir, data)  # before the manifest, as it may refuse a column
            data.split_record.write(self.run_dir / "manifest.json")
            FederationFacts.of(data).write(self.run_dir)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the evaluations so far, start the clock, note the code, and tell the loggers what to group this run by.

        Raises:
            ConfigurationError: the evaluations that the checkpoint counts are not there, or are others.
        """
        data = cast("FederatedDataModule", trainer.datamodule)  # type: ignore[attr-defined]
        method = cast("FederatedMethod", pl_module)
        self._keep(trainer, method, data)
        before, finished = self._loaded, method.server.finished_rounds
        if before is not None and was_stopped(trainer, _made_with(before), finished):
            trainer.should_stop = True
        self._take_up(method)
        tell_who_looks_at_test_images(trainer)
        between = (*method.server.rule.modules(), *method.server.delivery.modules())
        parts = (method, *between, data, data.source, data.partition, *([data.ood] if data.ood else []))
        self.code = combined(self.code, code_of(parts, [self.config, *paths_of(data.metrics)]))
        self._git = checkout() if self.run_dir and self._writes else None
        names = {
            "method": type(method).__name__,
            "server": chain(method.server.rule),
            "dataset": data.source.recorded_name,
            "setting": data.partition.description,
            "seed": data.seed,
        }
        goes_on = bool(method.server.finished_rounds or self.values or self.evaluations)
        self._tracking.begin(self.config, names, data.split_record, method.server.finished_rounds if goes_on else None)
        if self._writes and goes_on:
            evaluated = self.metrics() if self.values or self.evaluations else None
            self._tracking.rounds_before(method.server.traffic.rounds, evaluated, method.server.facts)
        self._began = time.perf_counter()

    def _keep(self, trainer: Trainer, method: "FederatedMethod", data: "FederatedDataModule") -> None:
        """Know which evaluations' images are kept.

        Raises:
            ConfigurationError: there is no directory for them, or they are too many.
        """
        keep = data.kept_rounds
        if self.run_dir is None:
            refuse_files(data)
            return
        self._kept = KeptRounds(self.run_dir, keep)
        if keep == "all" and self._writes:
            tell_size(method, data, trainer.max_epochs or 0, trainer.check_val_every_n_epoch or 1)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the round."""
        self._round_began = time.perf_counter()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the evaluation."""
        self._evaluation_began = time.perf_counter()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the scores of all clients after this round; the sanity check before training is round 0.

        Raises:
            ConfigurationError: a callback of the Trainer waits for a name that is not among the scores.
        """
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._collect(trainer, cast("FederatedMethod", pl_module))
        self.seconds["evaluation"] += time.perf_counter() - self._evaluation_began

    on_test_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    def _collect(self, trainer: Trainer, method: "FederatedMethod") -> None:
        round = method.server.finished_rounds
        averages: Numbers = {}
        found: Scores = {}
        pooled: dict[Key, float] = {}
        hostile = self._hostile(trainer, method)
        for (point, split), scores in method.evaluation.scores.items():
            computed = {m: values.cpu().reshape(-1) for m, values in scores.compute().items()}  # a scalar of one client
            if hostile:
                computed[HONEST_ACCURACY] = of_honest(computed[EVALUATED], hostile)
            for metric, values in computed.items():
                found[round, point, split, metric] = values
                if not scores.scored():  # of all who have images of this split, nobody has trained yet
                    continue
                averages |= logged_numbers(point, split, metric, values, computed.get(EVALUATED))
            if scores.scored():
                defined = {metric: value for metric, value in scores.pooled().items() if not math.isnan(value)}
                pooled |= {(round, point, split, metric): value for metric, value in defined.items()}
        for name, values in method.simulation.reports.take().items():
            found[round, "local", "train", name] = values
            averages |= logged_numbers("local", "train", name, values)
        averages |= self._facts(trainer, method, found)
        if self.run_dir is None or trainer.state.fn != TrainerFn.FITTING:
            self.values |= found
            self.pooled |= pooled
        elif found:
            self.values, self.pooled = found, pooled
            if self._writes:
                table = long_table(found, pooled)
                self.evaluations[round] = write_evaluation(self.run_dir, round, table)
                if self._kept is not None and self._kept.keep != "none":
                    data = cast("FederatedDataModule", trainer.datamodule)  # type: ignore[attr-defined]
                    self._kept.take(round, as_read(table), predictions_of(method, data))
        # Straight to the loggers, with the round as x-axis; `self.log` would put optimizer steps there.
        self._tracking.round(round, averages | self._costs(trainer, method), found, _names(trainer))
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in averages.items()})
        if trainer.state.fn == TrainerFn.FITTING:
            check_monitored(trainer)

    def _hostile(self, trainer: Trainer, method: "FederatedMethod") -> frozenset[int]:
        """Return the clients that attack, by what they send or by what they learn from."""
        data = cast("FederatedDataModule", trainer.datamodule)  # type: ignore[attr-defined]
        return method.server.delivery.attackers.union(data.flipped_clients)

    def _facts(self, trainer: Trainer, method: "FederatedMethod", found: Scores) -> Numbers:
        """Return what rule and delivery have reported of the last round; each client's goes to ``found``."""
        if trainer.state.fn != TrainerFn.FITTING:
            return {}
        server, round = method.server, method.server.finished_rounds
        facts = dict(server.client_facts)
        if hostile := self._hostile(trainer, method):
            facts["hostile"] = torch.zeros(method.simulation.terms.num_clients, dtype=torch.float64)
            facts["hostile"][sorted(hostile)] = 1
        for name, values in facts.items():
            found[round, "server", "train", name] = values
        of_clients = {name: values.nanmean().item() for name, values in facts.items()}
        of_all = {name: values[round] for name, values in server.facts.items() if round in values}
        return {f"server/{name}": value for name, value in (of_all | of_clients).items()}

    def metrics(self) -> "pd.DataFrame":
        """The long table: round, client, point, split, metric, value."""
        return long_table(self.values, self.pooled) if self.run_dir is None else read_table(self.run_dir / PARTS)

    def _costs(self, trainer: Trainer, method: "FederatedMethod") -> Numbers:
        """Return the costs of a round of training: what was sent, and seconds."""
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING or not method.server.traffic.rounds:
            return {}
        began, now = self._evaluation_began, time.perf_counter()
        seconds = {"seconds/training": now - self._round_began}
        if began > self._round_began:
            seconds = {"seconds/training": began - self._round_began, "seconds/evaluation": now - began}
        return sent(method.server.traffic.rounds[-1]) | seconds

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Book the round's seconds, and tell the loggers of a round that is not evaluated."""
        method = cast("FederatedMethod", pl_module)
        if self._evaluation_began < self._round_began:
            self._tracking.round(method.server.finished_rounds, self._costs(trainer, method), {}, ())
        self._book()

    def _book(self) -> None:
        now = time.perf_counter()
        self.seconds["total"] += now - self._began
        self._began = now

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask all ranks how much memory they have taken, before they part."""
        method = cast("FederatedMethod", pl_module)
        self._peak = max(method.simulation.ranks.everybody("peak memory", peak_memory(method.device)))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the record, if the run is complete: its presence says so.

        It is after ``max_epochs`` rounds, or when something like ``EarlyStopping`` ends it; time that is up does not.
        """
        method = cast("FederatedMethod", pl_module)
        rounds = method.server.finished_rounds
        timers = (callback for callback in trainer.callbacks if isinstance(callback, Timer))  # type: ignore[attr-defined]
        out_of_time = any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers)
        complete = rounds >= (trainer.max_epochs or 0) or (trainer.should_stop and not out_of_time)
        self._book()  # also the evaluation of a run without rounds
        self.seconds["training"] = self.seconds["total"] - self.seconds["evaluation"]
        if self.run_dir is None or not self._writes or not complete or not self.evaluations or trainer.interrupted:
            return
        assert self._kept is not None
        made, metrics = self.record(trainer, method), self.metrics()
        keeps = self._kept.finish(metrics, made.test_sizes)
        record = write_record(self.run_dir, made, metrics, predictions=keeps)
        remove_merged(self.run_dir)
        self._kept.remove_parts()
        self._tracking.end(record)

    def record(self, trainer: Trainer, method: "FederatedMethod") -> RunRecord:
        """The record of a run that has ended, without what is made of its files and metrics.

        Args:
            trainer: that has run it.
            method: the run's.
        """
        data = cast("FederatedDataModule", trainer.datamodule)  # type: ignore[attr-defined]
        device = trainer.strategy.root_device  # when a run has ended, the method is on the CPU again
        return RunRecord(
            method=type(method).__name__,
            dataset=data.source.recorded_name,
            setting=data.partition.description,
            seed=data.seed,
            client_names=tuple(data.client_names),
            test_sizes=data.test_sizes,
            manifest_hash=data.split_record.hash,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            environment=environment(self._git),
            rounds=int(trainer.max_epochs or 0),
            rounds_trained=method.server.finished_rounds,
            communication=method.server.traffic.per_client(),
            seconds=dict(self.seconds),
            peak_memory_bytes=self._peak or peak_memory(device),
            server=chain(method.server.rule),
            default_server=chain(method.make_server()),
            code=dict(self.code),
            images_sha256=data.split_record.images_sha256,
            tuning=(self.config or {}).get("tuning"),
            delivery=None if method.server.delivery.is_plain else method.server.delivery.title,
            facts={name: {str(n): value for n, value in of.items()} for name, of in method.server.facts.items()}
            or None,
            privacy=method.server.guarantee(),
            own_metrics=own_facts(data.metrics),
            trained=method.server.who_trained(),
        )

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """The time that is left counts anew in every process, or a run that it stopped could never go on."""
        checkpoint["callbacks"].pop(Timer.__qualname__, None)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A resumed run has its evaluations before; it does not start with another.

        Raises:
            ConfigurationError: the run is another one, or can't go on from there.
        """
        trainer.num_sanity_val_steps = 0
        self._beside = Path(str(trainer.ckpt_path)).absolute().parents[1]
        if trainer.state.fn == TrainerFn.FITTING:
            method = cast("FederatedMethod", pl_module)
            self.refuse_other_run(trainer.max_epochs or 0, method, method.server.rule, checkpoint)

    def refuse_other_run(
        self, rounds: int, method: "FederatedMethod", rule: ServerRule, checkpoint: dict[str, Any]
    ) -> None:
        """Compare a checkpoint with the run that is to go on from it.

        Args:
            rounds: of the run.
            method: the run's.
            rule: its server's.
            checkpoint: from :func:`benchmark.run.checkpoint.read_checkpoint`.

        Raises:
            ConfigurationError: they differ in what can change a result, the checkpoint has more rounds than the run,
                or its learning rates or its server follow the number of rounds, which is another one.
        """
        state = checkpoint["callbacks"][self.state_key]
        self.refuse_other_configuration(state)
        finished = checkpoint["callbacks"]["server"]["finished_rounds"]
        if finished > rounds:
            raise ConfigurationError(
                f"the checkpoint holds {finished} rounds, more than trainer.max_epochs={rounds}; give at least "
                f"{finished}, or start without --ckpt_path"
            )
        made_with = _made_with(state)
        images = made_with.get("data", {})
        width = 1 if images.get("one_by_one") else images.get("cohort_width") or images.get("clients_at_once")
        check_counts(checkpoint, method.num_clients, width, method.local_phases())
        asked_for = made_with.get("trainer", {}).get("max_epochs", rounds)
        if asked_for != rounds:
            check_longer(asked_for, rounds, method.local_phases(), rule)

    def state_dict(self) -> dict[str, Any]:
        """Return the evaluations so far, the reports since the last one, the clock, configuration and code."""
        state: dict[str, Any] = {
            "reports": self._reports.state_dict() if self._reports else {},
            "seconds": dict(self.seconds),
            "config": json.dumps(self.config, default=str),
            "code": dict(self.code),
        }
        if self.run_dir is not None:
            return state | {"evaluations": len(self.evaluations), "sha256": sha256_of(self.evaluations)}
        keys = sorted(self.values)
        values = torch.stack([self.values[key] for key in keys]) if keys else torch.zeros(0, 0)
        state |= {"keys": json.dumps(keys), "values": values}
        return state | ({"pooled": json.dumps([*self.pooled.items()])} if self.pooled else {})

    def refuse_other_configuration(self, state_dict: dict[str, Any]) -> None:
        """Compare the configuration with the one that the state of a checkpoint names.

        Raises:
            ConfigurationError: they differ in what can change a result.
        """
        made_with = _made_with(state_dict)
        if self.config is None:
            return
        if not made_with:
            raise ConfigurationError("the checkpoint can't be continued: it does not hold its configuration")
        now = json.loads(json.dumps(self.config, default=str))
        differing = differences({name: made_with.get(name) for name in now}, now)
        if differing:
            raise ConfigurationError(
                "the checkpoint is of another configuration: "
                + "; ".join(f"{key} was {before!r}, is {now!r}" for key, before, now in differing[:4])
                + "; give the configuration it was made with, or start without --ckpt_path"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore clock and code; the evaluations are taken up when training starts.

        Raises:
            ConfigurationError: the checkpoint was made with another configuration.
        """
        self.refuse_other_configuration(state_dict)
        self._loaded = state_dict
        self.seconds = dict(state_dict["seconds"])
        self.code = dict(state_dict["code"])

    def _take_up(self, method: "FederatedMethod") -> None:
        """Go on where the checkpoint was made, or where this process last trained, or begin."""
        before, self._loaded = self._loaded, None
        count, sha256, source = len(self.evaluations), sha256_of(self.evaluations), self.run_dir
        if before is not None:
            if ("values" in before) != (self.run_dir is None):
                raise ConfigurationError(
                    "the checkpoint's metrics are "
                    + ("in the checkpoint itself" if "values" in before else "files of its run directory")
                    + f", and this run keeps its own in {self.run_dir or 'memory'}; continue it as it was begun"
                )
            method.simulation.reports.load_state_dict(before["reports"])
            if self.run_dir is None:
                keys = map(tuple, json.loads(before["keys"]))
                self.values = dict(zip(keys, before["values"], strict=True))
                self.pooled = {tuple(key): value for key, value in json.loads(before.get("pooled", "[]"))}
            else:
                count, sha256 = before["evaluations"], before["sha256"]
                source = self._beside if self._writes and has_evaluations(self._beside) else self.run_dir
        self._reports = method.simulation.reports
        if self.run_dir is not None and source is not None and self._writes:
            self._take_up_files(self.run_dir, source, count, sha256)

    def _take_up_files(self, run_dir: Path, source: Path, count: int, sha256: str) -> None:
        """Have the first ``count`` evaluations that lie in ``source`` in the run's directory, and no others."""
        found = {round: rows_sha256(table) for round, table in islice(read_evaluations(source), count)}
        if sha256_of(found) != sha256:
            raise ConfigurationError(
                f"the checkpoint was made after {count} evaluations, and in {source} are "
                + (f"{len(found)}" if len(found) < count else "others")
                + f"; put back {PARTS}/ or metrics.parquet as they were beside it, or start without --ckpt_path"
            )
        if not source.samefile(run_dir) or (run_dir / "metrics.parquet").exists():
            for round, table in islice(read_evaluations(source), count):
                write_evaluation(run_dir, round, table)
        if self._kept is not None:
            self._kept.take_up(source, islice(read_evaluations(source), count))
        self.evaluations = found
        remove_evaluations(run_dir, found)


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has taken at most, on its device, or of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _names(trainer: Trainer) -> list[str]:
    return cast("FederatedDataModule", trainer.datamodule).client_names  # type: ignore[attr-defined]
