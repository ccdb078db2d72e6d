"""The tests that need a GPU, as rows of a table: whether each kind of them passed, and how long it took."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmark.errors import ConfigurationError
from benchmark.speed.measure import Timing, device

TESTS = Path("tests/methods/test_gpu.py")
#: Names of failed tests that a row shows.
SHOWN = 3


def run(folder: Path) -> tuple[str, Iterable[Timing]]:
    """Run them in a process of their own.

    Raises:
        ConfigurationError: there is no GPU, or no checkout with the tests.
    """
    if device() != "cuda":
        raise ConfigurationError("the case gpu_tests needs a GPU, and torch sees none here")
    if not TESTS.is_file():
        raise ConfigurationError(f"{TESTS} is not here: run it from a checkout of the repository")
    return "Tests that need a GPU", _rows()


def _rows() -> Iterator[Timing]:
    with TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        # One process: the tests share one GPU.
        command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run([*command, str(TESTS)], check=False)
        if not report.is_file():
            raise ConfigurationError(f"pytest ended before it had run {TESTS}; see what it says above")
        yield from rows_of(report.read_text())


def rows_of(report: str) -> Iterator[Timing]:
    """Yield a row for each test function of a JUnit report, its cases together."""
    kinds: dict[str, list[ET.Element]] = {}
    for case in ET.fromstring(report).iter("testcase"):
        kinds.setdefault(re.sub(r"\[.*", "", case.attrib["name"]), []).append(case)
    for kind, cases in kinds.items():
        failed = [c.attrib["name"] for c in cases if c.find("failure") is not None or c.find("error") is not None]
        skipped = sum(case.find("skipped") is not None for case in cases)
        note = f"{len(cases) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped"
        note += f": {', '.join(failed[:SHOWN])}" if failed else ""
        seconds = sum(float(case.attrib["time"]) for case in cases)
        yield Timing(kind.removeprefix("test_").replace("_", " "), f"{len(cases)} cases", seconds, note=note)
