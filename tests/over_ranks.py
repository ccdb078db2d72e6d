"""Runs of the tiny federation over several processes on this machine, started by forking: nothing is imported again."""

import io
import multiprocessing
import os
import socket
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from federation import build, fit, learned
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from benchmark.run.strategy import RanksStrategy

FORK = multiprocessing.get_context("fork")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def over_ranks(count: int, work: Callable[[RanksStrategy], Any]) -> list[Any]:
    """What ``work`` returns, or raises, in each of so many processes, by rank."""
    port, ends, started = free_port(), [], []
    for rank in range(count):
        here, there = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_one, args=(rank, count, port, work, there))
        process.start()
        there.close()
        ends.append(here)
        started.append(process)
    try:
        return [_received(end) for end in ends]
    finally:
        for process in started:
            process.kill()
            process.join()


def _received(end: Connection) -> Any:
    """What a process has sent; None of one that was killed."""
    try:
        return torch.load(end.recv(), weights_only=False) if end.poll(120) else None
    except EOFError:
        return None


def _one(rank: int, count: int, port: int, work: Callable[[RanksStrategy], Any], end: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }

    try:
        made = work(RanksStrategy(timeout=60.0))
    except Exception as error:
        made = error
    stream = io.BytesIO()
    torch.save(made, stream)
    stream.seek(0)
    end.send(stream)
    end.close()


class WholeStore(Callback):
    """Puts the rows of all clients together before the processes part."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep them, and how many bytes lie with each rank."""
        self.rows = {f"store.{key.replace('/', '.')}": rows for key, rows in pl_module.store.whole().items()}
        held = sum(rows.numel() * rows.element_size() for rows in pl_module.store.buffers())
        self.held = pl_module.simulation.ranks.everybody("bytes", held)


def run_over(
    count: int,
    conf: str,
    *overrides: str,
    rounds: int = 2,
    ckpt_path: str | None = None,
    save_to: Path | None = None,
) -> tuple[dict[str, Tensor], list[Any], list[int]]:
    """What a run over so many ranks leaves behind, what was counted, and the bytes of clients' rows by rank."""

    def work(strategy: RanksStrategy) -> Any:
        whole = WholeStore()
        method, data = build(conf, *overrides)
        fit(method, data, rounds, [whole], ckpt_path, save_to, {"devices": count, "strategy": strategy})
        return learned(method) | whole.rows, method.server.traffic.rounds, whole.held

    if count == 1:
        return work(RanksStrategy())
    first, *_ = results = over_ranks(count, work)
    for result in results:
        if not isinstance(result, tuple):
            raise AssertionError(result) from (result if isinstance(result, Exception) else None)
    return first
