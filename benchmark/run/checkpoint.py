"""Checkpoints that are whole or absent, hold no code, are written at the end of a round and notice every change."""

import hashlib
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmark.engine.saved_state import FORMAT
from benchmark.errors import ConfigurationError
from benchmark.files import make_folder, open_regular, replacing
from benchmark.run.checkpoint_form import check_form, disagreement

#: A checkpoint ends with this and the sha256 of all bytes before, as the comment of its zip archive.
MARK = b"sha256:"
COMMENT = len(MARK) + 64

#: What every checkpoint of a run holds, and as what.
CONTENT: dict[str, type] = {
    "state_dict": dict,
    "epoch": int,
    "global_step": int,
    "pytorch-lightning_version": str,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "frozen_hash": str,
    "FederatedDataModule": dict,
}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary file, flushes it to the disk and renames it; reads tensors and plain values only."""

    def __init__(self) -> None:
        self._checked = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the checkpoint and its hash; a kill at any moment leaves the old one or the new one.

        Raises:
            ConfigurationError: it cannot be written, or it could not be read again.
        """
        if not self._checked:  # what a callback keeps has the same form in every round
            _check_readable(checkpoint.get("callbacks", {}) if isinstance(checkpoint, dict) else {})
            self._checked = True
        target = Path(path)
        make_folder(target.parent)
        with replacing(target) as stream:
            hashed: Any = _Hashed(stream)
            try:
                torch.save(checkpoint, hashed)
            except RuntimeError as error:  # torch's word for what the stream raised
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None
            comment = MARK + hashed.digest.hexdigest().encode()
            stream.seek(-2, 2)  # the length of the comment, zero so far
            stream.write(len(comment).to_bytes(2, "little") + comment)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = True,
    ) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            ConfigurationError: see :func:`read_checkpoint`.
        """
        return read_checkpoint(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint of this project, and nothing else: a callback may have its name from a checkpoint.

        Raises:
            ConfigurationError: something else has the name.
        """
        if not Path(path).exists():
            return
        try:
            with open_regular(path) as stream:
                stream.seek(-COMMENT, 2)
                whole = stream.read(len(MARK)) == MARK
        except OSError:  # no file, or a shorter one
            whole = False
        if not whole:
            raise ConfigurationError(f"{path} would be removed, and is no checkpoint of a run; move it away")
        Path(path).unlink()


def _check_readable(states: dict[str, Any]) -> None:
    """Refuse what a callback keeps besides tensors and plain values, which is all that is read of a file."""
    for name, state in states.items():
        torch.save(state, stream := io.BytesIO())
        stream.seek(0)
        try:
            torch.load(stream, weights_only=True)
        except Exception as error:
            said = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise ConfigurationError(
                f"what {name} keeps in its state_dict could not be read again{f' ({said[1]})' if said else ''}: "
                "checkpoints hold tensors, numbers, texts, and lists and dicts of them"
            ) from error


class _Hashed:
    """Passes on what is written, and hashes it."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.stream.write(data)

    def flush(self) -> None:
        self.stream.flush()


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU and check every byte of the file and every part of its content.

    The hash in the file shows every change to it, of single bits too. It is no signature: a person who changes a
    checkpoint on purpose can make a new hash.

    Raises:
        ConfigurationError: there is no such file, it was changed or cut off, or it is not a checkpoint of this project.
    """
    if not Path(path).is_file():
        raise ConfigurationError(f"no checkpoint at {path}; give the file, usually RUN_DIR/checkpoints/last.ckpt")
    try:
        _check_hash(Path(path))
        with warnings.catch_warnings():  # of kinds of tensors that are refused below
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{path} can't be read as a checkpoint ({type(error).__name__}); is it whole?"
        ) from error
    _check_content(path, content)
    try:
        check_form(content, Path(path).stat().st_size)
        _check_finite(content)
    except ValueError as error:
        raise ConfigurationError(f"{path} can't be continued: {error}") from error
    return content


