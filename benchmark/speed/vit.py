"""The share of the machine's peak throughput that prompt tuning of a frozen ViT uses."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmark.backbones.vit_layers import FEWEST_ROWS
from benchmark.method import FederatedMethod
from benchmark.speed.measure import Timing, device, fit_repeated, matmul_peak
from benchmark.speed.workloads import fedvpt

CLIENTS, STEPS = 8, 2


def forward_operations(method: FederatedMethod, size: int) -> int:
    """Floating-point operations of one image's forward pass in a mini-batch, prompts and head included.

    Args:
        method: on the CPU, not in a run.
        size: side of the image in pixels.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        method(torch.zeros(FEWEST_ROWS, 3, size, size))
    return counter.get_total_flops() // FEWEST_ROWS


def share_row(batch: int, width: int, epochs: int, peak: float) -> Timing:
    """Seconds of one client's step of FedVPT with this machine's ViT, and its share of the peak.

    Args:
        batch: images of a client in one step.
        width: clients stepped together.
        epochs: of a round.
        peak: floating-point operations per second of a matrix product.
    """
    name, size = large_frozen_vit()
    work = fedvpt(name, size, batch, epochs)
    # Backward through frozen weights makes the gradient of the tokens alone, as much work as forward.
    step = 2 * forward_operations(work.method(CLIENTS), size) * batch
    make = partial(work.made, CLIENTS, STEPS * batch, width)
    times = fit_repeated(make, STEPS * epochs * CLIENTS // width, 3, work.precision)
    seconds = times.best / (CLIENTS * STEPS * epochs)
    return Timing(
        f"{work.name}, batch {batch}, width {width}",
        f"one client's step, {step / 1e9:.4g} GFLOP",
        seconds,
        None,
        step / seconds / peak,
        times.memory,
        f"{batch / seconds:.4g} images/s",
    )


def large_frozen_vit() -> tuple[str, int]:
    """ViT-B/16 at 224 px on a GPU, ViT-S/16 at 112 px on a CPU."""
    return ("vit_base_patch16_224", 224) if device() == "cuda" else ("vit_small_patch16_224", 112)


def _rows(settings: Sequence[tuple[int, int]], epochs: int, peak: float) -> Iterator[Timing]:
    """Per mini-batch size and number of clients at once a row; those of the first one's size are compared with it."""
    reference = 0.0
    for batch, width in settings:
        row = share_row(batch, width, epochs, peak)
        reference = reference or row.seconds
        yield replace(row, ratio=row.seconds / reference if batch == settings[0][0] else None)


def run(folder: Path) -> tuple[str, Iterable[Timing]]:
    """Mini-batch size and clients at once, each with its share of the measured peak."""
    on_gpu = device() == "cuda"
    settings = ((64, 1), (64, 2), (64, 4), (64, 8), (16, 1), (128, 1)) if on_gpu else ((16, 1), (16, 4))
    peak = matmul_peak(torch.bfloat16 if on_gpu else torch.float32)
    number = f"{'bfloat16' if on_gpu else 'float32'}, {peak / 1e12:.3g} TFLOP/s"
    title = (
        f"Prompt tuning of a frozen ViT: operations are 2 x forward, the peak is that of a matrix product ({number})"
    )
    return title, _rows(settings, 4 if on_gpu else 1, peak)
