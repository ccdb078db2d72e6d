"""Compare the engine with its targets: its own cost, plain loops, and recorded steps.

The host's time is the process's CPU time with one thread, of pfl-research's CIFAR-10 setting (50 clients with five
steps each) with tiny tensors, so that next to no arithmetic is in it. On a GPU a published benchmark is run whole, and
large networks take the place of loops and small steps. The cases ``peers`` and ``growth`` have the targets against
other simulators and of a million clients.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.callbacks import Callback

from benchmark.backbones.cnn import PaperCNN
from benchmark.backbones.tiny_vit import TinyViT
from benchmark.engine.local_training import LocalSteps
from benchmark.engine.repeat import recorded_step
from benchmark.engine.repeat.recorded_step import RecordedSteps
from benchmark.internals import TorchDispatchMode
from benchmark.speed import engine, features, vit
from benchmark.speed.measure import Timing, device, fit, matmul_peak, now
from benchmark.speed.peer_scripts.cifar10_setting import Setting
from benchmark.speed.peers import measure_engine
from benchmark.speed.workloads import Workload, fedpgp, headtune, promptfl, tiny

CLIENTS, STEPS = 50, 5
#: Milliseconds of a round in all, and beside its steps; operations that would take a kernel. These are counted on the
#: device at hand: on a CPU the host's own, of the plan for example, are among them.
HOST, BESIDE, KERNELS = 9.0, 1.5, 400
#: Of the loop's time, at ten clients together.
LOOP = 0.65
#: A round on kept features, of the time of the same without recorded steps.
KEPT = 0.5
#: pfl-research's whole benchmark, and seconds that it may take on a GPU.
WHOLE, PUBLISHED = Setting(rounds=1500, evaluate_every=10), 15.0
#: On a GPU: of the peak of a matrix product, with eight clients of 64 images together; and how many times as long a
#: round takes in which CLIP's features are made in every step.
SHARE, MADE_ANEW = 0.45, 20.0


class HostTime(Callback):
    """CPU seconds of each round."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self._began = time.process_time()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """A round ends, and the next begins."""
        now = time.process_time()  # once: on a virtual machine reading this clock takes a quarter of a millisecond
        self.rounds.append(now - self._began)
        self._began = now


class Kernels(Callback):
    """Counts the operations of the last round that take a kernel on a GPU: all but views."""

    def __init__(self) -> None:
        self.count = 0
        self._mode = _Counting()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Count anew."""
        if trainer.current_epoch == trainer.max_epochs - 1:
            self._mode.__enter__()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the count."""
        if trainer.current_epoch == trainer.max_epochs - 1:
            self._mode.__exit__(None, None, None)
            self.count = self._mode.count


class Products(TorchDispatchMode):
    """Seconds inside convolutions and products of matrices, forward and backward.

    On a CPU they run at the core's peak, so that a loop cannot be made faster than they alone take; attention's fused
    kernel, of products mostly, counts as well.
    """

    NAMES = ("convolution", "mm", "attention")

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.rounds: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(name in func._schema.name for name in self.NAMES):
            return func(*args, **(kwargs or {}))
        began = now()
        made = func(*args, **(kwargs or {}))
        self.seconds += now() - began
        return made

    def end_round(self) -> None:
        """Note the seconds of a round."""
        self.rounds.append(self.seconds - sum(self.rounds))


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func._schema.returns
        self.count += not returned or returned[0].alias_info is None or returned[0].alias_info.is_write
        return func(*args, **(kwargs or {}))


def verdict(found: float, target: float, named: float | None = None) -> str:
    """In words, whether a number is at most its target, which may be named by another number."""
    return f"target {target if named is None else named:g}: {'met' if found <= target else 'not met'}"


def host_rows(rounds: int) -> list[Timing]:
    """CPU time of a round in all and beside its steps, and its kernels; ratios are to the targets."""
    work = f"{CLIENTS} clients x {STEPS} steps, tiny tensors, one thread"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = _host_time(rounds, [])
        with (
            patch.object(LocalSteps, "take", lambda *_: None),
            patch.object(RecordedSteps, "__call__", lambda *_: None),
        ):
            beside = _host_time(rounds, [])
        counted = Kernels()
        _host_time(rounds, [counted])
    finally:
        torch.set_num_threads(threads)
    milliseconds = {"a round": (1000 * whole, HOST), "beside its steps": (1000 * beside, BESIDE)}
    rows = [
        Timing(f"host: {part}", work, found / 1000, found / target, note=f"ms, {verdict(found, target)}")
        for part, (found, target) in milliseconds.items()
    ]
    kernels = f"{counted.count} operations on the {device()}, {verdict(counted.count, KERNELS)}"
    return [*rows, Timing("host: kernels of a round", work, 0.0, counted.count / KERNELS, note=kernels)]


def _host_time(rounds: int, callbacks: list[Callback]) -> float:
    """Best round's CPU seconds, once steps are recorded."""
    small, clock = tiny(), HostTime()
    fit(small.method(CLIENTS), small.data(CLIENTS, STEPS * small.batch, CLIENTS), rounds, callbacks=[clock, *callbacks])
    return min(clock.rounds[rounds // 2 :])


def loop_rows(rounds: int, turns: int) -> list[Timing]:
    """Rounds of the engine with ten clients together, each against a bare loop of the same mathematics, in turns."""
    pairs: dict[str, tuple[Callable[..., float], Callable[[], float]]] = {
        "FedAvg, pFedPT's CNN": (engine.plain, lambda: engine.engine(10, rounds)),
        "pFedPT, its CNN": (
            partial(engine.plain, prompted=True),
            lambda: engine.engine(10, rounds, lambda: engine.pfedpt(PaperCNN())),
        ),
        "FedAvg, tiny ViT": (
            partial(engine.plain, network=engine.plain_vit),
            lambda: engine.engine(10, rounds, lambda: engine.fedavg(TinyViT())),
        ),
    }
    rows = []
    work = f"{engine.CLIENTS} clients x {engine.IMAGES // engine.BATCH} steps of {engine.BATCH} images"
    for name, (loop, stacked) in pairs.items():
        times = [(loop(rounds), stacked()) for _ in range(turns)]
        bare, ours = (min(column) for column in zip(*times, strict=True))
        with Products() as products:
            loop(rounds, each_round=products.end_round)
        least = min(products.rounds[1:])
        rows.append(Timing(f"{name}: a bare loop", work, bare, 1.0))
        rows.append(Timing(f"{name}: its convolutions and products alone", work, least, least / bare))
        rows.append(Timing(f"{name}: engine, width 10", work, ours, ours / bare, note=verdict(ours / bare, LOOP)))
    return rows


def kept_rows(works: list[Workload], clients: int, rounds: int, turns: int) -> list[Timing]:
    """Rounds on kept features with recorded steps, against the same steps as they are written, in turns."""
    rows = []
    for work in works:
        best = {"as written": float("inf"), "recorded": float("inf")}
        for _ in range(turns):
            for name in best:
                before = recorded_step.BEFORE_RECORDING if name == "recorded" else 10**9
                with patch.object(recorded_step, "BEFORE_RECORDING", before):
                    laps = fit(work.method(clients), work.data(clients, 4 * work.batch, clients), rounds)
                best[name] = min(best[name], *laps.rounds[rounds // 2 :])
        amount = f"{clients} clients x 4 steps of {work.batch} images"
        share = best["recorded"] / best["as written"]
        rows.append(Timing(f"{work.name}: as written", amount, best["as written"], 1.0))
        rows.append(Timing(f"{work.name}: recorded", amount, best["recorded"], share, note=verdict(share, KEPT)))
    return rows


def published_row(setting: Setting, target: float) -> Timing:
    """Rounds and evaluations of pfl-research's CIFAR-10 setting, all clients of a round together."""
    found = measure_engine(setting, setting.cohort)
    took = sum(found.rounds) + sum(found.evaluations)
    work = f"{setting.rounds:,} rounds of {setting.cohort} clients, {len(found.evaluations)} evaluations"
    evaluated = 100 * sum(found.evaluations) / took
    note = f"{verdict(took, target)}; {evaluated:.0f} % of it evaluations, best round {1000 * found.best:.2f} ms"
    return Timing("pfl-research's CIFAR-10 setting", work, took, took / target, note=note)


def share_of_peak_row() -> Timing:
    """One client's step of FedVPT with a large ViT; the ratio is to the target."""
    row = vit.share_row(64, 8, 4, matmul_peak(torch.bfloat16))
    assert row.share_of_peak is not None
    note = f"{row.note}; {verdict(SHARE / row.share_of_peak, 1.0, SHARE)}"
    return replace(row, ratio=SHARE / row.share_of_peak, note=note)


def made_anew_rows(subject: features.Subject) -> list[Timing]:
    """Rounds that encode images in every step, and once for all."""
    anew, kept = features.compare(subject)
    assert anew.ratio is not None
    return [replace(anew, note=f"{anew.note}; {verdict(MADE_ANEW / anew.ratio, 1.0, MADE_ANEW)}"), kept]


def _rows(rounds: int) -> Iterator[Timing]:
    yield from host_rows(rounds)
    if device() == "cuda":
        yield published_row(WHOLE, PUBLISHED)
        yield share_of_peak_row()
        for subject in features.clip_subjects():
            yield from made_anew_rows(subject)
    else:
        works = [promptfl("micro_clip"), fedpgp("micro_clip"), headtune("micro_vit", 32)]
        yield from loop_rows(3, 2)
        yield from kept_rows(works, 4, 12, 2)


def run(folder: Path, rounds: int = 60) -> tuple[str, Iterable[Timing]]:
    """The host's time; then on a CPU loops and small steps on kept features, on a GPU what is too large for a CPU."""
    rows = _rows(rounds)
    return "Targets: the engine's own cost, and what it is worth against plain loops", rows
