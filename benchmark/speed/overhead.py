"""Divide the time of a round among the networks' arithmetic, the engine around it, and Lightning around that."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from benchmark.drawing import new_figure, save_figure
from benchmark.engine.batches.images import ImageFeed
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.engine.repeat.recorded_step import Visit
from benchmark.engine.rounds import Server
from benchmark.speed.measure import Timing, device, fit, now, rounds_until_repeated
from benchmark.speed.workloads import Workload, cnn, fedvpt, large_clip, large_vit, promptfl, tiny

CLIENTS, STEPS = 8, 10
PICTURE = "where_the_time_goes.png"
LIGHTNING = "Lightning"
ARITHMETIC = "arithmetic"
#: in the order in which they are shown
PARTS = {
    ARITHMETIC: "forward, backward and optimizer",
    "engine: steps": "mapping over clients, losses, ended clients",
    "engine: plan": "order of images, masks, loader",
    "engine: images": "gathering and normalising",
    "engine: slots": "broadcast, collection, clients' own state, aggregation",
    LIGHTNING: "loops, hooks, transfers",
}
STEP_RANGE = "local steps"


class Stopwatch(Callback):
    """Seconds of each part of a round; what runs inside another part counts for the inner one alone.

    A round goes from the end of the one before to its own end. On a GPU every change of parts waits for the device.

    Attributes:
        rounds: per round the seconds by part.
    """

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._inside = [LIGHTNING]
        self._since = now()

    def _book(self) -> None:
        moment = now()
        self._seconds[self._inside[-1]] += moment - self._since
        self._since = moment

    def enter(self, part: str) -> None:
        """Book the time that follows to ``part``, until ``leave``."""
        self._book()
        self._inside.append(part)

    def leave(self) -> None:
        """Book the time that follows to the part before."""
        self._book()
        self._inside.pop()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time booked."""

        @wraps(function)
        def inner(*arguments: Any, **named: Any) -> Any:
            self.enter(part)
            try:
                return function(*arguments, **named)
            finally:
                self.leave()

        return inner

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """A round ends."""
        self._book()
        self.rounds.append(self._seconds)
        self._seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def attached(self, method: Any, data: Any, server: Any) -> Iterator[None]:
        """Time these objects' functions, and what they call; afterwards all is as it was."""
        functions = [
            (ARITHMETIC, method, "client_loss"),
            (ARITHMETIC, torch.Tensor, "backward"),
            (ARITHMETIC, Visit, "run"),
            (LIGHTNING, LightningOptimizer, "step"),  # the optimizer inside it is arithmetic
            ("engine: steps", method, "training_step"),
            ("engine: plan", data, "train_dataloader"),
            ("engine: plan", RoundPlan, "__init__"),
            ("engine: plan", RoundPlan, "__getitem__"),
            ("engine: images", ImageFeed, "fill"),
            ("engine: slots", server, "on_train_epoch_start"),
            ("engine: slots", server, "send"),
            ("engine: slots", server, "collect"),
            ("engine: slots", server, "on_train_batch_end"),
        ]
        with ExitStack() as stack:
            for part, owner, name in functions:
                stack.enter_context(patch.object(owner, name, self.timed(part, getattr(owner, name))))
            before = register_optimizer_step_pre_hook(lambda *_: self.enter(ARITHMETIC))
            after = register_optimizer_step_post_hook(lambda *_: self.leave())
            stack.callback(before.remove)
            stack.callback(after.remove)
            yield


def parts_of_round(work: Workload, clients: int, width: int, rounds: int) -> dict[str, float]:
    """Seconds by part of the fastest round after the first.

    Args:
        work: what is trained.
        clients: N, with STEPS mini-batches each.
        width: clients at once.
        rounds: at least two.
    """
    method, data = work.method(clients), work.data(clients, STEPS * work.batch, width)
    server, watch = Server(method.make_server()), Stopwatch()
    with watch.attached(method, data, server):
        fit(method, data, rounds, precision=work.precision, callbacks=[server, watch])
    return min(watch.rounds[1:], key=lambda seconds: sum(seconds.values()))


