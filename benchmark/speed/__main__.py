"""``python -m benchmark.speed [CASE ...]``: run cases, print a table each, write ``results/speed/CASE.json``.

What is measured on a GPU goes to ``results/speed/gpu``. Several cases run one after the other, each in a process of its
own, so that none inherits another's memory, and one table of all of them comes last. ``--minutes`` ends that in time,
on a borrowed GPU for example. ``--against REVISION`` measures them with the code of an older revision too, in turns,
and ends in one table of both.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmark.errors import ConfigurationError
from benchmark.speed import against
from benchmark.speed.measure import Timing, device, report, rows_table

#: in the order in which they run; first those that the project's targets name
CASES = (
    "targets",
    "engine",
    "vit",
    "features",
    "parts",
    "products",
    "widths",
    "convolution",
    "overhead",
    "posterior",
    "privacy",
    "from_scratch",
    "growth",
    "ranks",
    "product",
    "peers",
    "peers_prompts",
    "recorded",
    "gpu_tests",
)
#: not run unless they are named
NAMED_ONLY = ("recorded", "gpu_tests")

#: in front of a case's name
COMMAND = (sys.executable, "-m", "benchmark.speed")
GRACE_SECONDS = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named cases, by default all; 1 if a case failed, ran out of time or was left out for lack of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.speed", description=__doc__)
    named = f"of {', '.join(CASES)}; default all but {', '.join(NAMED_ONLY)}"
    parser.add_argument("cases", nargs="*", metavar="CASE", help=named)
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the JSON files and pictures (default: results/speed, on a GPU its folder gpu)",
    )
    parser.add_argument("--minutes", type=float, help="stop after so many minutes; what was measured by then is kept")
    parser.add_argument("--against", metavar="REVISION", help="measure that code of git too, and compare")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.cases) - set(CASES)):
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    if given.minutes is not None and given.minutes <= 0:
        parser.error(f"--minutes must be more than 0, got {given.minutes:g}")
    cases = given.cases or [case for case in CASES if case not in NAMED_ONLY]
    folder = given.out or Path("results/speed", *(["gpu"] if device() == "cuda" else []))
    if given.against is not None:
        if given.minutes is not None:
            parser.error("--minutes and --against do not go together; name fewer cases")
        try:
            failed = against.compare(
                cases, given.against, folder, lambda case, out, code: run_case(case, out, None, code)
            )
        except ConfigurationError as error:
            parser.error(str(error))
        print(failed, end="\n" * bool(failed))
        return 1 if failed else 0
    if len(cases) == 1 and given.minutes is None:
        try:
            return 0 if measure_here(cases[0], folder) else 1
        except ConfigurationError as error:
            parser.error(str(error))
    return run_all(cases, folder, given.minutes)


def measure_here(case: str, folder: Path) -> bool:
    """Run a case in this process, write its rows, and return whether it ended.

    The rows of a case that is stopped or fails go to ``CASE.stopped``, so that an older whole record stays.
    """
    title, rows = importlib.import_module(f"benchmark.speed.{case}").run(folder)
    found: list[Timing] = []
    try:
        for row in rows:  # some cases measure a row when it is asked for
            found.append(row)
    except BaseException as why:
        if found:
            report(f"{case}.stopped", f"{title} (stopped before its end)", found, folder)
        if not found or isinstance(why, Exception):
            raise
        return False  # KeyboardInterrupt, or SystemExit, which is what Lightning makes of it
    report(case, title, found, folder)
    return True


def run_all(cases: Sequence[str], folder: Path, minutes: float | None) -> int:
    """Each case in a process of its own, then one table of those that ended; 1 if one did not."""
    end = None if minutes is None else time.monotonic() + 60 * minutes
    console = Console(width=160)
    failed: dict[str, str] = {}
    for case in cases:
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            failed[case] = "not begun, the time was up"
            continue
        if why := run_case(case, folder, left):
            failed[case] = why
    named = []
    for case in (case for case in cases if case not in failed):
        rows = json.loads((folder / f"{case}.json").read_text())["rows"]
        named += [(case, Timing(**row)) for row in rows]
    console.print(rows_table("All cases", named))
    for case, why in failed.items():
        console.print(f"{case}: {why}")
    return 1 if failed else 0


def run_case(case: str, folder: Path, seconds: float | None, code: Path | None = None) -> str:
    """One case in a process of its own, with the code in a folder or this one; why it has no result, or ``""``."""
    env = None if code is None else {**os.environ, "PYTHONPATH": str(code)}
    with subprocess.Popen([*COMMAND, case, "--out", str(folder)], cwd=code, env=env) as process:
        try:
            status = process.wait(timeout=seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as why:
            process.send_signal(signal.SIGINT)  # it ends what it has started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_SECONDS)
            process.kill()
            if isinstance(why, KeyboardInterrupt):
                raise
            return "stopped, the time was up"
    return f"ended with status {status}" if status else ""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started ends, older code goes
    sys.exit(main())
