"""``lightning-cli``: Lightning's command line with the links, defaults and files of a federated run."""

import argparse
import atexit
import logging
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch

from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from benchmark.config.choices import LINKED, check_classes, choices_asked_for
from benchmark.config.given_files import with_files_read
from benchmark.config.overview import PARSERS, PROGRAM
from benchmark.config.parser import RETIRED, FederatedParser, with_strategy
from benchmark.config.taken_over import taken_over
from benchmark.delivery import Delivery
from benchmark.engine.device.allocator import keep_freed_memory
from benchmark.engine.device.repeatable import repeatable_kernels
from benchmark.engine.refusals.trainer_settings import (
    RANKS,
    check_accelerator,
    check_settings,
    check_strategy,
    check_work,
    several_devices,
)
from benchmark.errors import ConfigurationError, causes
from benchmark.files import write_text
from benchmark.method import FederatedMethod
from benchmark.paths import check_present_folder, user_path
from benchmark.ranges import Seed
from benchmark.ranks.process_numbers import check_first, check_numbers, check_started, is_first_process
from benchmark.ranks.pulse import OtherRankError
from benchmark.ranks.strategy import RanksStrategy, are_connected
from benchmark.records.record import Tuning
from benchmark.records.record_file import is_finished
from benchmark.run.alone import alone
from benchmark.run.callbacks import has_progress_bar, round_callbacks
from benchmark.run.checkpoint import (
    AtomicCheckpointIO,
    check_rounds,
    finished_rounds,
    read_checkpoint,
    round_checkpoint,
)
from benchmark.run.device_errors import of_device
from benchmark.run.ending import OUT_OF_TIME, StoppedError, closing_lines, end_process
from benchmark.run.loggers import configured, open_files, place, take_back
from benchmark.run.phases import phases_printed, quiet
from benchmark.run.recorder import Recorder
from benchmark.run.resume import run_dir_of_fit, what_is_kept, with_config_of_run
from benchmark.run.run_directory import claimed, last_checkpoint
from benchmark.run.scores import print_scores
from benchmark.run.terminal import outliving_readers
from benchmark.server import ServerRule
from benchmark.shipped import version
from benchmark.signals import interrupting_signal, termination_as_interrupt
from datamodules.federated import FederatedDataModule

TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": 10,
    "devices": 1,
    "enable_model_summary": False,
    "inference_mode": False,  # fine-tuning before an evaluation needs gradients
    "log_every_n_steps": 1,
    "num_sanity_val_steps": -1,  # round 0: everybody is evaluated before any training
    "reload_dataloaders_every_n_epochs": 1,
    "use_distributed_sampler": False,
}
#: What Lightning's command line makes of a parser.
PARSER_PARTS = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")
#: Parsers of FederatedCLI that were made in this process, by the command line's kind.
_MADE: dict[tuple[bool, str | None], dict[str, Any]] = {}


def _of_the_data(name: str) -> Callable[[FederatedDataModule], Any]:
    """Ask for a property of the data, which are read then: the model comes next, and its weights may be a download."""

    def asked(data: FederatedDataModule) -> Any:
        data.setup()
        return getattr(data, name)

    asked.__name__ = name  # as --help shows it
    return asked


