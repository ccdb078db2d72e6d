"""A round of each part in a frozen tower beside prompts, and what kept tokens save where parts begin later.

Each row is measured in processes of its own, so that its peak memory is its own, too, and all rows in turns, of which
the best counts: a machine's neighbours come and go within minutes.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

from benchmark.backbones.parts import Adapter, LowRank, Norms
from benchmark.method import FederatedMethod
from benchmark.speed.measure import Timing, device, fit, last_line_of
from benchmark.speed.workloads import CLASSES, TRAINING, Workload, class_names, frozen_clip, frozen_vit, large_clip
from methods import (
    FedCLIP,
    FedLoRA,
    FedLoRACLIP,
    FedPart,
    FedPartCLIP,
    FedSDG,
    FedVPT,
    FedVPTDeep,
    PF2LoRA,
    PFedMMA,
    PromptFL,
    ZeroShotCLIP,
)

#: clients, images of each
CLIENTS, IMAGES = 2, 32
#: rounds of a fit, the best of which counts; a round of the small CLIP takes hundredths of a second
VIT_ROUNDS, CLIP_ROUNDS = 3, 20
#: how often all rows are measured
TURNS = 3


#: What makes a method for so many clients, and whether frozen features are kept.
Timed = tuple[Callable[[int], FederatedMethod], bool | Literal["auto"]]


def in_vit(kind: Any, **settings: Any) -> Callable[[int], FederatedMethod]:
    """Return what makes a method of a frozen ViT for so many clients."""
    name = "vit_base_patch16_224" if device() == "cuda" else "vit_tiny_patch16_224"
    return lambda clients: kind(CLASSES, clients, frozen_vit(name, 224), training=TRAINING, **settings)


def in_clip(kind: Any, **settings: Any) -> Callable[[int], FederatedMethod]:
    """Return what makes a method of a frozen CLIP for so many clients."""
    return lambda clients: kind(clients, class_names(), frozen_clip(large_clip()), training=TRAINING, **settings)


def of_vit() -> dict[str, Timed]:
    """Return each kind of part, and parts from block 9 on with tokens kept and made in every step; prompts first."""
    found: dict[str, Timed] = {
        "FedVPT, all blocks": (in_vit(FedVPT), "auto"),
        "FedVPTDeep, all blocks": (in_vit(FedVPTDeep), "auto"),
        "FedLoRA, all blocks": (in_vit(FedLoRA), "auto"),
        "FedPart (adapters), all blocks": (in_vit(FedPart, part=Adapter()), "auto"),
        "FedPart (norms), all blocks": (in_vit(FedPart, part=Norms()), "auto"),
        "PF2LoRA, all blocks": (in_vit(PF2LoRA, order="joint"), "auto"),
        "FedSDG, all blocks": (in_vit(FedSDG), "auto"),
    }
    late: tuple[tuple[str, Any], ...] = (("FedVPT", FedVPT), ("FedLoRA", FedLoRA))
    for title, kind in late:
        for how, cached in (("made in every step", False), ("kept", True)):
            found[f"{title}, from block 9 on, tokens {how}"] = (in_vit(kind, first_block=9), cached)
    return found


def of_clip() -> dict[str, Timed]:
    """Return each part in CLIP, after PromptFL, whose images are encoded once; tokens kept and made in every step."""
    name, block = large_clip(), 9 if device() == "cuda" else 3  # of 12 or 4
    late = in_clip(FedPartCLIP, text=None, image=LowRank(first_block=block))
    return {
        f"PromptFL, {name}": (in_clip(PromptFL), "auto"),
        f"FedLoRACLIP, text, {name}": (in_clip(FedLoRACLIP, towers="text"), "auto"),
        f"FedLoRACLIP, both towers, {name}": (in_clip(FedLoRACLIP), "auto"),
        f"FedPartCLIP (norms), text, {name}": (in_clip(FedPartCLIP, text=Norms()), "auto"),
        f"FedPartCLIP (factors), image, from block {block} on, tokens made in every step, {name}": (late, False),
        f"FedPartCLIP (factors), image, from block {block} on, tokens kept, {name}": (late, True),
        f"PFedMMA, {name}": (in_clip(PFedMMA, first_block=1), "auto"),
        f"FedCLIP, {name}": (in_clip(FedCLIP), "auto"),
    }


def measured(title: str) -> dict[str, float]:
    """Return the seconds of the best round of a row, both clients together, and this process's peak bytes."""
    make, cached = (of_vit() | of_clip())[title]
    method = make(CLIENTS)
    clip = title in of_clip()
    size = cast(ZeroShotCLIP, method).clip.image_size[0] if clip else 224
    rounds = CLIP_ROUNDS if clip else VIT_ROUNDS
    data = Workload("", make, size).data(CLIENTS, IMAGES, CLIENTS, tested=4, cache_features=cached)
    laps = fit(method, data, rounds, evaluate_every=rounds)
    return {"seconds": laps.best, "memory": laps.memory}


def rows_of(titles: Iterable[str], work: str, of_first: str) -> Iterator[Timing]:
    """Yield the rows, measured in turns, against the first."""
    found: dict[str, list[dict[str, float]]] = {title: [] for title in titles}
    for _ in range(TURNS):
        for title, turns in found.items():
            turns.append(json.loads(last_line_of([sys.executable, "-m", "benchmark.speed.parts", title])))
    first = 0.0
    for title, turns in found.items():
        note = "" if first else f"times {of_first} in every row; MB of a process with all that it has imported"
        seconds, memory = min(turn["seconds"] for turn in turns), min(int(turn["memory"]) for turn in turns)
        first = first or seconds
        yield Timing(title, work, seconds, seconds / first, memory=memory, note=note)


def run(folder: Path) -> tuple[str, Iterable[Timing]]:
    """Time both towers' parts."""
    work = f"a round of {CLIENTS} clients x {IMAGES} images"
    towers = (
        (of_vit(), f"{work} at 224 px, batches of 16", "FedVPT's"),
        (of_clip(), f"{work}, batches of 16", "PromptFL's"),
    )
    return "Parts in a frozen tower: a round of each, against prompts", (
        row for titles, of_work, of_first in towers for row in rows_of(titles, of_work, of_first)
    )


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1])))
