"""The Trainer's precision is that of steps; a server's rule works in float32 wherever it is asked."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from benchmark.seeds import drawn_in_float32


def float32_outside_of_steps(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast and with float32 as the default type.

    Evaluations ask a rule within a step, training asks it before: what it sends must be the same.
    """
    kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if torch.is_autocast_enabled(kind)]
    if not kinds and torch.get_default_dtype() is torch.float32:
        return nullcontext()
    stack = ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    stack.enter_context(drawn_in_float32())
    return stack
