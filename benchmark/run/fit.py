"""A run from Python: method, data and rounds in; metrics, record and what was learned out."""

import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from inspect import signature
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from benchmark.config.parser import FederatedParser
from benchmark.config.yaml_files import dump_yaml, read_mapping
from benchmark.delivery import Delivery
from benchmark.engine.refusals.author_errors import check_constructed
from benchmark.engine.refusals.trainer_callbacks import given_callbacks
from benchmark.engine.refusals.trainer_settings import check_settings, several_devices
from benchmark.errors import ConfigurationError
from benchmark.method import FederatedMethod
from benchmark.paths import user_path
from benchmark.records.metrics_table import as_read
from benchmark.records.record import RunRecord
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import read_metrics
from benchmark.records.summary import summarize
from benchmark.run.alone import alone
from benchmark.run.callbacks import round_callbacks
from benchmark.run.cli import TRAINER_DEFAULTS, FederatedCLI, of_the_trainer, prepare_process, reported
from benchmark.run.described import check_made_again, described
from benchmark.run.ending import score_lines
from benchmark.run.predictions import predictions_of
from benchmark.run.recorder import Recorder
from benchmark.run.reload import client_values
from benchmark.server import ServerRule
from benchmark.shipped import configuration
from benchmark.signals import interrupting_signal
from datamodules.federated import FederatedDataModule

if TYPE_CHECKING:  # slow to import
    import pandas as pd

#: Arguments of the Trainer that take objects, from Python.
OBJECTS = ("callbacks", "logger", "plugins")


@dataclass(frozen=True, repr=False)
class FinishedRun:
    """Run that has ended: its record, metrics and trained method.

    Attributes:
        method: as it was after the last round: its shared parameters hold the server's values.
        data: the federation's images, set up.
        metrics: the long table: round, client, point, split, metric, value.
        record: options, costs, environment and summary; ``files`` and ``config_hash`` are empty without run directory.
    """

    method: FederatedMethod
    data: FederatedDataModule
    metrics: "pd.DataFrame"
    record: RunRecord

    def __repr__(self) -> str:
        """Say in three lines what was run, what came of it and what the object holds."""
        record = self.record
        rounds = f"{record.rounds_trained} round{'s' * (record.rounds_trained != 1)}"
        scores = score_lines(record.summary, record.rounds_trained) or ["not evaluated"]
        shown = next((line for line in scores if line.startswith("test ")), scores[0])
        return (
            f"{record.method} on {record.dataset}, {len(record.client_names)} clients, {rounds}, seed {record.seed}\n"
            f"{shown}\n"
            f"metrics: {len(self.metrics):,} rows; client(k): its parameters; predict(images, k); method, data, record"
        )

    @property
    def predictions(self) -> "pd.DataFrame":
        """Scored images of the last evaluation (:data:`benchmark.records.predictions.COLUMNS`).

        Raises:
            ConfigurationError: the run keeps none.
        """
        made = predictions_of(self.method, self.data) if self.data.keeps_images else None
        if made is None:
            how = "metrics='clinical'" if self.data.keep_predictions is None else "keep_predictions='last'"
            raise ConfigurationError(f"the run keeps no scored images; give data {how}")
        return made

    def client(self, client: int) -> dict[str, Tensor]:
        """Return the parameters of one client: what the server sends it after the last round, and what is its own.

        They are for ``torch.func.functional_call(run.method, run.client(3), (images,))``.

        Args:
            client: its index.

        Raises:
            ConfigurationError: there is no such client.
        """
        if client not in range(self.data.num_clients):
            raise ConfigurationError(f"there is no client {client!r}; the clients are 0 to {self.data.num_clients - 1}")
        return client_values(self.method, client)

    def predict(
        self, images: "str | Path | Sequence[str | Path] | Tensor", client: str | int | None = None, **how: Any
    ) -> "pd.DataFrame":
        """Classify images as a client does; see :meth:`benchmark.predict.trained_run.TrainedRun.predict`."""
        from benchmark.predict.trained_run import TrainedRun

        return TrainedRun.of(self.method, self.data).predict(images, client, **how)


@overload
def fit(
    method: FederatedMethod,
    data: FederatedDataModule,
    rounds: int = ...,
    *,
    server: ServerRule | None = ...,
    delivery: Delivery | None = ...,
    run_dir: str | Path | None = ...,
    **trainer: Any,
) -> FinishedRun: ...


@overload
def fit(
    method: str | Path,
    data: str | Path | None = ...,
    rounds: int | None = ...,
    *,
    seed: int | None = ...,
    run_dir: str | Path | None = ...,
    **trainer: Any,
) -> FinishedRun: ...


