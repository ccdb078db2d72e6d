"""Check the Trainer's settings: ranks, whole rounds, evaluations to record."""

import os
import warnings
from datetime import timedelta
from typing import Any

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import EarlyStopping, Timer

from benchmark.engine.ranks.ranks import Ranks
from benchmark.engine.refusals.trainer_callbacks import check_callbacks
from benchmark.errors import ConfigurationError
from benchmark.internals import steps_by_hand

#: With loss scaling clients are coupled, and in half precision the server's values would be, too.
PRECISIONS = ("32-true", "32", "64-true", "64", "bf16-mixed", "bf16")

#: The strategy for several devices, by its name and by its class's.
RANKS = "ranks"
#: where the class is, and where configurations of older runs look for it
RANKS_CLASSES = ("benchmark.ranks.strategy.RanksStrategy", "benchmark.run.strategy.RanksStrategy")
#: Most processes for each CPU core: they take turns, and each has its own copy of the images.
PER_CORE = 4


def check_settings(settings: Any, fitting: bool) -> None:
    """Refuse settings of a command before anything is made of them: data, processes, groups of processes.

    Args:
        settings: the Trainer's arguments, by name.
        fitting: for a run that is recorded; else for the evaluation of a checkpoint.

    Raises:
        ConfigurationError: a setting that no run can have, what to give in its place.
    """
    accelerators = {"auto", "gpu", *AcceleratorRegistry.available_accelerators()}
    if isinstance(settings.accelerator, str) and settings.accelerator.lower() not in accelerators:
        raise ConfigurationError(
            f"trainer.accelerator is one of {', '.join(sorted(accelerators))}; got {settings.accelerator}"
        )
    _check_processes(settings.devices)
    strategy = getattr(settings.strategy, "class_path", settings.strategy)
    if strategy not in ("auto", RANKS, *RANKS_CLASSES) and not hasattr(strategy, "ranks"):
        raise ConfigurationError(_other_strategy(strategy))
    check_precision(settings.precision)
    check_callbacks(settings.callbacks)
    if settings.barebones:
        raise ConfigurationError("trainer.barebones logs nothing, and so records nothing; leave it out")
    if settings.plugins:
        raise ConfigurationError("trainer.plugins can't be given: checkpoints are written in a way of their own")
    if settings.gradient_clip_val:
        raise ConfigurationError(
            "trainer.gradient_clip_val would clip the gradients of all clients as one; each client's own are clipped "
            "by clip of the method's training (--model.init_args.training.clip=1.0)"
        )
    if settings.accumulate_grad_batches != 1:
        raise ConfigurationError(
            "trainer.accumulate_grad_batches must be 1: a step is one mini-batch of every client; give a larger "
            "data.batch_size"
        )
    check_whole_rounds(settings)
    if fitting:
        _check_recorded(settings)


def check_accelerator(settings: Any) -> None:
    """Refuse an accelerator that this machine has not, before the data are read.

    Raises:
        ConfigurationError: names it.
    """
    named = str(settings.accelerator).lower()
    kinds = {"gpu": ("cuda", "mps"), "auto": ("cpu",)}.get(named, (named,))
    if not any(AcceleratorRegistry[kind]["accelerator"].is_available() for kind in kinds):
        raise ConfigurationError(
            f"trainer.accelerator={named}: PyTorch finds none on this machine; give cpu, or auto for what there is"
        )


def _check_processes(devices: Any) -> None:
    """Refuse more processes than a machine could serve, before Lightning makes a list of their devices.

    Raises:
        ConfigurationError: they are.
    """
    cores = os.cpu_count() or 1
    if str(devices).isdecimal() and int(devices) > PER_CORE * cores:
        raise ConfigurationError(
            f"trainer.devices={devices}: each device has a process of its own, and this machine's {cores} CPU cores "
            f"serve at most {PER_CORE * cores} ({PER_CORE} each); give trainer.devices={cores}, or fewer"
        )


def check_work(processes: int, clients: int, which: str) -> None:
    """Refuse processes of which some would have nothing to do.

    Args:
        processes: of the run.
        clients: that are dealt to them.
        which: of the federation they are, for the message.

    Raises:
        ConfigurationError: there are fewer clients.
    """
    if processes > max(clients, 1):
        raise ConfigurationError(
            f"trainer.devices times trainer.num_nodes is {processes}, and {which} {clients}: whole clients are dealt "
            f"to devices, so give at most {clients} in all"
        )


def check_precision(precision: str | int | None) -> None:
    """Refuse a precision that couples clients.

    Raises:
        ConfigurationError: it is not one of ``PRECISIONS``.
    """
    if precision is not None and str(precision) not in PRECISIONS:
        raise ConfigurationError(
            f"trainer.precision {str(precision)!r} is not supported: loss scaling couples clients, and "
            "shared values are kept in full precision; use 32-true, 64-true or bf16-mixed"
        )


def several_devices(settings: Any) -> bool:
    """Say whether the Trainer's arguments, by name, may mean more than one device: a number, a list, all there are."""
    devices = settings.devices
    one = len(devices) == 1 if isinstance(devices, list) else str(devices) in ("1", "0")
    return not one or settings.num_nodes != 1


