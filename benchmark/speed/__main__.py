"""``python -m benchmark.speed [CASE ...]``: run cases, print a table each, write ``results/speed/CASE.json``."""

import argparse
import importlib
from pathlib import Path

from benchmark.speed.measure import report

#: in the order in which they run
CASES = ("engine", "from_scratch", "widths", "features", "posterior", "vit", "overhead", "growth", "peers")


def main() -> None:
    """Run the named cases, by default all."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.speed", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--out", type=Path, default=Path("results/speed"), help="folder of the JSON files and pictures")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.cases) - set(CASES)):
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    for case in arguments.cases or CASES:
        title, rows = importlib.import_module(f"benchmark.speed.{case}").run(arguments.out)
        report(case, title, rows, arguments.out)


if __name__ == "__main__":
    main()
