"""Freed memory stays with the process, and Python does not search all that is there for garbage again and again."""

import ctypes
import gc
import os
from typing import Any

from lightning.pytorch.callbacks import Callback

#: of glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let the C library use large freed blocks again.

    By default glibc hands blocks of 32 MiB and more, and a large free end of its heap, back to the system at once. A
    step frees and takes the same blocks of gradients and activations again and again, and the system must clear every
    page anew, which can take a third of the time of stacked clients on a CPU.

    What the user has set (``GLIBC_TUNABLES``, ``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``) stays.

    Returns:
        Whether it was changed; False with another C library.
    """
    chosen = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        f"MALLOC_{name}_THRESHOLD_" in os.environ for name in ("TRIM", "MMAP")
    )
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if chosen or mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 2**30) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


class NoSearchForGarbage(Callback):
    """Leave to itself, during training, what Python holds when it begins.

    That are half a million objects of torch and Lightning, none of which is garbage. Every now and then Python would
    look through them all, which takes a tenth of the host's time of small rounds.
    """

    def on_train_start(self, *_: Any) -> None:
        """Leave it."""
        gc.freeze()

    def on_train_end(self, *_: Any) -> None:
        """Look again."""
        gc.unfreeze()

    def on_exception(self, *_: Any) -> None:
        """Look again."""
        gc.unfreeze()
