"""Checkpoints that are whole or absent, hold no code, and are written at the end of a round."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmark.errors import ConfigurationError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary file, flushes it to the disk and renames it; reads tensors and plain values only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint; a kill at any moment leaves the old one or the new one."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        with temporary.open("wb") as stream:
            torch.save(checkpoint, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = True,
    ) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            ConfigurationError: there is no such file, or it is not a checkpoint.
        """
        return read_checkpoint(path)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content, on the CPU.

    Raises:
        ConfigurationError: there is no such file, or it is not a checkpoint of this project.
    """
    if not Path(path).is_file():
        raise ConfigurationError(f"no checkpoint at {path}; give the file, usually RUN_DIR/checkpoints/last.ckpt")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigurationError(
            f"{path} can't be read as a checkpoint ({type(error).__name__}); is it whole?"
        ) from error
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ConfigurationError(f"{path} is no Lightning checkpoint: it holds no state_dict")
    return content


def round_checkpoint(run_dir: Path) -> ModelCheckpoint:
    """Lightning's callback, set to keep the end of the last round in ``checkpoints/last.ckpt``."""
    return ModelCheckpoint(
        dirpath=run_dir / "checkpoints",
        filename="last",
        every_n_epochs=1,
        save_top_k=1,
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )
