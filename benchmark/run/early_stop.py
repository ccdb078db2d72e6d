"""Runs that ``EarlyStopping`` ended, of which the Trainer keeps nothing in a checkpoint."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping


def was_stopped(trainer: Trainer, made_with: dict[str, Any], finished: int) -> bool:
    """Return whether ``EarlyStopping`` had ended a run of as many rounds as this one, which would go on otherwise.

    Args:
        trainer: with the callbacks as the checkpoint has them.
        made_with: the configuration that the checkpoint was made with.
        finished: rounds of the checkpoint; it may have been gone on from since a stop.
    """
    stops = (each for each in trainer.callbacks if isinstance(each, EarlyStopping))  # type: ignore[attr-defined]
    # Older versions of Lightning do not say why they stopped.
    reasons = ((each.state_dict().get("stopping_reason", each.stopped_epoch), each.stopped_epoch) for each in stops)
    ended = any(reason and epoch + 1 == finished for reason, epoch in reasons)
    return ended and bool(made_with) and made_with.get("trainer", {}).get("max_epochs") == trainer.max_epochs
