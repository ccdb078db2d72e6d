"""Golden numbers: what every method learns on the tiny federation, as hashes, to compare two states of the code.

    python tests/golden.py write golden.json            # before a change
    python tests/golden.py compare golden.json          # after it, on the same machine

All methods x 1, 3, 8 clients at once x loader processes 0, 2, three rounds each: every shared value, client row, server
tensor and metric. Hashes are of bytes, so only one machine's compare. Names are written for the reader and are not
compared, since a change of the code may rename what it keeps.
"""

import hashlib
import json
import logging
import sys
import warnings
from collections import Counter
from itertools import product
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from federation import CONF, build, fit, learned  # noqa: E402

WIDTHS = (1, 3, 8)
WORKERS = (0, 2)
ROUNDS = 3


def digest(value: torch.Tensor) -> str:
    """Kind, shape and bytes of a tensor."""
    plain = value.detach().cpu().contiguous()
    head = f"{plain.dtype} {tuple(plain.shape)} ".encode()
    return hashlib.blake2b(head + plain.flatten().view(torch.uint8).numpy().tobytes(), digest_size=12).hexdigest()


def measure(conf: str, width: int, workers: int) -> dict[str, str]:
    """Hashes by name of what one method learns at one width with so many loader processes."""
    torch.manual_seed(0)
    method, data = build(conf, f"--data.clients_at_once={width}", f"--data.num_workers={workers}")
    fit(method, data, ROUNDS)
    return {name: digest(value) for name, value in sorted(learned(method).items())}


def everything(only: list[str]) -> dict[str, dict[str, str]]:
    """Hashes of all combinations, or of some methods'."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    methods = only or sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "base")
    found = {}
    for conf, width, workers in product(methods, WIDTHS, WORKERS):
        found[f"{conf} width {width} workers {workers}"] = measure(conf, width, workers)
        print(f"{conf} width {width} workers {workers}", flush=True)
    return found


def differing(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Names of ``before`` whose content is no longer there, each content counted as often as it occurs."""
    left = Counter(now.values())
    missing = []
    for name, value in before.items():
        if left[value]:
            left[value] -= 1
        else:
            missing.append(name)
    return missing


def main() -> int:
    """Entry point."""
    command, path, *only = sys.argv[1:]
    if command == "write":
        Path(path).write_text(json.dumps(everything(only), indent=1))
        return 0
    before = json.loads(Path(path).read_text())
    now = everything(only or sorted({key.partition(" ")[0] for key in before}))  # methods that were there before
    wrong = {key: lost for key, found in now.items() if (lost := differing(before[key], found))}
    for key, lost in wrong.items():
        print(f"DIFFERS {key}: {', '.join(lost[:6])} ({len(lost)} of {len(before[key])})")
    print(f"{len(now) - len(wrong)} of {len(now)} equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
