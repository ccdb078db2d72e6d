"""What cannot be done for many clients at once, told to a method's author in one line, with the author's own place."""

import sysconfig
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from benchmark.contract import Client, MiniBatch
from benchmark.errors import ConfigurationError
from benchmark.federation import Values

#: Files in which no author's function is: those of Python, of installed packages and of the engine.
NOT_THE_METHODS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)

UNKEYED = (
    "draws random numbers from a global generator; draw them in draw_noise, from the generator given there, and take "
    "them from batch.noise"
)
NOT_OWNED = (
    "running statistics, spectral normalisation and the like would pass from client to client; make such a value a "
    "personal parameter, or use a layer without it"
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
        "with tensors",
    ),
    (
        "dynamic shape",
        "makes a tensor whose shape depends on values (a boolean index, nonzero, unique); the step runs for many "
        "clients at once: multiply by a mask, or use torch.where",
    ),
    ("is not possible because there exists a Tensor", f"writes a client's value into a tensor of all: {NOT_OWNED}"),
    ("the fallback path doesn't work on out=", f"writes a client's value into a tensor of all: {NOT_OWNED}"),
    ("must only return Tensors", "must return tensors alone"),
    (
        "self.log",
        "calls self.log; return named tensors beside the loss, (loss, {'name': value}): scalars are recorded for each "
        "client and logged",
    ),
)


def explained(method: nn.Module, name: str, error: Exception) -> ConfigurationError | None:
    """Say what is wrong in a client function that raised ``error``; None where it is no mistake known here.

    Args:
        method: whose function.
        name: of the function.
        error: what came out of it.
    """
    if isinstance(error, AttributeError) and isinstance(error.obj, Client | MiniBatch):
        noun = "client" if isinstance(error.obj, Client) else "batch"
        words = f"asks for {noun}.{error.name}; a {noun} has {', '.join(field.name for field in fields(error.obj))}"
        words += ": what tells clients apart belongs into personal parameters" if noun == "client" else ""
    else:
        said = str(error)
        found = next((words for phrase, words in MISTAKES if phrase in said), None)
        if found is None:
            return None
        words = found
    return ConfigurationError(f"{place(method, name, error)} {words}")


def place(method: nn.Module, name: str, error: Exception | None = None) -> str:
    """Name a function of the method, with the line that an error came from, else its first."""
    title = type(method).__name__
    if error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if not frame.filename.startswith(NOT_THE_METHODS):
                return f"{title}.{name}, line {frame.lineno} of {frame.filename},"
    code = getattr(getattr(type(method), name, None), "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{title}.{name}{where}"


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
