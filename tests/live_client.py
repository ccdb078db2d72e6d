"""One client of a deployment: the contract and plain PyTorch; no Trainer, no server, no datamodule."""

from dataclasses import replace
from typing import Any

import torch
import yaml
from federation import CONF, TinyImages
from torch import Tensor

import methods
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Client, MiniBatch, Stage
from benchmark.federation import Round, Values
from methods.text_prompt import TRAINING


def constructed(conf: str, **settings: Any) -> Any:
    """A method of the CLIP family with the settings of its tiny configuration, made by its constructor alone."""
    own = yaml.safe_load((CONF / f"{conf}.yaml").read_text())["model"]["init_args"] | settings
    own |= {"clip": PromptedCLIP(), "training": replace(TRAINING, **own["training"])}
    torch.manual_seed(3)
    method = getattr(methods, conf)(11, list(TinyImages.class_names), **own)
    method.set_label_spaces({})
    method.requires_grad_(False)
    return method


def mini_batch(method: Any, start: int = 0, end: int = 12) -> MiniBatch:
    """Some images of the tiny pool, as the backbone takes them, with their features."""
    pool = TinyImages().load()
    x = (pool.images[start:end] / 255 - 0.5) / 0.5
    y = pool.labels[start:end]
    return MiniBatch(x, y, torch.ones(len(y), dtype=torch.bool), features=method.frozen_features(x))


def parameters_of(method: Any) -> Values:
    """Return a method's shared and personal parameters, by name."""
    roles = (*method.shared, *method.personal)
    named = method.named_parameters()
    return {name: value for name, value in named if any(name == r or name.startswith(r + ".") for r in roles)}


def client_of(
    method: Any, received: Values | None = None, stage: Stage = Stage.TRAIN, participated: bool = False
) -> Client:
    """The client whose parameters are the method's own, prepared."""
    own, took_part = parameters_of(method), torch.tensor(participated)
    received = {name: own[name].clone() for name in own if name in method.shared} | (received or {})
    counts = torch.ones(8, dtype=torch.int64)
    client = Client(own, received, counts, Round(1, (0,), 3), took_part)
    with torch.no_grad():
        return replace(client, prepared=method.prepare(client, stage, "train"))


def gradients(method: Any, client: Client, batch: MiniBatch) -> dict[str, Tensor]:
    """Of ``client_loss``, by name; zeros where it does not depend on a parameter."""
    own = {name: value.requires_grad_() for name, value in client.parameters.items()}
    loss = method.client_loss(client, batch)
    made = torch.autograd.grad(loss, list(own.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(own, made, strict=True))


def train(method: Any, received: Values, batch: MiniBatch) -> Values:
    """Train a client for a round, all its images in one mini-batch; returns its parameters."""
    own = parameters_of(method)
    with torch.no_grad():
        for name in set(own) & set(received):
            own[name].copy_(received[name])
    client = client_of(method, received)
    for number, phase in enumerate(method.local_phases()):
        groups = []
        for group in phase.groups:
            params = [v.requires_grad_() for n, v in own.items() if n.split(".")[0] in group.parameters]
            groups.append(
                {"params": params, "lr": group.lr, "momentum": group.momentum, "weight_decay": group.weight_decay}
            )
        optimizer = torch.optim.SGD(groups)
        for _ in range(phase.epochs):
            before = {name: value.detach().clone() for name, value in own.items()}
            optimizer.zero_grad()
            method.client_loss(client, replace(batch, phase=number)).backward()
            optimizer.step()
            if phase.transform is not None:
                update = {name: value.detach() - before[name] for name, value in own.items()}
                for name, value in phase.transform(replace(client, parameters=before), update).items():
                    own[name].data.copy_(before[name] + value)
    return {name: value.detach() for name, value in own.items()}
