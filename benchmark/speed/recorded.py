"""Recorded steps against the same steps as they are written: on a GPU the record is a CUDA graph."""

from collections.abc import Iterable
from pathlib import Path

from benchmark.speed.measure import Timing
from benchmark.speed.targets import kept_rows
from benchmark.speed.workloads import cnn, fedpgp, fedvpt, headtune, promptfl, tiny_vit


def run(folder: Path, rounds: int = 8, turns: int = 1) -> tuple[str, Iterable[Timing]]:
    """Measure small networks, whose steps are the host's time: frozen ones, and trained ones."""
    frozen = [promptfl("micro_clip"), fedpgp("micro_clip"), headtune("micro_vit", 32), fedvpt("micro_vit", 32)]
    rows = kept_rows([*frozen, cnn(), tiny_vit()], 4, rounds, turns)
    return "Recorded steps against steps as they are written", rows
