"""The part of a method that a checkpoint holds: learned values, and the hash of the frozen weights."""

import hashlib
from typing import Any

import torch
from torch import nn

from benchmark.engine.roles import Roles
from benchmark.errors import ConfigurationError

#: Number of the form of what a checkpoint holds: names in the clients' store, the server's state; and of the draws
#: with which training goes on. 1 had no number.
FORMAT = 4

#: what the engine has put into the method
ENGINE = ("slots.", "store.")


def frozen_hash(method: nn.Module, roles: Roles) -> str:
    """Hash everything that is neither trained nor the engine's own: the backbone a run was made with."""
    digest = hashlib.blake2b(digest_size=16)
    trained = set(roles.trained)
    for name, tensor in sorted(method.state_dict().items()):
        if name not in trained and not name.startswith(ENGINE):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def learned(state: dict[str, Any], roles: Roles) -> dict[str, Any]:
    """Keep shared values and every client's state of a ``state_dict``."""
    keep = set(roles.trained)
    return {name: value for name, value in state.items() if name in keep or name.startswith("store.")}


def without_momenta(checkpoint: dict[str, Any]) -> None:
    """Empty the optimizers' states: they are the last cohort's; what outlives a phase is in the clients' store."""
    for optimizer in checkpoint.get("optimizer_states", ()):
        optimizer["state"] = {}


def check(checkpoint: dict[str, Any], method: nn.Module, mine: dict[str, Any], frozen: str) -> None:
    """Refuse a checkpoint of other parameters or of another frozen backbone.

    Args:
        checkpoint: its content.
        method: that is to go on from it.
        mine: what the method's own checkpoint would hold, in its shapes.
        frozen: hash of the method's frozen parts.

    Raises:
        ConfigurationError: it is not one of this method with this backbone and these clients.
    """
    held = checkpoint["state_dict"]
    if differing := sorted(set(held) ^ set(mine)):
        raise ConfigurationError(
            f"the checkpoint is not one of {type(method).__name__} with this configuration: it and the method differ "
            f"in {', '.join(differing[:3])}; give the configuration it was made with, or start without --ckpt_path"
        )
    for name, value in mine.items():
        there, here = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (held[name], value))
        if there != here:
            raise ConfigurationError(
                f"the checkpoint is of another configuration: {name} has shape and type {there} there and {here} here; "
                "give the configuration it was made with, or start without --ckpt_path"
            )
    if checkpoint.get("frozen_hash") != frozen:
        raise ConfigurationError(
            "the checkpoint was made with other frozen weights than those loaded now; give the same backbone, weights "
            "and seed, or start without --ckpt_path"
        )
