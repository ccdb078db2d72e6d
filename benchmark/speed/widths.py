"""Measure a client's step by the clients at once, and what unequal clients waste."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from benchmark.contract import LocalTraining, Stage
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.speed.measure import Laps, Timing, device, fit, fit_repeated
from benchmark.speed.workloads import Workload, cnn, fedvpt, large_clip, large_vit, promptfl, tiny_vit
from datamodules.federated import FederatedDataModule
from datamodules.partition import DirichletShared, Partition

STEPS = 2


def padding_share(plan: RoundPlan) -> float:
    """Share of the rows in a round's stacked steps that hold no image, in [0, 1)."""
    masks = [mask for step in range(len(plan.steps)) if (mask := plan[step].mask) is not None]
    return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def round_plan(data: FederatedDataModule, width: int) -> RoundPlan:
    """A round of one epoch with all clients, as the engine plans it."""
    clients = range(data.num_clients)
    phases = [LocalTraining(lr=0.0, epochs=1).phase()]
    return RoundPlan(clients, data.train_indices, data.federation.terms, phases, Stage.TRAIN, width, round=1)


def width_rows(
    work: Workload, clients: int, widths: Sequence[int | Literal["auto"]], rounds: int, turns: int
) -> list[Timing]:
    """Seconds of one client's step by the clients at once; a number that does not fit into the GPU's memory has no row.

    Args:
        work: what is trained.
        clients: N, all of them in every round.
        widths: the first one is the reference.
        rounds: of each fit, and more where steps are repeated from a record.
        turns: fits of each width.
    """
    best: dict[int | Literal["auto"], Laps] = {}
    for _ in range(turns):
        for width in widths:
            cohorts = 1 if width == "auto" else -(-clients // width)
            make = partial(work.made, clients, STEPS * work.batch, width)
            try:
                times = fit_repeated(make, cohorts * STEPS, rounds, work.precision)
            except torch.cuda.OutOfMemoryError:
                continue
            if width not in best or times.best < best[width].best:
                best[width] = times
    what = f"one client's step of {work.batch} images, of {clients} clients x {STEPS} steps"
    reference = best[widths[0]].best
    return [
        Timing(
            f"{work.name}, width {width}",
            what,
            times.best / (clients * STEPS),
            times.best / reference,
            memory=times.memory if device() == "cuda" else None,
            note=f"auto picks {times.width}" if width == "auto" else "",
        )
        for width, times in best.items()
    ]


def ragged_rows(work: Workload, clients: int, images: int, widths: Sequence[int], rounds: int) -> list[Timing]:
    """A round of unequal clients against one of equal clients with as many images, and how much of it is padding.

    Args:
        work: what is trained.
        clients: N.
        images: of a client, on average.
        widths: numbers of clients at once.
        rounds: of each fit.
    """

    def timed(width: int, partition: Partition | None) -> tuple[Laps, FederatedDataModule]:
        data = work.data(clients, images, width, partition, tested=images)
        return fit(work.method(clients), data, rounds, precision=work.precision), data

    rows = []
    for width in widths:
        equal = timed(width, None)[0].best
        times, data = timed(width, DirichletShared(0.3, clients, min_size=1))
        share = padding_share(round_plan(data, width))
        sizes = data.train_sizes.values()
        rows.append(
            Timing(
                f"{work.name}, unequal clients, width {width}",
                f"a round of {clients} clients with {min(sizes)} to {max(sizes)} images, batches of {work.batch}",
                times.best,
                times.best / equal,
                note=f"{100 * share:.1f} % of the rows are padding; reference: equal clients, as many images",
            )
        )
    return rows


def run(folder: Path) -> tuple[str, list[Timing]]:
    """Four works by clients at once, and unequal clients."""
    on_gpu = device() == "cuda"
    vit = fedvpt(*large_vit()) if on_gpu else fedvpt("micro_vit", 32)
    works = (cnn(), tiny_vit(), vit, promptfl(large_clip()))
    widths: tuple[int | Literal["auto"], ...] = (1, 2, 4, 8, 16, 32, 64, "auto")
    rows = [row for work in works for row in width_rows(work, 64, widths, rounds=3 if on_gpu else 2, turns=1)]
    rows += ragged_rows(cnn(), 64, 64, (1, 16, 64), rounds=4 if on_gpu else 2)
    return "Clients stepped together: seconds by their number, against one", rows
