"""The processor, as the system describes it."""

import platform
from pathlib import Path


def described(field: str) -> str:
    """Return a field of Linux's list of processors, such as ``vendor_id`` or ``model name``.

    Where there is no such list or field, return the system's own words, which may be none.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(field))
    return next(found, "") or platform.processor()
