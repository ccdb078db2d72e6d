"""The part of ``test_pretended_gpu`` with its own process: methods on the pretended GPU, and on the CPU to compare."""

import logging
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from federation import build, fit, learned
from lightning.pytorch.callbacks import Callback
from pretended_gpu import PretendedGPU, on_host, register, trainer_settings
from pretended_graph import pretended_graphs
from repeated_steps import repeated_steps
from torch import nn
from torch.utils._pytree import tree_map_only

from benchmark.contract import Client, LocalTraining, MiniBatch
from benchmark.engine.mapping import ClientMap
from benchmark.engine.plan.work import CohortWork
from benchmark.engine.ranks import placed_store
from benchmark.engine.repeat import captured_step, recorded_step
from benchmark.engine.rounds import Server
from benchmark.method import FederatedMethod
from benchmark.run.progress import RoundProgress
from benchmark.speed.measure import RandomImages
from datamodules.federated import FederatedDataModule
from datamodules.partition import IID
from datamodules.transform import ImageTransform
from methods.fedavg import FedAvg

#: Two clients of 7 and 3 images, which do not end together.
TINY = (
    "--data.partition=federation.Short",
    "--data.partition.init_args.num_clients=2",
    "--data.clients_per_round=2",
    "--data.clients_at_once=2",
)
#: Evaluated once, after the last of two rounds.
SETTINGS = {"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2}

#: What no local step may do, on its losses.
FAULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda losses: losses.sum().item(),
    "tolist": lambda losses: losses.tolist(),
    "cpu": lambda losses: losses.cpu(),
    "mask": lambda losses: losses[losses > 0],
    "nonzero": lambda losses: losses.nonzero(),
    "to": lambda losses: torch.zeros(3).to(losses.device),
    "mixed": lambda losses: losses * torch.ones(len(losses)),
}


def prepare_process() -> None:
    """Register the pretended GPU; the rest as ``conftest.py`` does for the tests' own process."""
    register()
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # a loader process that is spawned imports everything anew
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


class ServersState(Callback):
    """Has the server go on after the first round from its state as a checkpoint is read, on the host."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            state = pl_module.server.state_dict()
            pl_module.server.load_state_dict(tree_map_only(torch.Tensor, lambda value: value.detach().cpu(), state))


def on_gpu(
    conf: str, overrides: tuple[str, ...], callbacks: Sequence[Callback] = ()
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the learned values of two rounds on the pretended GPU, and the host's waits in the second round's steps.

    The server's state between them is as if the run had been resumed. The first round is left out, as it moves the
    images and the frozen parts' features to the device.
    """
    method, data = build(conf, *TINY, *overrides)
    waited: list[str] = []
    step, send, collect = FederatedMethod.training_step, Server.send, Server.collect
    between: set[int] = set()

    def watched(self: FederatedMethod, work: CohortWork, batch_idx: int) -> None:
        before = len(gpu.waits)
        step(self, work, batch_idx)
        if self.trainer.current_epoch == 1:
            waited.extend(wait for n, wait in enumerate(gpu.waits[before:], before) if n not in between)

    def left_out(function: Callable[..., Any]) -> Callable[..., Any]:
        """Leave out the waits of the functions that begin and end a cohort."""

        def called(*arguments: Any) -> Any:
            before = len(gpu.waits)
            made = function(*arguments)
            between.update(range(before, len(gpu.waits)))
            return made

        return called

    with (
        PretendedGPU() as gpu,
        patch.object(FederatedMethod, "training_step", watched),
        patch.object(Server, "send", left_out(send)),
        patch.object(Server, "collect", left_out(collect)),
    ):
        shown = {"enable_progress_bar": any(isinstance(callback, RoundProgress) for callback in callbacks)}
        fit(method, data, 2, [*callbacks, ServersState()], settings=SETTINGS | trainer_settings() | shown)
        return on_host(learned(method)), waited


def compare(conf: str, overrides: tuple[str, ...]) -> tuple[dict[str, float], list[str]]:
    """Return the largest difference between the GPU's and the CPU's learned values, by name, and the GPU's waits."""
    found, waited = on_gpu(conf, overrides)
    method, data = build(conf, *TINY, *overrides)
    fit(method, data, 2, settings=SETTINGS)
    expected = learned(method)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].isnan(), value.isnan()) for name, value in expected.items())
    held = {name: value for name, value in expected.items() if value.numel()}
    off = {n: (found[n].double() - value.double()).abs().nan_to_num().max().item() for n, value in held.items()}
    return off, waited


def waits_shown() -> tuple[list[str], int]:
    """The waits of local steps that a progress display is told of, and how many of them it has counted."""
    progress = RoundProgress()
    waited = on_gpu("FedVPT", (), [progress])[1]
    return waited, progress.pace.step


def waits_with(fault: str) -> list[str]:
    """The waits of local steps that each do what none may."""
    mapped = ClientMap.__call__

    def wrong(self: ClientMap, name: str, *arguments: Any, **settings: Any) -> Any:
        made = mapped(self, name, *arguments, **settings)
        if name == "client_loss":
            FAULTS[fault](made[0] if isinstance(made, tuple) else made)
        return made

    with patch.object(ClientMap, "__call__", wrong):
        return on_gpu("FedBABU", ())[1]


def differ_by_place_of_rows(conf: str) -> list[str]:
    """Names of what differs in a bit between a run whose clients' rows lie on the GPU and one where on the host."""
    momenta = {"PFedPT": ("--model.init_args.training.optimizer_state=client",)}.get(conf, ())
    there, _ = on_gpu(conf, momenta)
    with patch.object(placed_store, "ROOM", 0.0):
        host, _ = on_gpu(conf, momenta)
    return [name for name, value in there.items() if not torch.equal(value.nan_to_num(), host[name].nan_to_num())]