def fit(
    method: FederatedMethod | str | Path,
    data: FederatedDataModule | str | Path | None = None,
    rounds: int | None = None,
    *,
    server: ServerRule | None = None,
    delivery: Delivery | None = None,
    seed: int | None = None,
    run_dir: str | Path | None = None,
    **trainer: Any,
) -> FinishedRun:
    """Run a federation, as ``lightning-cli fit`` does: the same numbers bit for bit.

    Args:
        method: a method that has not been trained, made after ``lightning.seed_everything(seed)``; or a configuration
            file, of a method or of a whole run, by its path or its name (``benchmark configs``).
        data: its data; or a configuration file, of data or of a suite, where ``method`` is one and does not name them.
        rounds: how many; 10 by default, or what the configuration says.
        server: instead of the mean of the uploads, for methods that average, or a rule around any other; of a
            configuration, the file names it.
        delivery: what lies between clients and server; of a configuration, the file names it.
        seed: of the run, where it is made of configuration files; else it is that of the data, ``data.seed``.
        run_dir: where to keep configuration, checkpoints and record, as ``lightning-cli fit`` does; None keeps
            everything in memory but what loggers write. Of objects, what their constructors were given is written as
            a configuration, and the run is made of that: ``method`` of the returned run is another object, and the
            given one stays untrained.
        trainer: further arguments of Lightning's Trainer, such as ``accelerator="cpu"``, ``enable_progress_bar=False``.

    Raises:
        ConfigurationError: bad input, in one line, before anything is trained.
        KeyboardInterrupt: it was interrupted.
    """
    prepare_process()
    if "max_epochs" in trainer:
        raise ConfigurationError("fit: max_epochs can't be given; the number of rounds is rounds")
    if not (run_dir is None or (isinstance(run_dir, str | Path) and str(run_dir))):
        raise ConfigurationError(f"fit: run_dir must be the path of a folder, got {run_dir!r:.80}; or leave it out")
    if not (rounds is None or (isinstance(rounds, Integral) and not isinstance(rounds, bool) and rounds >= 0)):
        raise ConfigurationError(f"fit: rounds must be a whole number from 0, got {rounds!r}")
    rounds = None if rounds is None else int(rounds)  # NumPy's whole numbers are none that a file can hold
    with _one_line(), alone(), _wandb_run_of_its_own():
        if isinstance(method, FederatedMethod) and isinstance(data, FederatedDataModule):
            if seed is not None:
                raise ConfigurationError(
                    "fit: seed is for configuration files; of objects the seed is FederatedDataModule's"
                )
            if not (server is None or isinstance(server, ServerRule)):
                raise ConfigurationError(
                    f"fit: server must be a server rule, such as methods.servers.FedAdam(); got {server!r:.80}"
                )
            if not (delivery is None or isinstance(delivery, Delivery)):
                raise ConfigurationError(f"fit: delivery must be a benchmark.delivery.Delivery; got {delivery!r:.80}")
            settings = {"max_epochs": 10 if rounds is None else rounds, **trainer}
            _check_objects(method, data, settings)
            if run_dir is not None:
                return _keep_objects(method, data, server, delivery, settings, run_dir)
            return _fit_objects(method, data, server, delivery, settings)
        if isinstance(method, str | Path) and isinstance(data, str | Path | None):
            for name, given in (("server", server), ("delivery", delivery)):
                if given is not None:
                    raise ConfigurationError(
                        f"fit: with configuration files the {name} stands in one of them, as {name}"
                    )
            settings = {"max_epochs": rounds, **trainer} if rounds is not None else trainer
            return _fit_files([path for path in (method, data) if path is not None], seed, run_dir, settings)
    parts: tuple[Any, ...] = (method, data)
    classes = [part.__name__ for part in parts if isinstance(part, type)]
    raise ConfigurationError(
        "fit: expected a method and a FederatedDataModule, or one or two configuration files; got "
        f"{type(method).__name__} and {type(data).__name__}"
        + "".join(f"; {name} is a class, make one of it" for name in classes)
    )


def _check_objects(method: FederatedMethod, data: FederatedDataModule, trainer: dict[str, Any]) -> None:
    """Refuse a method that is no new one of the run's seed, and arguments that the Trainer does not have."""
    if "simulation" in vars(method):
        raise ConfigurationError("fit: the method has been trained already; make a new one for each run")
    check_constructed(method, "num_clients")
    # A server may draw its first values as the run begins, from the same generator.
    for what, seed in (("the method's", method.drawn_with), ("a server's", torch.initial_seed())):
        if seed != data.seed:
            raise ConfigurationError(
                f"fit: the run's seed is {data.seed}, and {what} first values are drawn "
                + (f"with seed {seed}" if seed < 2**32 else "without one")
                + f"; call lightning.seed_everything({data.seed}) before the method is made"
            )
    known = signature(Trainer).parameters
    for name in sorted(set(trainer) - set(known)):
        like = get_close_matches(name, known)
        raise ConfigurationError(
            f"fit: there is no argument {name!r} of the Trainer" + (f"; did you mean {like[0]}?" if like else "")
        )


