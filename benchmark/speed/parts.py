"""A round of each part in a frozen tower beside prompts, and what kept tokens save where parts begin later."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from benchmark.backbones.parts import Adapter
from benchmark.method import FederatedMethod
from benchmark.speed.measure import Row, device, fit
from benchmark.speed.workloads import CLASSES, TRAINING, Work, class_names, frozen_clip, frozen_vit, large_clip
from methods import (
    FedCLIP,
    FedLoRA,
    FedLoRACLIP,
    FedPart,
    FedSDG,
    FedVPT,
    FedVPTDeep,
    PF2LoRA,
    PFedMMA,
    PromptFL,
)

#: clients, images of each, rounds of a fit
CLIENTS, IMAGES, ROUNDS = 2, 32, 3


def seconds(make: Callable[[int], FederatedMethod], size: int, cached: bool | Literal["auto"] = "auto") -> float:
    """Return the seconds of the best round of a method, both clients together."""
    work = Work("", make, size, 16, "bf16-mixed" if device() == "cuda" else "32-true")
    data = work.data(CLIENTS, IMAGES, CLIENTS, tested=4, cache_features=cached)
    return fit(make(CLIENTS), data, ROUNDS, evaluate_every=ROUNDS).best


def in_vit(kind: Any, **settings: Any) -> Callable[[int], FederatedMethod]:
    """Return what makes a method of a frozen ViT for so many clients."""
    name = "vit_base_patch16_224" if device() == "cuda" else "vit_tiny_patch16_224"
    return lambda clients: kind(CLASSES, clients, frozen_vit(name, 224), training=TRAINING, **settings)


def in_clip(kind: Any, **settings: Any) -> Callable[[int], FederatedMethod]:
    """Return what makes a method of a frozen CLIP for so many clients."""
    return lambda clients: kind(clients, class_names(), frozen_clip(large_clip()), training=TRAINING, **settings)


def of_vit() -> Iterable[Row]:
    """Yield a round of each kind of part, and of parts from block 9 on with tokens kept and made in every step."""
    work = f"a round of {CLIENTS} clients x {IMAGES} images at 224 px, batches of 16"
    everywhere = seconds(in_vit(FedVPT), 224)
    yield Row("FedVPT, all blocks", work, everywhere, 1.0, note="times FedVPT's in every row")
    parts: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("FedVPTDeep, all blocks", FedVPTDeep, {}),
        ("FedLoRA, all blocks", FedLoRA, {}),
        ("FedPart (adapters), all blocks", FedPart, {"part": Adapter()}),
        ("PF2LoRA, all blocks", PF2LoRA, {"order": "joint"}),
        ("FedSDG, all blocks", FedSDG, {}),
    )
    for title, kind, settings in parts:
        took = seconds(in_vit(kind, **settings), 224)
        yield Row(title, work, took, took / everywhere)
    late: tuple[tuple[str, Any], ...] = (("FedVPT", FedVPT), ("FedLoRA", FedLoRA))
    for title, kind in late:
        for how, cached in (("made in every step", False), ("kept", True)):
            took = seconds(in_vit(kind, first_block=9), 224, cached)
            yield Row(f"{title}, from block 9 on, tokens {how}", work, took, took / everywhere)


def of_clip() -> Iterable[Row]:
    """Yield a round of each part in CLIP beside PromptFL's, whose images are encoded once."""
    name = large_clip()
    size = frozen_clip(name).image_size[0]
    work = f"a round of {CLIENTS} clients x {IMAGES} images, batches of 16"
    first = seconds(in_clip(PromptFL), size)
    yield Row(f"PromptFL, {name}", work, first, 1.0, note="times PromptFL's in every row")
    for title, kind, settings in (
        ("FedLoRACLIP, text", FedLoRACLIP, {"towers": "text"}),
        ("FedLoRACLIP, both towers", FedLoRACLIP, {}),
        ("PFedMMA", PFedMMA, {"first_block": 1}),
        ("FedCLIP", FedCLIP, {}),
    ):
        took = seconds(in_clip(kind, **settings), size)
        yield Row(f"{title}, {name}", work, took, took / first)


def run(folder: Path) -> tuple[str, Iterable[Row]]:
    """Time both towers' parts."""
    return "Parts in a frozen tower: a round of each, against prompts", (
        row for of in (of_vit, of_clip) for row in of()
    )
