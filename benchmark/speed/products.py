"""A round of a frozen ViT, and its features, with products by oneDNN, beside the same with torch's usual library.

Rows are measured in turns, each in a process of its own, as in ``benchmark.speed.parts``. Both are measured on any
processor; ``benchmark.backbones.products`` says where a run takes oneDNN.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from benchmark.backbones import products
from benchmark.federation import Values
from benchmark.speed.measure import Timing, fit, last_line_of
from benchmark.speed.parts import CLIENTS, IMAGES, TURNS, in_vit, measured
from benchmark.speed.workloads import Workload
from methods.headtune import HeadTune

BATCH = 16
#: rows of ``benchmark.speed.parts``
ROWS = (
    "FedVPT, all blocks",
    "FedLoRA, all blocks",
    "FedVPT, from block 9 on, tokens kept",
    "FedLoRA, from block 9 on, tokens kept",
)
#: The features of all images, each once.
FEATURES = "HeadTune, features kept"
USUAL, ONEDNN = BY = ("torch's usual products", "oneDNN's")


def seconds(title: str, by: str) -> float:
    """Return the seconds of the best round of a row in this process, which computes its products this way from now."""
    products.faster_by_onednn = lambda: by == ONEDNN  # type: ignore[assignment]
    return making_features() if title == FEATURES else measured(title)["seconds"]


def making_features() -> float:
    """Return the seconds in which the features of a federation's images are made, without the first batch."""
    make, laps = in_vit(HeadTune), []
    method = make(CLIENTS)
    encode = method.frozen_features

    def timed(x: Tensor) -> Values:
        began = time.perf_counter()
        made = encode(x)
        laps.append(time.perf_counter() - began)
        return made

    method.frozen_features = timed  # type: ignore[method-assign]
    data = Workload("", make, 224).data(CLIENTS, IMAGES, CLIENTS, tested=4, cache_features=True)
    data.eval_batch_size = BATCH
    fit(method, data, 1)
    return sum(laps[1:])


def rows() -> Iterator[Timing]:
    """Yield each row by both, against torch's usual products."""
    found: dict[tuple[str, str], list[float]] = {(title, by): [] for title in (*ROWS, FEATURES) for by in BY}
    for _ in range(TURNS):
        for place, turns in found.items():
            turns.append(json.loads(last_line_of([sys.executable, "-m", "benchmark.speed.products", *place])))
    size = f"at 224 px, batches of {BATCH}"
    for (title, by), turns in found.items():
        rounds, images = f"a round of {CLIENTS} clients x {IMAGES} images", f"{CLIENTS * (IMAGES + 4) - BATCH} images"
        work = images if title == FEATURES else rounds
        yield Timing(f"{title}: {by}", f"{work} {size}", min(turns), min(turns) / min(found[title, USUAL]))


def run(folder: Path) -> tuple[str, Iterable[Timing]]:
    """Time each row by both."""
    return "Products with frozen weights: a round, and features, by oneDNN, against torch's usual library", rows()


if __name__ == "__main__":
    print(json.dumps(seconds(*sys.argv[1:])))
