"""A federation by hand: client after client, in plain PyTorch, knowing nothing of how the engine steps many at once."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from federation import build
from torch import Tensor, nn

from benchmark.contract import LocalTraining, Stage
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.server import ServerRule

Values = dict[str, Tensor]

#: Four clients, three of them in a round; features are computed in the step, as here.
FEW = ("--data.partition.init_args.num_clients=4", "--data.clients_per_round=3", "--data.cache_features=false")


class Images(NamedTuple):
    """A mini-batch of one client: its phase, its images as the network sees them, their labels and rows of the pool."""

    phase: int
    x: Tensor
    y: Tensor
    rows: Tensor


def mini_batches(data: Any, client: int, round: int, *epochs: int, stage: str = "train") -> Iterator[Images]:
    """The mini-batches of a client in a round (0: in an evaluation), with the tests' batch size of 4.

    Args:
        data: set up.
        client: its id.
        round: from 1.
        epochs: of each local phase.
        stage: what they are for.
    """
    phases = [LocalTraining(lr=0.0, epochs=number).phase() for number in epochs]
    plan = RoundPlan([client], data.train_indices, data.federation.terms, phases, Stage(stage), 1, round)
    for step in (plan[i] for i in range(len(plan.steps))):
        if step.clients:
            yield images_at(data, step.index[0][step.mask[0]], step.phase)


def images_at(data: Any, rows: Any, phase: int = 0) -> Images:
    """Images of these rows of the pool."""
    rows = torch.as_tensor(rows)
    return Images(phase, data.transform(data.pool.images[rows], None), data.pool.labels[rows], rows)


def selected(method: Any, data: Any, round: int) -> list[int]:
    """The clients of a round."""
    data.setup()
    rule = ServerRule()
    rule.start({}, data.federation.terms)
    return sorted(rule.select(round))


def weighted(data: Any, uploads: Mapping[int, Values]) -> Values:
    """Means of what clients upload, weighted with their numbers of training images."""
    total = sum(len(data.train_indices[client]) for client in uploads)
    return {
        name: sum(len(data.train_indices[client]) / total * sent[name] for client, sent in uploads.items())
        for name in next(iter(uploads.values()))
    }


def federate(
    method: Any, data: Any, rounds: int, shared: Values, train: Callable[[int, int, Values], Values]
) -> Values:
    """The shared values after some rounds of FedAvg.

    Args:
        method: says which clients take part.
        data: of the federation.
        rounds: how many.
        shared: the values at the start.
        train: what a client does: ``(client, round, received values) -> uploaded values``.
    """
    for round in range(1, rounds + 1):
        shared = weighted(data, {client: train(client, round, shared) for client in selected(method, data, round)})
    return shared


def values_of(module: nn.Module) -> Values:
    """Copies of a module's parameters, by name."""
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def descend(
    module: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[Images], Tensor], batches: Iterator[Images]
) -> nn.Module:
    """Take an optimizer step on the loss of every mini-batch."""
    for batch in batches:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
    return module


def simulate(
    conf: str,
    rounds: int,
    loss: Callable[[Any, Values, Values, Values, Values, Tensor, Tensor], Tensor],
    *overrides: str,
) -> Values:
    """The shared values after some rounds of a method that shares all it trains, in one phase.

    Args:
        conf: name of the method's tiny configuration; ``FEW`` is added to it.
        rounds: how many.
        loss: of method, values being trained, received values, the client's values at the end of its last
            participation (at first the received ones), its values before its last step (at first in a round those of
            its last participation), images, labels.
        overrides: further arguments.
    """
    method, data = build(conf, *FEW, *overrides)
    data.setup()
    method.join(data)
    (phase,) = method.local_phases()
    settings = phase.groups[0]
    shared = {name: method.get_parameter(name).detach().clone() for name in method.roles.shared}
    kept: dict[int, Values] = {}

    def train(client: int, round: int, shared: Values) -> Values:
        previous = before = kept.get(client, shared)
        values = {name: value.clone().requires_grad_() for name, value in shared.items()}
        own = list(values.values())
        if phase.optimizer == "adam":
            rate = settings.lr * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * (round - 1) / rounds)).item())
            optimizer: torch.optim.Optimizer = torch.optim.Adam(own, rate)
        else:
            optimizer = torch.optim.SGD(own, settings.lr, settings.momentum)
        for batch in mini_batches(data, client, round, phase.epochs):
            optimizer.zero_grad()
            loss(method, values, shared, previous, before, batch.x, batch.y).backward()
            before = {name: value.detach().clone() for name, value in values.items()}
            optimizer.step()
        kept[client] = {name: value.detach().clone() for name, value in values.items()}
        return kept[client]

    return federate(method, data, rounds, shared, train)
