"""Runs that ``EarlyStopping`` ended, of which the Trainer keeps nothing in a checkpoint."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason


def was_stopped(trainer: Trainer, made_with: dict[str, Any], finished: int) -> bool:
    """Return whether ``EarlyStopping`` had ended a run of as many rounds as this one, which would go on otherwise.

    Args:
        trainer: with the callbacks as the checkpoint has them.
        made_with: the configuration that the checkpoint was made with.
        finished: rounds of the checkpoint; it may have been gone on from since a stop.
    """
    stops = (each for each in trainer.callbacks if isinstance(each, EarlyStopping))  # type: ignore[attr-defined]
    going = EarlyStoppingReason.NOT_STOPPED
    ended = any(each.stopping_reason != going and each.stopped_epoch + 1 == finished for each in stops)
    return ended and bool(made_with) and made_with.get("trainer", {}).get("max_epochs") == trainer.max_epochs
