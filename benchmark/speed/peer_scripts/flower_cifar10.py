"""The comparison's federation in Flower's simulation on Ray, a process a core; prints one line of JSON.

``python flower_cifar10.py --cores 2``
"""

import json
import os
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from cifar10_setting import (
    BATCH,
    EVALUATION_BATCH,
    LR,
    Measured,
    Setting,
    device,
    layers,
    make_images,
    normalise,
    now,
    read_setting,
    versions,
)
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

#: Clients that share a GPU.
CLIENTS_PER_GPU = 10


@cache
def held(**numbers: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Network and normalised images of this process: made at its first client, kept for the others."""
    torch.set_num_threads(1)
    images, labels = make_images(Setting(**numbers))
    return nn.Sequential(*layers()).to(device()), normalise(images).to(device()), labels.to(device())


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One client's local epoch."""
    config: Any = message.content["config"]
    setting = Setting(**{name: config[name] for name in vars(Setting())})
    network, x, y = held(**vars(setting))
    arrays: Any = message.content["arrays"]
    network.load_state_dict(arrays.to_torch_state_dict())
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), LR)
    first = int(context.node_config["partition-id"]) * setting.images
    order = first + torch.randperm(setting.images, device=x.device)
    total = torch.zeros((), device=x.device)
    batches = order.split(BATCH)
    for rows in batches:
        loss = F.cross_entropy(network(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    metrics = {
        "num-examples": setting.images,
        "loss": float(total),
        "steps": len(batches),
        "process": os.getpid(),
        "threads": torch.get_num_threads(),
    }
    reply = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=reply, reply_to=message)


class Clock:
    """Times rounds, and the central evaluation apart from them; Flower calls ``evaluate`` at the end of each."""

    def __init__(self, setting: Setting, cores: int) -> None:
        self.setting = setting
        self.cores = cores
        self.network = nn.Sequential(*layers())
        images, labels = make_images(setting)
        split = setting.clients * setting.images
        self.x, self.y = normalise(images[split:]).to(device()), labels[split:].to(device())
        self.rounds: list[float] = []
        self.evaluations: list[float] = []
        self.losses: list[float] = []
        self.accuracy = float("nan")
        self.steps = self.processes = self.threads = 0
        self.began = 0.0

    def collect(self, replies: list[RecordDict], weighted_by_key: str) -> MetricRecord:
        """Collect the clients' reports of a round; return their mean training loss over all steps."""
        reported: list[Any] = [reply["metrics"] for reply in replies]
        self.steps = sum(metrics["steps"] for metrics in reported)
        self.processes = len({metrics["process"] for metrics in reported})
        self.threads = max(metrics["threads"] for metrics in reported)
        self.losses.append(sum(metrics["loss"] for metrics in reported) / self.steps)
        return MetricRecord({"loss": self.losses[-1]})

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Central evaluation, where it is due."""
        if server_round:
            self.rounds.append(now() - self.began)
        if server_round % self.setting.evaluate_every == 0:
            began = now()
            torch.set_num_threads(self.cores)
            network = self.network.to(device()).eval()
            network.load_state_dict(arrays.to_torch_state_dict())
            with torch.no_grad():
                parts = zip(self.x.split(EVALUATION_BATCH), self.y.split(EVALUATION_BATCH), strict=True)
                right = sum((network(x).argmax(1) == y).sum().item() for x, y in parts)
            self.accuracy = right / len(self.y)
            self.evaluations.append(now() - began)
        self.began = now()
        return None


def run(setting: Setting, cores: int) -> Measured:
    """Train and measure."""
    # Flower would start Ray itself, but wait for its clients for ever where Ray did not start.
    folder = str(Path(__file__).parent)
    ray.init(num_cpus=cores, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": folder}})
    torch.manual_seed(0)
    clock = Clock(setting, cores)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=setting.cohort / setting.clients,
            fraction_evaluate=0.0,
            min_train_nodes=setting.cohort,
            min_available_nodes=setting.clients,
            train_metrics_aggr_fn=clock.collect,
        )
        strategy.start(
            grid,
            ArrayRecord(nn.Sequential(*layers()).state_dict()),
            num_rounds=setting.rounds,
            train_config=ConfigRecord(vars(setting)),
            evaluate_fn=clock.evaluate,
        )

    share = 1 / CLIENTS_PER_GPU if device().type == "cuda" else 0.0
    run_simulation(
        server_app,
        client_app,
        num_supernodes=setting.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": share}},
    )
    return Measured(
        rounds=clock.rounds,
        evaluations=clock.evaluations,
        losses=clock.losses,
        steps=clock.steps,
        parameters=sum(p.numel() for p in clock.network.parameters()),
        accuracy=clock.accuracy,
        processes=clock.processes,
        threads=clock.threads,
        versions=versions("flwr", version("flwr")),
    )


if __name__ == "__main__":
    # Imported, not run: Ray's processes then import this module once, and so keep what it caches.
    import flower_cifar10

    print(json.dumps(asdict(flower_cifar10.run(*read_setting()))), flush=True)