class SaveRunConfig(SaveConfigCallback):
    """Writes the resolved configuration into the run's directory."""

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Write ``config.yaml`` when training starts."""
        if stage == "fit":
            resolved = self.config.clone()
            directory = Path(resolved.pop("run_dir"))  # the configuration is for other directories, too,
            resolved.pop("ckpt_path")  # and for a run from the start
            for logger in configured(resolved.trainer):
                take_back(logger, directory)
            write_text(directory / "config.yaml", self.parser.dump(resolved, skip_none=False))


class FederatedCLI(LightningCLI):
    """``fit``, ``validate`` and ``test`` of a method on a federation.

    Args:
        args: instead of those of the process, as a list or as a configuration.
        run: run the subcommand; without, ``args`` has none and the method and its data are only made.
    """

    model: FederatedMethod
    datamodule: FederatedDataModule

    def __init__(self, args: list[str] | dict[str, Any] | None = None, run: bool = True) -> None:
        given = self._given = sys.argv[1:] if args is None else args
        with ExitStack() as self._held:
            self._held.enter_context(self._saying_what_is_kept())
            self._held.enter_context(patch.object(sys, "argv", sys.argv[:1]))  # Lightning warns of two command lines
            super().__init__(
                FederatedMethod,
                FederatedDataModule,
                subclass_mode_model=True,
                save_config_callback=SaveRunConfig if run else None,
                save_config_kwargs={"save_to_log_dir": False},
                trainer_defaults=TRAINER_DEFAULTS,
                parser_class=FederatedParser,
                parser_kwargs=PARSERS | {"version": version()},
                auto_configure_optimizers=False,
                args=given if isinstance(given, dict) else with_files_read(with_strategy(given)),
                run=run,
            )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands of a federation, with the arguments that are not the user's to give."""
        data = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule", "weights_only"}
        return {"fit": data, "validate": data, "test": data}

    def setup_parser(self, add_subcommands: bool, *settings: dict[str, Any]) -> None:
        """Make the parser: a copy of the one of an earlier command line, which takes a twentieth of the time."""
        if type(self) is not FederatedCLI:  # its parser may be another one each time
            super().setup_parser(add_subcommands, *settings)
            return
        kind = (add_subcommands, self._first)
        if kind not in _MADE:
            super().setup_parser(add_subcommands, *settings)
            _MADE[kind] = {name: value for name, value in vars(self).items() if name in PARSER_PARTS}
        vars(self).update(deepcopy(_MADE[kind]))

    @property
    def _first(self) -> str | None:
        """The subcommand of a command line that begins with one."""
        first = self._given[0] if isinstance(self._given, list) and self._given else None
        return first if first in (*self.subcommands(),) else None

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> Any:
        """Add the options of the given subcommand alone, where it comes first: each one's take a tenth of a second."""
        if self._first not in (None, subcommand):
            return self.init_parser(**kwargs)
        return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)

    def add_default_arguments_to_parser(self, parser: Any) -> None:
        """Add ``--seed_everything``, with the seeds that there are."""
        parser.add_argument("--seed_everything", type=Seed, default=0, help="seed of all that is drawn in a run")

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add the options of a run, and take what the method must know of the data from the data."""
        parser.add_argument(
            "--server",
            type=ServerRule | None,
            default=argparse.SUPPRESS,  # so that configurations without one stay as they were
            help="what the server makes of the uploads, of methods that average; or a rule around any other",
        )
        parser.add_argument(
            "--delivery",
            type=Delivery | None,
            default=argparse.SUPPRESS,
            help="what lies between clients and server: faults, delays, attacks; by default everything arrives",
        )
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="directory of this run; by default a new one under runs/, named after method, data and time",
        )
        parser.add_argument(
            "--tuning",
            type=Tuning | None,
            default=argparse.SUPPRESS,
            help="how the run's values were chosen, for its record; `benchmark tune` gives it",
        )
        for name in RETIRED:
            parser.add_argument(f"--{name}", type=Literal[None], default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        parser.link_arguments("seed_everything", "data.seed")
        for name in LINKED:
            parser.link_arguments("data", f"model.init_args.{name}", _of_the_data(name), "instantiate")

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Read the command line; ``--model.help`` and its like list the classes that there are, and end the program."""
        listed = choices_asked_for(args) if isinstance(args, list) else None
        if listed is not None:
            print(listed)
            parser.exit()
        super().parse_arguments(parser, args)
        self._held.enter_context(alone())  # from here on things are drawn

    def _parse_ckpt_path(self) -> None:
        """A checkpoint never changes the configuration: it is checked against it instead."""

    def before_instantiate_classes(self) -> None:
        """Give the run its directory, and everything that writes files a place in it.

        Raises:
            ConfigurationError: settings that no run can have, or the directory can't be had (see :func:`claimed`).
        """
        config = self.config.get(str(self.subcommand), self.config)
        for name in ("server", "delivery", "tuning"):
            if config.get(name) is None:
                config.pop(name, None)
        check_classes(config)
        check_settings(config.trainer, fitting=self.subcommand in ("fit", None))
        check_numbers()
        check_started(several_devices(config.trainer))
        if self.subcommand is not None:
            check_first(several_devices(config.trainer))
            check_accelerator(config.trainer)
        if config.run_dir:
            config.run_dir = str(user_path(config.run_dir))  # once: some libraries do so, others do not
        if self.subcommand is not None:
            config.ckpt_path = _checkpoint_of(config, str(self.subcommand))
        if config.run_dir == "":
            raise ConfigurationError("--run_dir is empty; give a folder, or leave it out")
        if config.run_dir is None:
            method = config.model.class_path.rsplit(".", 1)[-1].lower()
            source = _source_word(config.data.source)
            stamp = time.strftime("%Y%m%d-%H%M%S") + f"-{time.time_ns() % 10**6:06d}"
            config.run_dir = str(Path("runs") / f"{method}-{source}-s{config.seed_everything}-{stamp}")
        self.run_dir = Path(config.run_dir)
        config.trainer.default_root_dir = str(self.run_dir)
        for logger in configured(config.trainer):
            place(logger, self.run_dir)
        parts = ["seed_everything", "model", "data"]
        # How a checkpoint is evaluated is not how it was trained: the Trainer's settings may differ then.
        parts += ["trainer"] if self.subcommand in ("fit", None) else []
        plain = config.clone().as_dict()
        self.plain_config = {name: plain[name] for name in parts} | {
            name: plain.get(name) for name in ("server", "delivery", "tuning")
        }
        if self.subcommand == "fit" and is_first_process():
            self._held.enter_context(claimed(self.run_dir, config.ckpt_path))
            print(f"run directory: {self.run_dir}")
            print(f"method: {config.model.class_path.rsplit('.', 1)[-1]}", flush=True)
            for line in taken_over(self._given, plain) if isinstance(self._given, list) else ():
                print(line, flush=True)

    def instantiate_classes(self) -> None:
        """Make method, data and Trainer.

        Raises:
            ConfigurationError: a constructor ends the program.
        """
        try:
            super().instantiate_classes()
        except SystemExit as error:
            raise ConfigurationError(
                f"a constructor of the run's classes calls sys.exit({error.code}); raise an exception there instead"
            ) from error

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """A Trainer with the recorder, the checkpoint of the last round and the progress display.

        Without a subcommand it keeps everything in memory.
        """
        trainer = self._get(self.config_init, "trainer")
        fitting = self.subcommand == "fit"
        self.recorder = Recorder(str(self.run_dir) if fitting else None, self.plain_config)
        callbacks = round_callbacks(self.recorder, self.model, self.rule, self.delivery, trainer)
        if fitting and trainer.enable_checkpointing is not False:
            callbacks.append(round_checkpoint(self.run_dir))
        if self.subcommand is None:
            kwargs["enable_checkpointing"] = False
        if several_devices(trainer) and trainer.strategy == "auto":
            kwargs["strategy"] = RANKS
        if not is_first_process() and not has_progress_bar(trainer):
            kwargs["enable_progress_bar"] = False
        self.trainer_defaults = {**self.trainer_defaults, "callbacks": callbacks}
        if trainer.logger in (None, True):
            kwargs["logger"] = CSVLogger(str(self.run_dir), name="", version="csv") if fitting else False
        with of_the_trainer():
            made = super().instantiate_trainer(plugins=[AtomicCheckpointIO()], **kwargs)
        check_strategy(made)
        if isinstance(made.strategy, RanksStrategy) and self.subcommand is not None and isinstance(self._given, list):
            # What this process has chosen, the others are told.
            made.strategy.command = [*PROGRAM, *self._given, f"--run_dir={self.run_dir}"]
        return made

    @property
    def rule(self) -> ServerRule | None:
        """The server's rule that ``--server`` gives."""
        return cast(ServerRule | None, self.config_init.get(str(self.subcommand), self.config_init).get("server"))

    @property
    def delivery(self) -> Delivery | None:
        """Return what ``--delivery`` puts between clients and server."""
        given = self.config_init.get(str(self.subcommand), self.config_init).get("delivery")
        return cast(Delivery | None, given)

    @property
    def _processes(self) -> int:
        strategy = self.trainer.strategy
        return strategy.count if isinstance(strategy, RanksStrategy) else 1

    def before_fit(self) -> None:
        """Compare a checkpoint with this run before any training, and its processes with its clients; open its logs."""
        check_work(self._processes, self.datamodule.participants, "the clients of a round are")
        path = self.config.fit.ckpt_path
        if path is not None:
            content = read_checkpoint(path)
            check_rounds(path, content)
            rule = self.model.make_server() if self.rule is None else self.rule
            self.recorder.refuse_other_run(self.trainer.max_epochs or 0, self.model, rule, content)
        if is_first_process():
            open_files(self.trainer.loggers)

    def _before_scoring(self) -> None:
        """Refuse to score a method that has learned nothing.

        Raises:
            ConfigurationError: there is no checkpoint, and the method has something to train.
        """
        trained = self.model.shared or self.model.personal
        if self.config[self.subcommand].ckpt_path is None and trained:
            raise ConfigurationError(
                f"lightning-cli {self.subcommand} scores what a run has learned: give --run_dir=RUN_DIR, or "
                "--ckpt_path=RUN_DIR/checkpoints/last.ckpt (scores before any training: fit --trainer.max_epochs=0)"
            )
        check_work(self._processes, self.datamodule.num_clients, "the clients of the federation are")

    before_test = _before_scoring

    def before_validate(self) -> None:
        """Refuse to score a method that has learned nothing, or on images that are not held out.

        Raises:
            ConfigurationError: see :meth:`FederatedDataModule.require_validation`, or there is no checkpoint.
        """
        self._before_scoring()
        self.datamodule.require_validation()

    def after_fit(self) -> None:
        """Say what the run has come to, where its record is, and what shows more of it.

        Raises:
            StoppedError: there is none, since the time was up.
        """
        if not self.trainer.is_global_zero:
            return
        if not is_finished(self.run_dir):
            raise StoppedError(f"trainer.max_time is up: {self._what_is_kept()}", OUT_OF_TIME)
        print("\n".join(closing_lines(self.run_dir, self.model.server.finished_rounds, self.trainer.max_epochs or 0)))

    @contextmanager
    def _saying_what_is_kept(self) -> Iterator[None]:
        """Say what is kept of a run that a signal ends."""
        try:
            yield
        except BaseException as ended:  # Lightning makes an exit of an interrupt, or fails while it shuts down
            number = interrupting_signal(ended)
            if isinstance(ended, OtherRankError):
                said = f"error: {ended}" if ended.code == 2 else f"{ended}: {self._what_is_kept()}"
                raise StoppedError(said if ended.told_here else "", ended.code) from None
            if number is None:
                raise
            said = f"stopped by {number.name}: {self._what_is_kept()}" if is_first_process() else ""
            raise StoppedError(said, 128 + number) from None

    def _what_is_kept(self) -> str:
        given = self._given if isinstance(self._given, list) else []
        if self._begun is None:
            return what_is_kept(run_dir_of_fit(given), given)
        return what_is_kept(self._begun, given, finished_rounds)

    @property
    def _begun(self) -> Path | None:
        """The directory of the run, where it has one: of all ranks the first one's."""
        if getattr(self, "subcommand", None) != "fit" or not hasattr(self, "run_dir"):
            return None
        checkpoint = getattr(getattr(self, "trainer", None), "checkpoint_callback", None)
        if not is_first_process() and checkpoint is not None:
            return Path(checkpoint.dirpath).parent
        return self.run_dir

    def _print_scores(self) -> None:
        if self.trainer.is_global_zero:
            support, scores = self.datamodule.min_support, self.model.evaluation.scores
            averaged = {key: of.averaged_classes(support) for key, of in scores.items() if "auroc" in of.compute()}
            print_scores(self.recorder.values, self.datamodule.client_names, averaged)

    after_validate = after_test = _print_scores


