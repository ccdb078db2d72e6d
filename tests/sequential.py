"""A federation by hand: client after client, each with a torch optimizer of its own, then a weighted mean."""

from collections.abc import Callable
from typing import Any

import torch
from federation import build
from torch import Tensor

from benchmark.batch import PlannedPhase, RoundPlan

Values = dict[str, Tensor]

#: Four clients, three of them in a round; features are computed in the step, as here.
FEW = ("--data.partition.init_args.num_clients=4", "--data.clients_per_round=3", "--data.cache_features=false")


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
    method.configure_model()
    (phase,) = method.local_phases()
    settings = phase.groups[0]
    shared = {name: method.template(name).detach().clone() for name in method.shared_names}
    kept: dict[int, Values] = {}
    server = method.default_server()
    server.seed, server.training_clients, server.participants = data.seed, list(range(4)), 3
    for round in range(1, rounds + 1):
        selected = server.select(round)
        plan = RoundPlan(selected, data.train_indices, [PlannedPhase(phase.epochs)], 4, False, 1, data.seed, round)
        local: dict[int, Values] = {}
        for client in selected:
            previous = before = kept.get(client, shared)
            values = {name: value.clone().requires_grad_() for name, value in shared.items()}
            own = list(values.values())
            if phase.optimizer == "adam":
                rate = settings.lr * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * (round - 1) / rounds)).item())
                optimizer: Any = torch.optim.Adam(own, rate)
            else:
                optimizer = torch.optim.SGD(own, settings.lr, settings.momentum)
            for batch in (plan[i] for i in range(len(plan))):
                if batch.clients == (client,) and batch.mask.any():
                    rows = batch.index[0][batch.mask[0]]
                    x = data.transform(data.pool.images[rows], None)
                    optimizer.zero_grad()
                    loss(method, values, shared, previous, before, x, data.pool.labels[rows]).backward()
                    before = {name: value.detach().clone() for name, value in values.items()}
                    optimizer.step()
            local[client] = {name: value.detach().clone() for name, value in values.items()}
        kept |= local
        total = sum(len(data.train_indices[c]) for c in selected)
        shared = {n: sum(len(data.train_indices[c]) / total * local[c][n] for c in selected) for n in shared}
    return shared
