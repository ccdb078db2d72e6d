"""The cost of pFedBayesPT's posterior on top of FedVPT-Deep: a ladder in which every row adds one part.

The images' prompt-free features are cached, as by default; the last row computes them in every step.
"""

from dataclasses import replace
from pathlib import Path

from benchmark.speed.measure import Timing, device, fit
from benchmark.speed.workloads import CLASSES, TRAINING, Workload, frozen_vit, large_vit
from methods.fedvptdeep import FedVPTDeep
from methods.pfedbayespt import PFedBayesPT

PROMPTS = 10


def deep(name: str, size: int, num_prompts: int) -> Workload:
    """FedVPT-Deep with so many prompts in every layer."""
    return Workload(
        f"FedVPT-Deep, {num_prompts} prompts a layer",
        lambda clients: FedVPTDeep(
            CLASSES, clients, frozen_vit(name, size), num_prompts=num_prompts, training=TRAINING
        ),
        size,
        precision="bf16-mixed" if device() == "cuda" else "32-true",
    )


def bayes(name: str, size: int, what: str, **settings: object) -> Workload:
    """PFedBayesPT with these settings."""
    return replace(
        deep(name, size, PROMPTS),
        name=f"pFedBayesPT, {what}",
        build=lambda clients: PFedBayesPT(
            CLASSES,
            clients,
            frozen_vit(name, size),
            num_prompts=PROMPTS,
            training=TRAINING,
            **settings,  # type: ignore[arg-type]
        ),
    )


def ladder(name: str, size: int) -> list[tuple[Workload, bool, str]]:
    """Per rung the work, whether the features are kept, and what it adds to the rung before."""
    j4 = {"importance_samples": 4}
    return [
        (deep(name, size, PROMPTS), True, "reference"),
        (deep(name, size, PROMPTS + 1), True, "one more token a layer, as many as pFedBayesPT has"),
        (bayes(name, size, "-D", posterior="deterministic"), True, "the token is made from the image, by MLP^mu"),
        (bayes(name, size, "-G", posterior="gaussian"), True, "MLP^Sigma, a draw, the analytic KL"),
        (bayes(name, size, "S=0", mixing_draws=0), True, "masks, and densities for the KL"),
        (bayes(name, size, "S=1"), True, "one mixing draw; the default"),
        (bayes(name, size, "S=3", mixing_draws=3), True, "two mixing draws more"),
        (bayes(name, size, "S=1, J=4", **j4), True, "four passes of the ViT in place of one, against S=1"),
        (bayes(name, size, "S=1, features made in every step"), False, "a pass without prompts, against S=1"),
    ]


def rungs(name: str, size: int, clients: int, images: int, rounds: int = 3) -> list[Timing]:
    """Seconds of one client's step, all clients at once on a GPU and one after the other on a CPU.

    Args:
        name: of the frozen ViT.
        size: pixels.
        clients: N.
        images: of a client.
        rounds: of each fit.
    """
    rows: list[Timing] = []
    for work, kept, note in ladder(name, size):
        data = work.data(clients, images, clients if device() == "cuda" else 1, cache_features=kept)
        laps = fit(work.method(clients), data, rounds, precision=work.precision)
        seconds = laps.best / laps.steps[-1]
        reference = rows[0].seconds if rows else seconds
        what = f"one client's step of {work.batch} images, {name} at {size} px"
        rows.append(Timing(work.name, what, seconds, seconds / reference, note=note))
    return rows


def run(folder: Path) -> tuple[str, list[Timing]]:
    """The frozen ViT of this machine."""
    name, size = large_vit()
    return "pFedBayesPT's step against FedVPT-Deep's, part by part", rungs(
        name, size, 8 if device() == "cuda" else 2, images=64
    )
