"""Settings that make the loggers of a configuration write into the run's directory, under the run's name."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from pydoc import locate
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from benchmark.errors import ConfigurationError
from benchmark.files import reason


def _save_dir_is_optional(kind: type) -> None:
    """Let a configuration leave out ``save_dir``, which a run gives; the logger's own signature asks for it."""
    own: Any = vars(kind)["__init__"]
    signature = inspect.signature(own)
    parameters = [p.replace(default=".") if p.name == "save_dir" else p for p in signature.parameters.values()]
    own.__signature__ = signature.replace(parameters=parameters)


for _kind in (CSVLogger, TensorBoardLogger):
    _save_dir_is_optional(_kind)


def configured(trainer: Any) -> list[Any]:
    """The loggers that the Trainer's arguments name by class; none for the default one, or for none."""
    loggers = trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]
    return [logger for logger in loggers if hasattr(logger, "class_path")]


def place(logger: Any, run_dir: Path) -> None:
    """Have a logger write into the run's directory, by the run's name where it was given none.

    A run that goes on continues what W&B and TensorBoard have of it.

    Args:
        logger: class path and arguments, from the command line; changed in place.
        run_dir: the run's.
    """
    given: Any = logger.get("init_args", {})
    if "save_dir" in given:
        given.save_dir = str(run_dir)
    kind: Any = locate(logger.class_path)
    if issubclass(kind, WandbLogger):
        given.name = given.name or run_dir.name
        if given.version is None and given.id is None:
            given.version = _wandb_id(run_dir)
    elif issubclass(kind, TensorBoardLogger):
        given.default_hp_metric = False  # there are better ones than -1
        if given.version is None:
            given.name, given.version = "", "tensorboard"


def open_files(loggers: Sequence[Logger]) -> None:
    """Have loggers make their files, which Lightning asks of them in a moment and would fail at with a traceback.

    Raises:
        ConfigurationError: a file is in the way, or may not be replaced.
    """
    for logger in loggers:
        if isinstance(logger, CSVLogger | TensorBoardLogger):
            try:
                _ = logger.experiment
            except OSError as error:
                place = error.filename or logger.log_dir
                raise ConfigurationError(
                    f"the log {place} can't be written: {reason(error)}; move it elsewhere, or give another --run_dir"
                ) from error


def take_back(logger: Any, run_dir: Path) -> None:
    """Undo what W&B was told of this run alone, in a copy that is for other runs too; arguments as for ``place``."""
    given: Any = logger.get("init_args", {})
    if issubclass(locate(logger.class_path), WandbLogger):  # type: ignore[arg-type]
        given.name = None if given.name == run_dir.name else given.name
        given.version = None if given.version == _wandb_id(run_dir) else given.version


def _wandb_id(run_dir: Path) -> str | None:
    """The id by which W&B knows this run, if it was begun before."""
    begun = sorted(run_dir.glob("wandb/*run-*-*"))
    return begun[-1].name.rpartition("-")[2] if begun else None