def check_strategy(trainer: Any) -> None:
    """Refuse a Trainer that spreads a run over devices in another way than ranks.

    Raises:
        ConfigurationError: it does.
    """
    if trainer.world_size > 1 and not hasattr(trainer.strategy, "ranks"):
        raise ConfigurationError(_other_strategy(type(trainer.strategy).__name__))


def _other_strategy(given: Any) -> str:
    return (
        f"trainer.strategy={given} can't be had: data-parallel training would average different clients; leave it out, "
        f"or give {RANKS}: the clients of a round are dealt to devices"
    )


def ask_once_a_round(callbacks: list[Any]) -> None:
    """Have the Trainer's timers look at the end of a round alone: they ask all ranks, whose steps differ in number."""
    for place, callback in enumerate(callbacks):
        if isinstance(callback, Timer) and (left := callback.time_remaining()) is not None:
            callbacks[place] = Timer(timedelta(seconds=left), interval="epoch")


def count_alike(trainer: Any, ranks: Ranks) -> None:
    """Have all ranks count as many steps as the one with most: the saving of checkpoints, together, goes by it."""
    progress = steps_by_hand(trainer)
    progress.completed = max(ranks.everybody("the steps so far", progress.completed))


def check_monitored(trainer: Any) -> None:
    """Refuse a callback that monitors what no evaluation gives.

    What training, rule and delivery report comes with the first round.

    Raises:
        ConfigurationError: it does.
    """
    known = trainer.callback_metrics
    for callback in trainer.callbacks:
        name = getattr(callback, "monitor", None)
        later = trainer.sanity_checking and str(name).startswith(("train/", "server/"))
        if name is not None and name not in known and getattr(callback, "strict", True) and not later:
            raise ConfigurationError(
                f"{type(callback).__name__}: monitor={name!r} is no score of this run; expected one of "
                f"{', '.join(sorted(known))}"
            )


def tell_who_looks_at_test_images(trainer: Any) -> None:
    """Say that a run whose end test images choose has an optimistic last round."""
    for callback in trainer.callbacks:
        if not isinstance(callback, EarlyStopping):
            continue
        split, slash, _ = callback.monitor.partition("/")
        if slash and split not in ("val", "train"):
            warnings.warn(
                f"EarlyStopping: monitor={callback.monitor!r} lets test images choose the last round, so that its "
                "scores are optimistic; hold training images out (data.val_fraction) and monitor val/server/accuracy",
                stacklevel=1,
            )


def check_whole_rounds(settings: Any) -> None:
    """Refuse what would evaluate, save or draw inside a round.

    Args:
        settings: a Trainer, or its arguments by name.

    Raises:
        ConfigurationError: such a setting.
    """
    if settings.reload_dataloaders_every_n_epochs != 1:
        raise ConfigurationError(
            "trainer.reload_dataloaders_every_n_epochs must be 1: every round has its own clients and batches"
        )
    # An integer 1 is one batch, a fraction 1.0 is all of them; none are evaluated where only speed is measured.
    limits = (settings.limit_train_batches, settings.limit_val_batches, settings.limit_test_batches)
    whole = [limit is None or (type(limit), limit) == (float, 1.0) for limit in limits]
    whole[1] |= settings.limit_val_batches == 0
    if not all(whole) or settings.fast_dev_run or settings.overfit_batches:
        raise ConfigurationError(
            "trainer.limit_train_batches, limit_val_batches, limit_test_batches, overfit_batches and fast_dev_run cut "
            "a round short; leave them out and set trainer.max_epochs=1 for a short run"
        )
    if settings.max_epochs is None or settings.max_epochs < 0 or settings.max_steps != -1:
        raise ConfigurationError("give the number of rounds as trainer.max_epochs, and no trainer.max_steps")
    if settings.val_check_interval not in (None, 1.0) or type(settings.val_check_interval) is int:
        raise ConfigurationError(
            "trainer.val_check_interval must be 1.0; trainer.check_val_every_n_epoch evaluates every n rounds"
        )


def _check_recorded(settings: Any) -> None:
    """Refuse to train what could not be recorded: a run ends with an evaluation of all clients."""
    if settings.limit_val_batches == 0:
        raise ConfigurationError(
            "trainer.limit_val_batches=0 leaves nothing to record; leave it out, and evaluate less often with "
            "trainer.check_val_every_n_epoch"
        )
    if settings.num_sanity_val_steps not in (-1, 0):
        raise ConfigurationError(
            f"trainer.num_sanity_val_steps must be -1 (all clients are evaluated before training, as round 0) or 0 "
            f"(there is no round 0), got {settings.num_sanity_val_steps}"
        )
    every, rounds = settings.check_val_every_n_epoch, settings.max_epochs
    if every is None or every < 1:
        raise ConfigurationError(f"trainer.check_val_every_n_epoch must be at least 1, got {every}")
    if rounds % every:
        raise ConfigurationError(
            f"trainer.check_val_every_n_epoch={every} would not evaluate the last of {rounds} rounds; make "
            "trainer.max_epochs a multiple of it, or set it to 1"
        )
