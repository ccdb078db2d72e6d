"""The cost of differential privacy: seconds of a round at user level and at record level, against none."""

from collections.abc import Iterable
from pathlib import Path

from benchmark.engine.rounds import Server
from benchmark.privacy import UserLevelPrivacy
from benchmark.privacy.record_level import RecordLevelPrivacy
from benchmark.speed.measure import Timing, fit, rounds_until_repeated
from benchmark.speed.workloads import Workload, fedvpt, large_clip, large_vit, promptfl

CLIENTS, IMAGES, REPETITIONS = 4, 32, 2
PLAIN, USER, RECORD = "no privacy", "user level", "record level"


def one(work: Workload, level: str, rounds: int) -> float:
    """Return the seconds of the fastest round of so many."""
    method, data = work.made(CLIENTS, IMAGES, CLIENTS)
    if level == RECORD:
        data.record_privacy = RecordLevelPrivacy(clip=1.0, noise_multiplier=1.0)
    rule = UserLevelPrivacy(noise_multiplier=1.0) if level == USER else None
    return fit(method, data, rounds, callbacks=[] if rule is None else [Server(rule)]).best


def compare(work: Workload, rounds: int) -> list[Timing]:
    """Time the levels of privacy in turn, and again; the fastest of each counts."""
    found: dict[str, list[float]] = {}
    for _ in range(REPETITIONS):
        for level in (PLAIN, USER, RECORD):
            found.setdefault(level, []).append(one(work, level, rounds))
    best = {level: min(seconds) for level, seconds in found.items()}
    steps = -(-IMAGES // work.batch)
    what = f"a round of {CLIENTS} clients x {steps} steps of {work.batch} images"
    rows = [
        Timing(f"{work.name}, {level}", what, best[level], best[level] / best[PLAIN]) for level in (PLAIN, USER, RECORD)
    ]
    return rows


def run(folder: Path) -> tuple[str, Iterable[Timing]]:
    """A prompt in a ViT; one in a CLIP's text tower, with kept features, in mini-batches of two sizes."""
    clip = [promptfl(large_clip(), batch) for batch in (4, 32)]
    # Small steps are recorded and repeated, those with privacy too.
    timed = [(fedvpt(*large_vit()), 3), *((work, rounds_until_repeated(-(-IMAGES // work.batch))) for work in clip)]
    return "Differential privacy, against none", (row for work, rounds in timed for row in compare(work, rounds))