class LastRound(Callback):
    """A profile of the last round.

    Attributes:
        profiler: torch's, stopped after that round.
    """

    def __init__(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Start."""
        if trainer.current_epoch == trainer.max_epochs - 1:
            self.profiler.start()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop."""
        if trainer.current_epoch == trainer.max_epochs - 1:
            self.profiler.stop()


def waits_inside(events: Sequence[FunctionEvent], name: str) -> tuple[int, int]:
    """Count how often the CPU waited for the device and copied from it, within the ranges of this name."""
    ranges = [e.time_range for e in events if e.name == name and e.device_type == DeviceType.CPU]
    inside = [
        event
        for event in events
        if event.device_type == DeviceType.CPU
        and any(span.start <= event.time_range.start <= span.end for span in ranges)
    ]
    waits = sum(event.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize") for event in inside)
    copies = sum("DtoH" in kernel.name for event in inside for kernel in event.kernels)
    return waits, copies


def waits_of_round(work: Workload, clients: int, width: int) -> str:
    """In words, how often a round's local steps wait for the GPU."""
    method, data = work.method(clients), work.data(clients, STEPS * work.batch, width)
    steps = -(-clients // width) * STEPS
    watch = LastRound()

    def marked(step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def inner(*arguments: Any) -> Any:
            with record_function(STEP_RANGE):
                return step(*arguments)

        return inner

    with patch.object(method, "training_step", marked(method.training_step)):
        # The last round neither makes a record nor compares one.
        fit(method, data, rounds_until_repeated(steps), precision=work.precision, callbacks=[watch])
    waits, copies = waits_inside(watch.profiler.events(), STEP_RANGE)
    return f"{waits} waits for the GPU and {copies} copies from it in {steps} steps"


def draw(shares: Sequence[tuple[str, dict[str, float]]], path: Path) -> None:
    """Horizontal bars, one a work, stacked of the shares of a round's parts, in percent.

    Args:
        shares: name of the work, seconds by part.
        path: of the PNG.
    """
    figure = new_figure(8.5, 1.6 + 0.45 * len(shares))
    axes = figure.add_subplot()
    colours = ("#4477aa", "#ee6677", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
    names = [name for name, _ in shares]
    left = [0.0] * len(shares)
    for part, colour in zip(PARTS, colours, strict=True):
        widths = [100 * seconds[part] / sum(seconds.values()) for _, seconds in shares]
        label = f"{part.replace(': ', ', ')}: {PARTS[part]}"
        axes.barh(names, widths, left=left, color=colour, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of a round")
    axes.set_title(f"Where the time of a round goes ({'GPU' if device() == 'cuda' else 'CPU'})", fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    save_figure(figure, path)


def run(folder: Path) -> tuple[str, list[Timing]]:
    """Five works, their parts, and the picture; the first one with all clients together and its steps recorded."""
    rows, shares = [], []
    for work in (tiny(), cnn(), fedvpt("micro_vit", 32), fedvpt(*large_vit()), promptfl(large_clip())):
        width = CLIENTS if device() == "cuda" or work.size < 8 else 1
        seconds = parts_of_round(work, CLIENTS, width, rounds=12 if work.size < 8 else 4)
        shares.append((work.name, seconds))
        note = waits_of_round(work, CLIENTS, width) if device() == "cuda" else ""
        amount = f"a round of {CLIENTS} clients x {STEPS} steps of {work.batch} images, width {width}"
        rows.append(Timing(f"{work.name}: round", amount, sum(seconds.values()), 1.0, note=note))
        rows += [
            Timing(f"{work.name}: {part}", "", seconds[part], seconds[part] / sum(seconds.values()), note=PARTS[part])
            for part in PARTS
        ]
    draw(shares, folder / PICTURE)
    return "Where the time of a round goes: arithmetic, engine, Lightning", rows
