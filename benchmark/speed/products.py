"""A round of a frozen ViT whose products oneDNN computes, beside the same one with torch's usual library.

Rows are measured in turns, each in a process of its own, as in ``benchmark.speed.parts``. Both are measured on any
processor; ``benchmark.backbones.products`` says where a run takes oneDNN.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmark.backbones import products
from benchmark.speed.measure import Timing, last_line_of
from benchmark.speed.parts import CLIENTS, IMAGES, TURNS, measured

#: rows of ``benchmark.speed.parts``
ROWS = (
    "FedVPT, all blocks",
    "FedLoRA, all blocks",
    "FedVPT, from block 9 on, tokens kept",
    "FedLoRA, from block 9 on, tokens kept",
)
USUAL, ONEDNN = BY = ("torch's usual products", "oneDNN's")


def seconds(title: str, by: str) -> float:
    """Return the seconds of the best round of a row in this process, which computes its products this way from now."""
    products.faster_by_onednn = lambda: by == ONEDNN  # type: ignore[assignment]
    return measured(title)["seconds"]


def rows() -> Iterator[Timing]:
    """Yield each row by both, against torch's usual products."""
    found: dict[tuple[str, str], list[float]] = {(title, by): [] for title in ROWS for by in BY}
    for _ in range(TURNS):
        for place, turns in found.items():
            turns.append(json.loads(last_line_of([sys.executable, "-m", "benchmark.speed.products", *place])))
    work = f"a round of {CLIENTS} clients x {IMAGES} images at 224 px, batches of 16"
    for (title, by), turns in found.items():
        yield Timing(f"{title}: {by}", work, min(turns), min(turns) / min(found[title, USUAL]))


def run(folder: Path) -> tuple[str, Iterable[Timing]]:
    """Time each row by both."""
    return "Products with frozen weights: a round by oneDNN, against torch's usual library", rows()


if __name__ == "__main__":
    print(json.dumps(seconds(*sys.argv[1:])))
