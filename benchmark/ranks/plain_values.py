"""Plain values as bytes and back, for what ranks tell each other: nothing that is read is ever run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmark.errors import ConfigurationError

#: Types that JSON has and gives back as they were.
SAME = (type(None), bool, int, float, str)


def encode(label: str, value: Any) -> bytes:
    """Return a value as JSON; tuples, mappings, paths and number types are told apart from lists and text.

    Args:
        label: what it is for, for the message.
        value: None, numbers, text, paths, and lists, tuples and mappings of such.

    Raises:
        ConfigurationError: it is something else.
    """
    return json.dumps(_tagged(label, value), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """Return what ``encode`` was given.

    Raises:
        ValueError: that is not what made it.
    """
    try:
        return _untagged(json.loads(data))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no plain value: {error}") from error


def _tagged(label: str, value: Any) -> Any:
    if type(value) in SAME:
        return value
    if isinstance(value, np.generic):
        return _tagged(label, value.item())
    if type(value) is list:
        return value if all(type(each) in SAME for each in value) else [_tagged(label, each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": _tagged(label, [*value])}
    if isinstance(value, dict):
        return {"mapping": [_tagged(label, [key, each]) for key, each in value.items()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise ConfigurationError(
        f"{label}: ranks tell each other plain values (None, numbers, text, paths, and lists, tuples and mappings of "
        f"such), got {type(value).__name__}"
    )


def _untagged(value: Any) -> Any:
    if type(value) in SAME:
        return value
    if isinstance(value, list):
        return [_untagged(each) for each in value]
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_untagged(content))
    if kind == "mapping":
        return {_untagged(key): _untagged(each) for key, each in content}
    if kind == "path":
        return Path(content)
    dtype = getattr(torch, content) if kind == "dtype" else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown kind {kind!r}")
    return dtype
