"""What ``data.compile_steps`` brings: seconds of a round with it against without."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmark.errors import ConfigurationError
from benchmark.speed.measure import Row, device, fit, fit_repeated
from benchmark.speed.workloads import Work, cnn, fedvpt, headtune, large_clip, large_vit, promptfl, tiny_vit

CLIENTS, STEPS, ROUNDS = 8, 4, 5


def rows_of(work: Work) -> list[Row]:
    """All clients together, uncompiled and compiled; where that makes wrong gradients, the first row says so alone.

    Args:
        work: what is trained.
    """
    amount = f"a round of {CLIENTS} clients x {STEPS} steps of {work.batch} images"
    make = partial(work.made, CLIENTS, STEPS * work.batch, CLIENTS)
    memory = device() == "cuda"
    # What a user has otherwise: small steps are repeated from a record.
    times = fit_repeated(make, STEPS, ROUNDS, work.precision)
    first = f"first round {times.rounds[0]:.3g} s"
    plain = Row(
        f"{work.name}, not compiled", amount, times.best, 1.0, memory=times.memory if memory else None, note=first
    )
    torch.compiler.reset()
    method, data = make()
    data.compile_steps = "default"
    try:
        times = fit(method, data, ROUNDS, precision=work.precision)
    except ConfigurationError as error:
        return [replace(plain, note=f"{first}; compiling refused: {error}")]
    ratio, first = times.best / plain.seconds, f"first round {times.rounds[0]:.3g} s"
    held = times.memory if memory else None
    return [plain, Row(f"{work.name}, compiled", amount, times.best, ratio, memory=held, note=first)]


def run(folder: Path) -> tuple[str, list[Row]]:
    """Five works, small ones and the papers'."""
    vits = [fedvpt("micro_vit", 32), headtune("micro_vit", 32)]
    vits += [fedvpt(*large_vit())] if device() == "cuda" else []
    works = (cnn(), tiny_vit(), *vits, promptfl(large_clip()))
    return "Training steps compiled, against not compiled", [row for work in works for row in rows_of(work)]
