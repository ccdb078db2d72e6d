"""Admit callbacks of the Trainer that look on, and refuse those that train in another way."""

from pydoc import locate
from typing import Any

import torch
from lightning.pytorch import callbacks as lightning
from lightning.pytorch.accelerators.cpu import _PSUTIL_AVAILABLE
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor

from benchmark.errors import ConfigurationError

_OTHER_WEIGHTS = (
    "would score other weights than the server's, or other ones than the rounds give; what becomes of weights between "
    "rounds is a server's rule (--server, docs/adding_a_server.md)"
)
_TRIAL_STEPS = (
    "runs trial steps before training, which would change a client; tune by runs of their own (benchmark tune)"
)

#: Callbacks, and those that derive from them, that a run cannot have, and why.
REFUSED: dict[type, str] = {
    lightning.WeightAveraging: _OTHER_WEIGHTS,
    lightning.StochasticWeightAveraging: _OTHER_WEIGHTS,
    lightning.ModelPruning: "would prune the weights of all clients as one; a method says what its clients train",
    lightning.BaseFinetuning: (
        "would freeze and unfreeze what all clients share; a method's shared, personal and local_phases say what trains"
    ),
    lightning.GradientAccumulationScheduler: (
        "would take one step for several mini-batches; a step is one mini-batch of every client: give a larger "
        "data.batch_size"
    ),
    lightning.LearningRateFinder: _TRIAL_STEPS,
    lightning.BatchSizeFinder: _TRIAL_STEPS,
    lightning.SpikeDetection: (
        "looks at the loss of a batch, and a batch here is some steps of many clients; data.on_divergence says what "
        "becomes of clients that diverge"
    ),
    lightning.ThroughputMonitor: (
        "counts samples of a batch, and a batch here is some steps of many clients; seconds of every round are logged "
        "as seconds/training"
    ),
    lightning.OnExceptionCheckpoint: (
        "saves inside a round, from where no run can go on, and the next run would take up by itself what it saved; "
        "last.ckpt is kept after every round (benchmark resume)"
    ),
    lightning.BasePredictionWriter: "writes what Trainer.predict gives, and a run predicts nothing",
}


def given_callbacks(callbacks: Any) -> list[Any]:
    """Return what a Trainer's argument ``callbacks`` holds: one, several, or None."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def check_callbacks(callbacks: Any) -> None:
    """Refuse callbacks that train or score something else than the rounds of a federation, and what is no callback.

    Args:
        callbacks: as given to a Trainer, or as a configuration names them.

    Raises:
        ConfigurationError: names the callback, and what to do in its place.
    """
    for callback in given_callbacks(callbacks):
        if isinstance(callback, type):
            raise ConfigurationError(f"trainer.callbacks: {callback.__name__} is a class, make one of it")
        path = getattr(callback, "class_path", None)
        kind: Any = locate(path) if isinstance(path, str) else type(callback)
        if not (isinstance(kind, type) and issubclass(kind, Callback)):
            raise ConfigurationError(
                f"trainer.callbacks: expected callbacks of Lightning, such as "
                f"lightning.pytorch.callbacks.EarlyStopping(...), got {callback!r:.80}"
            )
        for refused, why in REFUSED.items():
            if issubclass(kind, refused):
                raise ConfigurationError(f"trainer.callbacks: {kind.__name__} {why}")
        if isinstance(callback, DeviceStatsMonitor) and not _PSUTIL_AVAILABLE and _asks_the_cpu(callback):
            raise ConfigurationError(
                "trainer.callbacks: DeviceStatsMonitor reads the CPU by psutil, which is not installed (pip install "
                "psutil); or give it cpu_stats=False"
            )


def _asks_the_cpu(callback: DeviceStatsMonitor) -> bool:
    stats = callback._cpu_stats
    return bool(stats) or (stats is None and not torch.cuda.is_available())
