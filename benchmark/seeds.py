"""Keyed randomness: every draw depends on what it is for, never on what was drawn before.

A key is a tuple such as ``(seed, "order", round, client, phase, epoch)``. Two draws with the same key
are equal in every process, on every machine, whatever the number of clients at once, the number of
workers or the order of clients, and after a resume.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

#: What SplitMix64 adds to its state before each number.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def derived_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from the parts of a key.

    Integers and strings of the same spelling are different parts: ``derived_seed(1) != derived_seed("1")``.

    Raises:
        TypeError: a part is neither an integer nor a string (floats have no one spelling).
    """
    for part in parts:
        if not isinstance(part, int | str | np.integer):
            raise TypeError(f"a part of a key is an integer or a string, got {part!r}")
    spelled = "\x1f".join(f"s{part}" if isinstance(part, str) else f"i{int(part)}" for part in parts)
    digest = hashlib.blake2b(spelled.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def numpy_generator(*parts: int | str) -> np.random.Generator:
    """A NumPy generator for this key."""
    return np.random.default_rng(derived_seed(*parts))


def keyed_bits(key: int, *counters: np.ndarray) -> np.ndarray:
    """64 random bits for a key and each combination of counters, made for all of them at once.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), started anew from
    its own output for each further counter: along the last one the numbers are its stream.

    Args:
        key: of ``derived_seed``.
        counters: integers from 0, of shapes that broadcast.

    Returns:
        uint64, of the shape to which the counters broadcast.
    """
    state = np.array([key], np.uint64)
    for counter in counters:
        state = state + _GAMMA * (counter.astype(np.uint64) + np.uint64(1))
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


def keyed_uniform(key: int, *counters: np.ndarray) -> np.ndarray:
    """Return float64 in [0, 1) for a key and each combination of counters, as :func:`keyed_bits` takes them."""
    return (keyed_bits(key, *counters) >> np.uint64(11)) * 2.0**-53


def torch_generator(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator for this key. CPU and CUDA generators give different numbers for the same key."""
    return torch.Generator(device).manual_seed(derived_seed(*parts))


def global_states(device: torch.device) -> tuple[Any, ...]:
    """The states of all generators from which code draws that was given none: Python's, NumPy's, torch's of both kinds.

    Nothing waits for the device: a CUDA generator's state lies in host memory.
    """
    numpy_own = np.random.get_state(legacy=False)  # noqa: NPY002 (to see that nobody used it)
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    states.append(torch.from_numpy(numpy_own["state"]["key"]))
    place = (numpy_own["state"]["pos"], numpy_own["has_gauss"])
    return (random.getstate(), *place, *(state.numpy().tobytes() for state in states))


@contextmanager
def drawn_in_float32() -> Iterator[None]:
    """Inside, numbers drawn without a type of their own are float32: the same ones in each of the Trainer's precisions.

    With ``64-true`` torch would else draw float64, which takes other random bits.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def keyed_initialization(*parts: int | str) -> Iterator[None]:
    """Inside, modules draw their initial values from (seed of the run, parts); the global generator is left as it was.

    The seed of the run is the one last given to ``torch.manual_seed`` (``seed_everything`` does). So what a module
    starts
    from does not depend on which modules were made before it.
    """
    seed = derived_seed(torch.initial_seed(), *parts)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
