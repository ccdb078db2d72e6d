"""What differential privacy costs: a round's seconds at user level and at record level, against none."""

from collections.abc import Iterable
from pathlib import Path

from benchmark.engine.rounds import Server
from benchmark.privacy import UserLevelPrivacy
from benchmark.privacy.record_level import RecordLevelPrivacy
from benchmark.speed.measure import Row, fit
from benchmark.speed.workloads import Work, fedvpt, large_clip, large_vit, promptfl

CLIENTS, IMAGES, ROUNDS, REPETITIONS = 4, 32, 3, 2
PLAIN, USER, RECORD = "no privacy", "user level", "record level"


def one(work: Work, level: str) -> float:
    """Return the seconds of the fastest round."""
    method, data = work.made(CLIENTS, IMAGES, CLIENTS)
    if level == RECORD:
        data.record_privacy = RecordLevelPrivacy(clip=1.0, noise_multiplier=1.0)
    rule = UserLevelPrivacy(noise_multiplier=1.0) if level == USER else None
    return fit(method, data, ROUNDS, callbacks=[] if rule is None else [Server(rule)]).best


def compare(work: Work) -> list[Row]:
    """Time the levels of privacy in turn, and again; the fastest of each counts."""
    found: dict[str, list[float]] = {}
    for _ in range(REPETITIONS):
        for level in (PLAIN, USER, RECORD):
            found.setdefault(level, []).append(one(work, level))
    best = {level: min(seconds) for level, seconds in found.items()}
    steps = -(-IMAGES // work.batch)
    what = f"a round of {CLIENTS} clients x {steps} steps of {work.batch} images"
    rows = [
        Row(f"{work.name}, {level}", what, best[level], best[level] / best[PLAIN]) for level in (PLAIN, USER, RECORD)
    ]
    return rows


def run(folder: Path) -> tuple[str, Iterable[Row]]:
    """A prompt in a ViT; one in a CLIP's text tower, with kept features, in mini-batches of two sizes."""
    works = (fedvpt(*large_vit()), promptfl(large_clip(), batch=4), promptfl(large_clip(), batch=32))
    return "Differential privacy, against none", (row for work in works for row in compare(work))
