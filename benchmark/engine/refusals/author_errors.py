"""Tell a method's author in one line, with the author's own place, what cannot be done for many clients at once."""

import inspect
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmark.contract import Client, MiniBatch
from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.seeds import global_states

#: Files in which no author's function is: those of Python, of installed packages and of the engine.
NOT_THE_METHODS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    f"{Path(torch.__file__).parents[1]}{os.sep}",  # an environment may take its packages from another one
    f"{Path(__file__).parents[2]}{os.sep}",
)

UNKEYED = (
    "draws random numbers from a global generator; draw them in draw_noise, from the generator given there, and take "
    "them from batch.noise"
)
NOT_OWNED = (
    "running statistics, spectral normalisation and the like would pass from client to client; make such a value a "
    "personal parameter, or use a layer without it"
)
NO_GRADIENT = (
    "asks autograd for a gradient (torch.autograd.grad, backward), which the engine takes outside of the step; write "
    "torch.func.grad of a function of the parameters"
)
#: A part of what vmap says of a mistake, and what to tell its author.
MISTAKES = (
    ("called random operation", UNKEYED),
    (
        "data-dependent control flow",
        "decides by a tensor's value (if, while, and, or); the step runs for many clients at once: use torch.where",
    ),
    (
        ".item()",
        "makes a Python number of a tensor (item, float, int, tolist); the step runs for many clients at once: compute "
        "with tensors; --data.one_by_one=true shows their numbers",
    ),
    (
        "dynamic shape",
        "makes a tensor whose shape depends on values (a boolean index, nonzero, unique); the step runs for many "
        "clients at once: multiply by a mask, or use torch.where",
    ),
    ("is not possible because there exists a Tensor", f"writes a client's value into a tensor of all: {NOT_OWNED}"),
    ("the fallback path doesn't work on out=", f"writes a client's value into a tensor of all: {NOT_OWNED}"),
    ("must only return Tensors", "must return tensors alone"),
    ("does not require grad and does not have a grad_fn", NO_GRADIENT),
    ("called inside a functorch transform", NO_GRADIENT),
    (
        "self.log",
        "calls self.log; return named tensors beside the loss, (loss, {'name': value}): scalars are recorded for each "
        "client and logged",
    ),
)


#: A dict of ``Client`` or ``MiniBatch``, and what to do for a name that it has not.
FILLED_BY = {
    "parameters": "name it in shared or personal",
    "received": "name it in shared, or have the server's rule broadcast it",
    "previous": "name it in remembers",
    "prepared": "have prepare return it",
    "own_images": "name own_images in inputs",
    "constants": "have client_constants return it",
    "noise": "have draw_noise return it",
    "features": "have frozen_features return it, and name features in inputs",
}


def explained(method: nn.Module, name: str, error: Exception) -> ConfigurationError | None:
    """Say what is wrong in a client function that raised ``error``; None where it is no mistake known here.

    Args:
        method: whose function.
        name: of the function.
        error: what came out of it.
    """
    if reading := _readers_of_missing_images(method, error):
        return ConfigurationError(
            f"{place(method, name, at=authors_line(reading))} reads batch.x, and inputs is {cast(Any, method).inputs}: "
            "read batch.features, or add 'images' to inputs"
        )
    if isinstance(error, AttributeError) and isinstance(error.obj, Client | MiniBatch):
        noun = "client" if isinstance(error.obj, Client) else "batch"
        words = f"asks for {noun}.{error.name}; a {noun} has {', '.join(field.name for field in fields(error.obj))}"
        words += (
            ": what tells clients apart belongs into personal parameters or client_constants"
            if noun == "client"
            else ""
        )
    elif missing := _missing_name(error):
        words = missing
    elif isinstance(error, ConfigurationError):
        return error
    else:
        said = str(error)
        found = next((words for phrase, words in MISTAKES if phrase in said), None)
        if found is None:
            return None
        kind = re.search(r"got type <class '([\w.]+)'>", said)
        words = found if kind is None else f"{found}; it returns {kind[1]}"
    return ConfigurationError(f"{place(method, name, error)} {words}")


def _missing_name(error: Exception) -> str | None:
    """Say which name a dict of a client or a batch has not, if that is the error."""
    if not isinstance(error, KeyError) or error.__traceback__ is None:
        return None
    (frame, line), last = [*traceback.walk_tb(error.__traceback__)][-1], traceback.extract_tb(error.__traceback__)[-1]
    asked = linecache.getline(last.filename, line)[last.colno : last.end_colno]
    found = re.match(r"(\w+)\.(\w+)\[", asked)
    holder = frame.f_locals.get(found[1]) if found else None
    if found is None or not isinstance(holder, Client | MiniBatch) or found[2] not in FILLED_BY:
        return None
    there = ", ".join(getattr(holder, found[2])) or "nothing"
    return f"asks for {asked}, and there is {there}; {FILLED_BY[found[2]]}"


