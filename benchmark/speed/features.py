"""The speed-up of caching the frozen parts' features of each image, and a check that it changes no result."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from benchmark.method import FederatedMethod
from benchmark.speed.measure import Laps, Timing, device, fit, rounds_until_repeated
from benchmark.speed.workloads import Workload, fedpgp, headtune, large_clip, large_vit, pfedbayespt, promptfl, sgpt


@dataclass(frozen=True)
class Subject:
    """A workload and its size.

    Attributes:
        work: what is trained.
        clients: N.
        images: training images of a client.
        rounds: of each fit.
        width: clients stepped together.
    """

    work: Workload
    clients: int = 4
    images: int = 32
    rounds: int = 3
    width: int = 1


def outcome(method: FederatedMethod) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the result of a fit: shared and all clients' personal values, and accuracies [N] by point and split."""
    values = {name: value.clone() for name, value in method.simulation.shared().items()}
    values |= {f"store.{name}": method.store.all_rows(name).clone() for name in method.store.names}
    found = method.evaluation.scores
    scores = {"/".join(key): score.compute()["accuracy"] for key, score in found.items()}
    return values, scores


def largest_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Largest absolute difference over tensors of the same names; 0 where all are bitwise equal.

    Raises:
        ValueError: the names differ.
    """
    if left.keys() != right.keys():
        raise ValueError(f"different tensors: {sorted(set(left) ^ set(right))}")
    return max(((value - right[name]).abs().max().item() for name, value in left.items()), default=0.0)


def compare(subject: Subject) -> list[Timing]:
    """The work with the images encoded in every step, and once for all."""
    times: list[Laps] = []
    left_behind = []
    for cached in (False, True):
        method = subject.work.method(subject.clients)
        data = subject.work.data(subject.clients, subject.images, subject.width, tested=4, cache_features=cached)
        times.append(fit(method, data, subject.rounds, evaluate_every=subject.rounds))
        left_behind.append(outcome(method))
    (values, scores), (cached_values, cached_scores) = left_behind
    by, scored = largest_difference(values, cached_values), largest_difference(scores, cached_scores)
    note = "identical parameters" if by == 0 else f"parameters differ by at most {by:.1e}"
    note += ", identical accuracies" if scored == 0 else f", accuracies by at most {scored:.3f}"
    work = f"a round of {subject.clients} clients x {subject.images} images, batches of {subject.work.batch}"
    encoded, kept = times
    return [
        Timing(f"{subject.work.name}, encoded in every step", work, encoded.best, encoded.best / kept.best, note=note),
        Timing(f"{subject.work.name}, encoded once", work, kept.best, 1.0),
    ]


def clip_subjects() -> list[Subject]:
    """PromptFL and FedPGP with this machine's CLIP, for as many rounds as it takes to record and time steps.

    On a GPU eight clients together with four steps each; on a CPU four clients with one step, one after the other.
    """
    works = [work(large_clip(), batch=32) for work in (promptfl, fedpgp)]
    if device() == "cpu":
        return [Subject(work, rounds=16) for work in works]
    return [Subject(work, clients=8, images=4 * work.batch, rounds=rounds_until_repeated(4), width=8) for work in works]


def subjects() -> list[Subject]:
    """Two methods of the CLIP family, three on a plain ViT; on a CPU also CLIP ViT-B/16, one step a round."""
    vit = large_vit()
    found = [Subject(work) for work in (headtune(*vit), pfedbayespt(*vit), sgpt(*vit))]
    found += clip_subjects()
    if device() == "cpu":
        found += [Subject(work("ViT-B-16", 32), clients=1, rounds=2) for work in (promptfl, fedpgp)]
    return found


def run(folder: Path) -> tuple[str, Iterable[Timing]]:
    """Every subject both ways."""
    rows = (row for subject in subjects() for row in compare(subject))
    return "Frozen features: made in every step, against once for each image", rows