def waits_of_round(conf: str, room: bool) -> list[str]:
    """The waits of a whole round without an evaluation, its plan, broadcast, collection and aggregation among them.

    Of the third of three rounds, of which the second is evaluated; with or without room for clients' rows on the GPU.
    """
    method, data = build(conf, *TINY)
    with PretendedGPU() as gpu, patch.object(placed_store, "ROOM", 1.0 if room else 0.0):
        last = _InRound(gpu, 3)
        fit(method, data, 3, [last], settings=SETTINGS | trainer_settings())
    return last.waits


def recorded_round(clients: int, steps: int) -> tuple[list[str], int]:
    """Waits and kernels of a round of clients that go together, each with so many small steps, once these are recorded.

    The network has eight tensors.
    """

    class Small(nn.Module):
        num_features = 8

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, self.layers(x.flatten(1)))

    method = FedAvg(10, clients, Small(), training=LocalTraining(lr=0.1, epochs=1))
    images = RandomImages(4 * steps * clients, 10 * clients, size=4)
    data = FederatedDataModule(images, IID(clients), ImageTransform(), batch_size=4, clients_at_once=clients)
    # In the one before the last no record is made, nor compared.
    rounds = (recorded_step.BEFORE_RECORDING + 2 * recorded_step.TIMED + 2) // steps + 2
    with PretendedGPU() as gpu, patch.object(recorded_step, "WORTHWHILE", float("inf")):  # it has a CPU's clock
        usual = _InRound(gpu, rounds)
        fit(
            method,
            data,
            rounds + 1,
            [usual],
            settings=SETTINGS | {"check_val_every_n_epoch": rounds + 2} | trainer_settings(),
        )
    return usual.waits, usual.kernels


def recorded_frozen(conf: str) -> tuple[dict[str, float], int]:
    """Run with recorded steps on the pretended GPU, and with steps as written on the CPU.

    Returns:
        The largest difference by name, and the number of repeated steps.
    """
    with (
        patch.object(recorded_step, "BEFORE_RECORDING", 1),
        patch.object(recorded_step, "WORTHWHILE", float("inf")),
        repeated_steps() as repeated,
    ):
        found, _ = on_gpu(conf, ("--model.init_args.training.epochs=4",))
    method, data = build(conf, *TINY, "--model.init_args.training.epochs=4")
    with patch.object(recorded_step, "BEFORE_RECORDING", 10**9):
        fit(method, data, 2, settings=SETTINGS)
    off = {name: (found[name].double() - value.double()).abs().max().item() for name, value in learned(method).items()}
    return off, len(repeated)


def captured(conf: str, *overrides: str) -> tuple[list[str], list[int], list[str]]:
    """Names of what differs in a bit if recorded steps are CUDA graphs, and how often each graph was replayed.

    Last what is said of recorded steps that became none.
    """
    said: list[str] = []
    settings = ("--model.init_args.training.epochs=4", *overrides)
    with (
        patch.object(recorded_step, "BEFORE_RECORDING", 1),
        patch.object(recorded_step, "WORTHWHILE", float("inf")),
    ):
        single, _ = on_gpu(conf, settings)
        with (
            pretended_graphs() as graphs,
            patch.object(recorded_step.log, "info", lambda text, *parts: said.append(text % parts)),
        ):
            found, _ = on_gpu(conf, settings)
    differing = [
        name for name, value in single.items() if not torch.equal(value.nan_to_num(), found[name].nan_to_num())
    ]
    return differing, [graph.replays for graph in graphs], [line for line in said if "is no CUDA graph" in line]


@contextmanager
def nothing_held(device: torch.device) -> Iterator[SimpleNamespace]:
    """A stand-in for ``HeldBytes``: a step that holds nothing meanwhile."""
    yield SimpleNamespace(most=0)


def not_captured(why: str) -> tuple[list[str], int]:
    """Return the messages about recorded steps that become no graphs, and the number of replays.

    Args:
        why: ``large``, ``kept``, or ``host``: the step copies a table from the host to the device.
    """
    said: list[str] = []
    table = torch.ones(1)
    client_loss = FedAvg.client_loss

    def with_table(self: FedAvg, client: Client, batch: MiniBatch) -> Any:
        return cast(torch.Tensor, client_loss(self, client, batch)) * table.to(batch.x.device).sum()

    with (
        patch.object(recorded_step, "BEFORE_RECORDING", 1),
        patch.object(recorded_step, "WORTHWHILE", float("inf")),
        patch.object(captured_step, "ROOM", 1.0 if why == "host" else 0.0),
        patch.object(captured_step, "HeldBytes", nothing_held if why == "kept" else captured_step.HeldBytes),
        patch.object(FedAvg, "client_loss", with_table if why == "host" else client_loss),
        patch.object(recorded_step.log, "info", lambda text, *parts: said.append(text % parts)),
        pretended_graphs() as graphs,
    ):
        on_gpu("FedAvg", ("--model.init_args.training.epochs=4",))
    return said, sum(graph.replays for graph in graphs)


class _InRound(Callback):
    """Notes what is waited for in a round, and its kernels.

    Args:
        gpu: that it runs on.
        number: of the round, from 1.
    """

    waits: list[str]
    kernels: int

    def __init__(self, gpu: PretendedGPU, number: int) -> None:
        self._gpu, self._number = gpu, number

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin anew."""
        self._before = (len(self._gpu.waits), self._gpu.kernels)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Take what there is."""
        if trainer.current_epoch + 1 != self._number:
            return
        self.waits, self.kernels = self._gpu.waits[self._before[0] :], self._gpu.kernels - self._before[1]
