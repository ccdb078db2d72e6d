"""Prompt learning in Flower's simulation on Ray, a process a core, as Flower's examples are; prints one line of JSON.

As in its ``quickstart-pytorch``, each client builds the model anew in every round, and trains with a ``DataLoader``. As
in its ``flowertune-vit``, what is frozen is not sent. The head stays with its client, in the context's state.

``python flower_prompts.py --weights=weights.pt --model=vit --cores 2``
"""

import json
import os
import platform
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from prompt_setting import (
    BATCH,
    RATES,
    PromptMeasured,
    PromptSetting,
    make_prompt_images,
    network,
    read_prompt_setting,
    tick,
    trained,
)
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


@cache
def held(**setting: Any) -> tuple[Tensor, Tensor]:
    """All images of this process: made at its first client, kept for the others, as data sets on a disk are."""
    torch.set_num_threads(1)
    return make_prompt_images(PromptSetting(**setting))


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One client's local epoch."""
    config: Any = message.content["config"]
    setting = PromptSetting(**{name: config[name] for name in vars(PromptSetting())})
    images, labels = held(**vars(setting))
    began = tick()
    model = network(setting)
    arrays: Any = message.content["arrays"]
    model.load_state_dict(arrays.to_torch_state_dict(), strict=False)
    if "head" in context.state:
        own: Any = context.state["head"]
        model.load_state_dict(own.to_torch_state_dict(), strict=False)
    building = tick() - began
    first = int(context.node_config["partition-id"]) * setting.images
    rows = slice(first, first + setting.images)
    loader = DataLoader(TensorDataset(images[rows], labels[rows]), batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATES[setting.model])
    total, steps = 0.0, 0
    for x, y in loader:
        loss = F.cross_entropy(model(x.float().div_(127.5).sub_(1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, steps = total + loss.item(), steps + 1
    values = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    shared = {name: values.pop(name) for name in model.shared}
    context.state["head"] = ArrayRecord(values)
    metrics = {
        "num-examples": setting.images,
        "loss": total,
        "steps": steps,
        "building": building,
        "trained": trained(model),
        "process": os.getpid(),
        "threads": torch.get_num_threads(),
    }
    reply = RecordDict({"arrays": ArrayRecord(shared), "metrics": MetricRecord(metrics)})
    return Message(content=reply, reply_to=message)


class Clock:
    """Times rounds; Flower calls ``evaluate`` at the end of each."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.losses: list[float] = []
        self.building = self.began = 0.0
        self.steps = self.trained = self.processes = self.threads = 0

    def collect(self, replies: list[RecordDict], weighted_by_key: str) -> MetricRecord:
        """Collect the clients' reports of a round; return their mean training loss over all steps."""
        reported: list[Any] = [reply["metrics"] for reply in replies]
        self.steps = sum(metrics["steps"] for metrics in reported)
        self.building = sum(metrics["building"] for metrics in reported)
        self.trained = max(metrics["trained"] for metrics in reported)
        self.processes = len({metrics["process"] for metrics in reported})
        self.threads = max(metrics["threads"] for metrics in reported)
        self.losses.append(sum(metrics["loss"] for metrics in reported) / self.steps)
        return MetricRecord({"loss": self.losses[-1]})

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Read the clock."""
        if server_round:
            self.rounds.append(tick() - self.began)
        self.began = tick()
        return None


def run(setting: PromptSetting, cores: int) -> PromptMeasured:
    """Train and measure."""
    # Flower would start Ray itself, but wait for its clients for ever where Ray did not start.
    folder = str(Path(__file__).parent)
    ray.init(num_cpus=cores, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": folder}})
    clock = Clock()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        model = network(setting)
        initial = {name: value for name, value in model.named_parameters() if name in model.shared}
        strategy = FedAvg(
            fraction_train=1.0,
            fraction_evaluate=0.0,
            min_train_nodes=setting.clients,
            min_available_nodes=setting.clients,
            train_metrics_aggr_fn=clock.collect,
        )
        strategy.start(
            grid,
            ArrayRecord(initial),
            num_rounds=setting.rounds,
            train_config=ConfigRecord(vars(setting)),
            evaluate_fn=clock.evaluate,
        )

    run_simulation(
        server_app,
        client_app,
        num_supernodes=setting.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    return PromptMeasured(
        rounds=clock.rounds,
        losses=clock.losses,
        steps=clock.steps,
        parameters=clock.trained,
        building=clock.building,
        processes=clock.processes,
        threads=clock.threads,
        versions={"flwr": version("flwr"), "torch": torch.__version__, "python": platform.python_version()},
    )


if __name__ == "__main__":
    # Imported, not run: Ray's processes then import this module once, and so keep what it caches.
    import flower_prompts

    print(json.dumps(asdict(flower_prompts.run(*read_prompt_setting()))), flush=True)