def _readers_of_missing_images(method: nn.Module, error: Exception) -> list[tuple[str, int]]:
    """List the lines, file and number each, that led to the error and read images which ``inputs`` does not name."""
    if "images" in cast(Any, method).inputs:
        return []
    frames = traceback.extract_tb(error.__traceback__)
    return [(frame.filename, frame.lineno or 0) for frame in frames if re.search(r"\bbatch\.x\b", frame.line or "")]


def place(method: nn.Module, name: str, error: Exception | None = None, at: tuple[str, int] | None = None) -> str:
    """Name a function of the method, with the author's line.

    Args:
        method: whose function.
        name: of the function.
        error: what came out of it.
        at: file and line, where they are known without an error; else those where the function, or the class, begins.
    """
    title = type(method).__name__
    if error is not None:
        at = authors_line([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)])
    if at is not None:
        return f"{title}.{name}, line {at[1]} of {at[0]},"
    code = getattr(inspect.unwrap(getattr(type(method), name, lambda: None)), "__code__", None)
    if code is not None and not code.co_filename.startswith(NOT_THE_METHODS):
        return f"{title}.{name} ({code.co_filename}:{code.co_firstlineno})"
    try:
        return f"{title}.{name} ({inspect.getsourcefile(type(method))}:{inspect.getsourcelines(type(method))[1]})"
    except (OSError, TypeError):  # no file: a class of a session
        return f"{title}.{name}"


def check_constructed(made: nn.Module, arguments: str = "") -> None:
    """Refuse a method or a server rule whose constructor has not called its base's.

    Args:
        made: it.
        arguments: those of the base's constructor.

    Raises:
        ConfigurationError: it is so.
    """
    if "_modules" not in vars(made):
        raise ConfigurationError(f"{place(made, '__init__')} must call super().__init__({arguments}) first")


def authors_line(frames: Sequence[tuple[str, int]]) -> tuple[str, int] | None:
    """The innermost of some lines, file and number each, that an author has written."""
    return next((frame for frame in reversed(frames) if not frame[0].startswith(NOT_THE_METHODS)), None)


def drawing_line(call: Callable[[], Any], device: torch.device) -> tuple[str, int] | None:
    """The author's line, file and number, that draws from a global generator; found by a call line after line.

    Args:
        call: what draws.
        device: whose generators there are.
    """
    states, last = global_states(device), None
    found: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last
        if frame.f_code.co_filename.startswith(NOT_THE_METHODS):
            return None
        if last is not None and not found and global_states(device) != states:
            found.append(last)
        last = (frame.f_code.co_filename, frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return found[0] if found else None


def tensors(method: nn.Module, name: str, made: Any) -> Values:
    """Return what a function of the method returned, if it is a dict of tensors.

    Raises:
        ConfigurationError: it is something else.
    """
    found: Any = type(made).__name__
    if isinstance(made, dict):
        found = {key: type(value).__name__ for key, value in made.items() if not isinstance(value, Tensor)}
        if not found:
            return made
    raise ConfigurationError(f"{type(method).__name__}.{name} must return a dict of tensors; it returns {found}")


def losses_of(method: nn.Module, made: Any, count: int) -> tuple[Tensor, Values]:
    """Return the losses of so many clients, [K], and the named tensors that came with them.

    Raises:
        ConfigurationError: ``client_loss`` returned something else, or losses of nothing that is trained.
    """
    losses, named = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
    if not isinstance(losses, Tensor) or losses.shape != (count,) or not isinstance(named, dict):
        given = tuple(losses.shape[1:]) if isinstance(losses, Tensor) else type(losses).__name__
        raise ConfigurationError(
            f"{place(method, 'client_loss')} must return a scalar, or a scalar and a dict of named tensors; "
            f"it returns {f'shape {given}' if isinstance(given, tuple) else given}"
        )
    if "loss" in named:
        raise ConfigurationError(
            f"{place(method, 'client_loss')} reports a tensor named 'loss', by which the loss itself is recorded; give "
            "it another name"
        )
    if not losses.requires_grad:
        raise ConfigurationError(
            f"{place(method, 'client_loss')} returns a loss that depends on nothing that is trained: name what is to "
            "be trained in shared or personal, and detach no loss"
        )
    return losses, named