def _check_hash(path: Path) -> None:
    """Refuse a file that is not as it was written."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        left = path.stat().st_size - COMMENT - 2
        stream.seek(max(0, left + 2))
        if stream.read(len(MARK)) != MARK:  # before all of a large file is read
            raise ConfigurationError(
                f"{path} can't be read as a checkpoint: it does not end with its content's hash, as what this version "
                "of lightning-cli writes does; is it whole?"
            )
        stream.seek(0)
        while left > 0 and (part := stream.read(min(left, 2**20))):
            digest.update(part)
            left -= len(part)
        end = stream.read()
    digest.update(b"\0\0")  # the length of the comment, when the hash was made
    if end != COMMENT.to_bytes(2, "little") + MARK + digest.hexdigest().encode():
        raise ConfigurationError(
            f"{path} was changed after it was written (its hash does not fit); take an unchanged copy, or start "
            "without --ckpt_path"
        )


def _check_content(path: str | Path, content: Any) -> None:
    """Refuse what is no checkpoint of a run, at the end of a round, with values that can be trained on."""
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} is no Lightning checkpoint: it holds no state_dict")
    wrong = [name for name, kind in CONTENT.items() if not isinstance(content.get(name), kind)]
    callbacks = content["callbacks"] if "callbacks" not in wrong else {}
    wrong += [f"callbacks.{name}" for name in ("server", "Recorder") if not isinstance(callbacks.get(name), dict)]
    if wrong:
        raise ConfigurationError(f"{path} is no checkpoint of a run: it holds no {', '.join(wrong[:4])}")
    if (given := content.get("format", 1)) != FORMAT:
        raise ConfigurationError(
            f"{path} is a checkpoint of format {given}, as another version of this project writes it; this one reads "
            f"format {FORMAT}: go on with the version that wrote it, or start without --ckpt_path"
        )
    if not isinstance(callbacks["server"].get("finished_rounds"), int):
        raise ConfigurationError(f"{path} is no checkpoint of a run: it holds no 'finished_rounds'")


def _check_finite(content: dict[str, Any]) -> None:
    for name, value in content["state_dict"].items():
        if not isinstance(value, torch.Tensor) or not value.isfinite().all():
            raise ValueError(f"{name} in it holds numbers that are not finite")


def check_rounds(path: str | Path, content: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint that was saved before all of it knew of its last round.

    Args:
        path: of the checkpoint.
        content: of it, as ``read_checkpoint`` returned it.

    Raises:
        ConfigurationError: it was, as by a callback that saves as soon as an evaluation has ended.
    """
    server = content["callbacks"]["server"]
    try:
        counts = {
            "server.finished_rounds": server["finished_rounds"],
            "server.traffic": len(server["traffic"]["rounds"]),
            "loops.fit_loop": content["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"],
        }
        if server["inside_round"]:
            return  # whoever loads it says so
        if len(set(counts.values())) > 1:
            said = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ConfigurationError(f"{path} can't be continued: it does not know how many rounds are done ({said})")
        wrong = disagreement(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} is no checkpoint of a run: it holds no {error}") from error
    if wrong is not None:
        raise ConfigurationError(
            f"{path} can't be continued: its {wrong} cannot be of {server['finished_rounds']} rounds; take an "
            "unchanged copy, or start without --ckpt_path"
        )


def finished_rounds(path: Path) -> int:
    """Return how many rounds a checkpoint holds; for one that this process or its run has just written."""
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return int(content["callbacks"]["server"]["finished_rounds"])


def code_so_far(path: Path) -> dict[str, str]:
    """By module the hash of the source that a run was made by up to a checkpoint; empty where it does not say."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return dict(content["callbacks"]["Recorder"]["code"])
    except Exception:  # the run itself says what is wrong with it
        return {}


class RoundCheckpoint(ModelCheckpoint):
    """Lightning's, by a name of its own: a user's beside it has another state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing from a checkpoint: the one file that it keeps has a fixed name."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a round also if no client takes a step in it, as in a round of class means."""
        self._last_global_step_saved = -1
        super().on_train_epoch_end(trainer, pl_module)


def round_checkpoint(run_dir: Path) -> ModelCheckpoint:
    """Lightning's callback, set to keep the end of the last round in ``checkpoints/last.ckpt``."""
    return RoundCheckpoint(
        dirpath=run_dir / "checkpoints",
        filename="last",
        every_n_epochs=1,
        save_top_k=1,
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )
