"""What ``data.compile_steps`` brings: seconds of a round with each of its modes against none."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmark.engine.compiled_step import CompileMode
from benchmark.errors import ConfigurationError
from benchmark.speed.measure import Row, device, fit, fit_repeated
from benchmark.speed.workloads import Work, cnn, fedvpt, headtune, large_clip, large_vit, promptfl, tiny_vit

CLIENTS, STEPS, ROUNDS = 8, 4, 5


def mode_rows(work: Work, modes: tuple[CompileMode, ...]) -> list[Row]:
    """All clients together, uncompiled and with each mode; a mode whose gradients are wrong is named in the first row.

    Args:
        work: what is trained.
        modes: of ``data.compile_steps``.
    """
    rows: list[Row] = []
    refused = []
    for mode in (None, *modes):
        torch.compiler.reset()
        make = partial(work.made, CLIENTS, STEPS * work.batch, CLIENTS)
        try:
            if mode is None:  # what a user has otherwise: small steps are repeated from a record
                times = fit_repeated(make, STEPS, ROUNDS, work.precision)
            else:
                method, data = make()
                data.compile_steps = mode
                times = fit(method, data, ROUNDS, precision=work.precision)
        except ConfigurationError as error:
            refused.append(f"{mode} refused: {error}")
            continue
        rows.append(
            Row(
                f"{work.name}, {mode or 'not compiled'}",
                f"a round of {CLIENTS} clients x {STEPS} steps of {work.batch} images",
                times.best,
                times.best / rows[0].seconds if rows else 1.0,
                memory=times.memory if device() == "cuda" else None,
                note=f"first round {times.rounds[0]:.3g} s",
            )
        )
    return [replace(rows[0], note="; ".join([rows[0].note, *refused])), *rows[1:]]


def run(folder: Path) -> tuple[str, list[Row]]:
    """Five works, small ones and the papers'."""
    on_gpu = device() == "cuda"
    modes: tuple[CompileMode, ...] = ("default", "reduce-overhead") if on_gpu else ("default",)
    vits = [fedvpt("micro_vit", 32), headtune("micro_vit", 32)] + ([fedvpt(*large_vit())] if on_gpu else [])
    works = (cnn(), tiny_vit(), *vits, promptfl(large_clip()))
    return "Training steps compiled, against not compiled", [row for work in works for row in mode_rows(work, modes)]
