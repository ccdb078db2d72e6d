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
from federation import EACH_ROUND, build, fit, learned
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from benchmark.ranks.meeting import OneFolder
from benchmark.ranks.strategy import RanksStrategy

FORK = multiprocessing.get_context("fork")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def at_a_port() -> dict[str, str]:
    """The environment of processes that a launcher has started, which meet at a port."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def over_ranks(
    count: int, work: Callable[[RanksStrategy], Any], at: dict[str, str] | None = None, timeout: float = 60.0
) -> list[Any]:
    """Run ``work`` in several processes; return what it returns or raises in each, by rank.

    Args:
        count: number of processes.
        work: function of the strategy.
        at: environment that says where they meet; by default a folder, as for processes that ``lightning-cli`` starts.
        timeout: timeout of the strategy, in seconds.
    """
    folder = OneFolder.new()
    given = {"WORLD_SIZE": str(count), **(folder.environment if at is None else at)}
    ends, started = [], []
    for rank in range(count):
        here, there = FORK.Pipe(duplex=False)
        environment = {"LOCAL_RANK": str(rank), **given}
        process = FORK.Process(target=_one, args=(environment, work, timeout, there))
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
        folder.remove()


def _received(end: Connection) -> Any:
    """Return the object that a process has sent; None if it was killed."""
    try:
        return torch.load(end.recv(), weights_only=False) if end.poll(120) else None
    except EOFError:
        return None


def _one(environment: dict[str, str], work: Callable[[RanksStrategy], Any], timeout: float, end: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= environment
    try:
        made = work(RanksStrategy(timeout=timeout))
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
    at: dict[str, str] | None = None,
) -> tuple[dict[str, Tensor], list[Any], list[int]]:
    """Run a federation over so many ranks.

    Returns:
        The learned values with all clients' rows, the counted traffic by round, and the bytes of clients' rows by rank.
    """

    def work(strategy: RanksStrategy) -> Any:
        whole = WholeStore()
        method, data = build(conf, *overrides)
        fit(method, data, rounds, [whole], ckpt_path, save_to, EACH_ROUND | {"devices": count, "strategy": strategy})
        return learned(method) | whole.rows, method.server.traffic.rounds, whole.held

    if count == 1:
        return work(RanksStrategy())
    first, *_ = results = over_ranks(count, work, at)
    for result in results:
        if not isinstance(result, tuple):
            raise AssertionError(result) from (result if isinstance(result, Exception) else None)
    return first