def _source_word(source: Any) -> str:
    """A word for the data set in the name of a run's directory: the name that a user gave it, else its class's."""
    name = (source.get("init_args") or {}).get("name")
    word = re.sub(r"[\W_]+", "-", name).strip("-") if isinstance(name, str) else ""
    return (word or str(source.class_path).rsplit(".", 1)[-1]).lower()


def _checkpoint_of(config: Any, subcommand: str) -> str | None:
    """The checkpoint that a command names: a file, or the last one of its run directory.

    Raises:
        ConfigurationError: the last one of no directory, or one of Lightning's other words for a checkpoint.
    """
    given: str | None = None if config.ckpt_path is None else str(user_path(config.ckpt_path))
    if given in ("best", "hpc") or str(given).startswith("registry"):
        raise ConfigurationError(f"--ckpt_path={given}: a run keeps its last round; give last, or a checkpoint's file")
    if given == "last" and config.run_dir is None:
        raise ConfigurationError("--ckpt_path=last is the last checkpoint of a run's directory: give --run_dir as well")
    if given == "last" or (given is None and config.run_dir is not None and subcommand != "fit"):
        return str(last_checkpoint(Path(config.run_dir)))
    return given


@contextmanager
def of_the_trainer() -> Iterator[None]:
    """Tell in one line what a Trainer that is made refuses."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, AttributeError, ImportError, MisconfigurationException) as error:
        raise ConfigurationError(f"trainer: {' '.join(str(error).split())}") from error


def prepare_process() -> None:
    """Leave out what the libraries say beside the point, and choose memory and kernels as runs have them."""
    for message in (
        ".*does not have many workers.*",
        ".*LeafSpec.*",
        ".*in eval mode at the start of training.*",
        ".*dirpath has changed.*",  # evaluated, or continued, elsewhere
        ".*callbacks used to create the checkpoint.*",  # scoring needs none
        ".*directory .* exists and is not empty.*",  # a run that goes on; the log gets its rounds before once more
    ):
        warnings.filterwarnings("ignore", message=message)
    # Lightning's advertisements, device lists and names of signals; warnings still come through.
    for name in ("utilities.rank_zero", "trainer.connectors.signal_connector"):
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.WARNING)
    keep_freed_memory()
    repeatable_kernels()


def main(args: list[str] | None = None) -> None:
    """Entry point: one line and exit status 2 for bad input, 128 + n for signal n, 124 where the time was up."""
    prepare_process()
    telling = phases_printed() if is_first_process() else quiet()
    with outliving_readers(), termination_as_interrupt(signal.SIGINT), telling:
        try:
            check_present_folder()
            FederatedCLI(with_config_of_run(sys.argv[1:] if args is None else args))
        except StoppedError as stopped:
            end_process(str(stopped), stopped.code)
        except Exception as error:
            told = reported(error) or of_device(error)
            if told is None and not are_connected():
                raise
            # Of several processes, the first one tells what others have met, too.
            told_elsewhere = are_connected() and not is_first_process()
            said = f"error: {told}" if told is not None else "".join(traceback.format_exception(error))
            end_process("" if told_elsewhere and told is not None else said, 1 if told is None else 2)
        finally:  # all is said: a Ctrl-C now would only show where torch, which imports more at its end, was
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def reported(error: BaseException | None) -> BaseException | None:
    """The error meant for the user; the argument parser wraps those that come from a constructor."""
    meant = (each for each in causes(error) if isinstance(each, ConfigurationError | MisconfigurationException))
    return next(meant, None)


if __name__ == "__main__":
    main()