def _keep_objects(
    method: FederatedMethod,
    data: FederatedDataModule,
    rule: ServerRule | None,
    delivery: Delivery | None,
    trainer: dict[str, Any],
    run_dir: str | Path,
) -> FinishedRun:
    """Run what a configuration of these objects makes, so that its folder can be resumed, used and repeated."""
    for name, value in trainer.items():
        if not _is_plain(value):
            raise ConfigurationError(
                f"fit: {name}={value!r:.80} is no plain value, and a run_dir's configuration could not hold it; leave "
                "one of the two out, or make the run from a configuration file, where classes stand by their names"
            )
    config = {**described(method, data, rule, delivery), "trainer": trainer}

    class OfObjects(FederatedCLI):
        """A run of a configuration that describes objects, whose method it compares before training."""

        def before_fit(self) -> None:
            super().before_fit()
            check_made_again(method, self.model)

    return _kept([f"--config={dump_yaml(config, sort_keys=False)}"], run_dir, OfObjects)


def _fit_objects(
    method: FederatedMethod,
    data: FederatedDataModule,
    rule: ServerRule | None,
    delivery: Delivery | None,
    trainer: dict[str, Any],
) -> FinishedRun:
    defaults = {name: parameter.default for name, parameter in signature(Trainer).parameters.items()}
    trainer = _read_as_options(trainer)
    given = {**TRAINER_DEFAULTS, "logger": False, "enable_checkpointing": False, **trainer}
    settings = Namespace(**{**defaults, **given})
    check_settings(settings, fitting=True)
    if several_devices(settings):
        raise ConfigurationError(
            f"fit: devices={settings.devices}, num_nodes={settings.num_nodes}: objects are trained by one process on "
            "one device; lightning-cli fit has several"
        )
    recorder = Recorder()
    own = round_callbacks(recorder, method, rule, delivery, settings)
    with of_the_trainer():
        made = Trainer(**{**given, "callbacks": [*given_callbacks(settings.callbacks), *own]})
    return _run(made, method, data, recorder)


def _read_as_options(trainer: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the Trainer as the command line reads them, but for objects, which it makes of class paths.

    Raises:
        ConfigurationError: a value is none that the argument takes.
    """
    loggers = trainer.get("logger")
    for logger in loggers if isinstance(loggers, list | tuple) else [loggers]:
        if not (logger is None or isinstance(logger, bool | Logger)):
            raise ConfigurationError(
                f"trainer.logger: expected loggers of Lightning, true or false, got {logger!r:.80}"
            )
    plain = {name: value for name, value in trainer.items() if name not in OBJECTS and _is_plain(value)}
    parser = FederatedParser()
    parser.add_class_arguments(Trainer, "trainer", skip=set(signature(Trainer).parameters) - set(plain))
    return {**trainer, **(parser.parse_object({"trainer": plain}).trainer.as_dict() if plain else {})}


def _is_plain(value: Any) -> bool:
    """Return whether a value is one that a configuration file can hold."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _fit_files(
    files: list[str | Path], seed: int | None, run_dir: str | Path | None, trainer: dict[str, Any]
) -> FinishedRun:
    paths = [configuration(str(path)) or Path(path) for path in files]
    arguments = [
        f"--{'data' if {'source', 'partition'} & set(read_mapping(path)) else 'config'}={path}" for path in paths
    ]
    arguments += [] if seed is None else [f"--seed_everything={seed}"]
    for name, value in trainer.items():
        try:
            arguments.append(f"--trainer.{name}={value if isinstance(value, str) else json.dumps(value)}")
        except TypeError as error:
            raise ConfigurationError(
                f"fit: {name}={value!r} is no plain value; with configuration files it stands in one of them"
            ) from error
    if run_dir is None:
        cli = FederatedCLI(arguments, run=False)
        return _run(cli.trainer, cli.model, cli.datamodule, cli.recorder)
    return _kept(arguments, run_dir)


def _kept(arguments: Sequence[str], run_dir: str | Path, kind: type[FederatedCLI] = FederatedCLI) -> FinishedRun:
    """Run with a directory."""
    folder = user_path(run_dir)
    cli = kind(["fit", *arguments, f"--run_dir={folder}"])
    return FinishedRun(cli.model, cli.datamodule, read_metrics(folder), read_record(folder))


@contextmanager
def _wandb_run_of_its_own() -> Iterator[None]:
    """End the W&B run that begins inside, or the next one of this process would go into it."""
    before = _wandb_run()
    try:
        yield
    finally:
        run = _wandb_run()
        if run is not None and run is not before:
            run.finish()


def _wandb_run() -> Any:
    """The run that W&B has open in this process, if any; W&B is not imported for it."""
    return getattr(sys.modules.get("wandb"), "run", None)


def _run(trainer: Trainer, method: FederatedMethod, data: FederatedDataModule, recorder: Recorder) -> FinishedRun:
    trainer.fit(method, datamodule=data)
    record, metrics = recorder.record(trainer, method), as_read(recorder.metrics())
    return FinishedRun(method, data, metrics, replace(record, summary=summarize(metrics, record.test_sizes)))


@contextmanager
def _one_line() -> Iterator[None]:
    """Raise errors about bad input unwrapped, and Ctrl-C as ``KeyboardInterrupt``; Lightning makes an exit of it."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except BaseException as error:
        if interrupting_signal(error) is not None:
            raise KeyboardInterrupt(str(error)) from None
        told = reported(error)
        if told is None or told is error:
            raise
        raise ConfigurationError(str(told)) from None
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
