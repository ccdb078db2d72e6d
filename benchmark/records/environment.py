"""Describe where a run takes place: code, versions and machine."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from benchmark.processor import described
from benchmark.records.record import Environment, Git, RunRecord


def environment(git: Git | None = None) -> Environment:
    """Return where and when a run takes place: git, Python, versions, platform, hardware and date (UTC), by name.

    ``git`` holds ``revision`` and ``dirty`` (changes outside ``results/``), both None outside a checkout; ``hardware``
    holds ``cpu``, ``cores`` (those this process may use), ``threads`` (that torch computes with on them) and ``gpus``
    (names); before torch is imported, None and no names.

    Args:
        git: the checkout as it was when the run began; by default as it is now.
    """
    torch = sys.modules.get("torch")
    gpus = (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if torch is not None and torch.cuda.is_available()
        else []
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "git": checkout() if git is None else git,
        "python": platform.python_version(),
        "versions": _versions(),
        "platform": platform.platform(),
        "hardware": {
            "cpu": described("model name") or platform.machine(),
            "cores": cores,
            "threads": None if torch is None else torch.get_num_threads(),
            "gpus": gpus,
        },
        "date": datetime.now(UTC).date().isoformat(),
    }


def threads_of(record: RunRecord) -> str:
    """Return ``", 2 threads a run"``: with how many a run on a CPU has computed; nothing where that is not known."""
    threads = record.environment.get("hardware", {}).get("threads") if record.device == "cpu" else None
    return f", {threads} thread{'s' * (threads > 1)} a run" if threads else ""


def other_versions(record: RunRecord) -> list[str]:
    """Return where this machine's Python and packages differ from the run's: ``"torch 2.14.0, now 2.15.0"``."""
    then = {"python": record.environment.get("python"), **record.environment.get("versions", {})}
    now = {"python": platform.python_version(), **_versions()}
    then.setdefault("pillow", now.get("pillow"))  # which older records do not name
    return [
        f"{name} {then.get(name) or 'absent'}, now {now.get(name) or 'absent'}"
        for name in sorted(set(then) | set(now))
        if then.get(name) != now.get(name)
    ]


def checkout() -> Git:
    """Revision of the checkout this package runs from; both values None where it is not a checkout."""
    try:
        revision = _asked_git("rev-parse", "HEAD")
        # Records and tables are written while runs go on; they do not make the code another one.
        dirty = bool(_asked_git("status", "--porcelain", "--", ":(top)", ":(top,exclude)results"))
    except (OSError, subprocess.SubprocessError):
        return {"revision": None, "dirty": None}
    return {"revision": revision, "dirty": dirty}


def commit_days(revisions: Iterable[str]) -> dict[str, str]:
    """The day of each of these commits that the checkout has, as ``2026-11-23``; empty where it is not a checkout."""
    hashes = sorted({revision for revision in revisions if re.fullmatch(r"[0-9a-f]{40}", revision)})
    try:
        said = _asked_git("log", "--no-walk", "--ignore-missing", "--format=%H %cs", *hashes) if hashes else ""
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(line.split(" ", 1) for line in said.splitlines())


def _asked_git(*arguments: str) -> str:
    """Return what git says of the checkout that this package runs from.

    Raises:
        OSError, subprocess.SubprocessError: there is none, or no git.
    """
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here.parent), *arguments], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    git("ls-files", "--error-unmatch", here.name)  # an installed copy inside someone else's checkout is not one
    return git(*arguments)


def _versions() -> dict[str, str]:
    """Versions of the packages that can change a result."""
    versions: dict[str, str] = {}
    for package in (
        "federated-prompt-benchmark",
        "torch",
        "torchvision",
        "lightning",
        "timm",
        "open_clip_torch",
        "torchmetrics",
        "jsonargparse",
        "numpy",
        "pandas",
        "scikit-learn",
        "pillow",
    ):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
