"""PLAN's server: each client's last prompts, and the attention over them that makes one prompt of all."""

import torch
from torch import Tensor

from benchmark.client_store import ClientStore
from benchmark.federation import Broadcast, Round, Terms, Uploads, Values
from benchmark.server import ServerRule, weighted_mean
from methods.prompt_aggregator import aggregated

#: Per tower its prompts, and the attention that merges them. A client's own are ``own_...``; those of all clients, as
#: the server sends them, ``all_...``.
AGGREGATORS = {"context": "text_aggregator", "image_prompts": "image_aggregator"}


def trains_prompts(number: int) -> bool:
    """Return whether a round, from 1, is of stage 1: odd ones train prompts, even ones the attention that merges."""
    return number % 2 == 1


def merged(prompts: Values, parameters: Values, heads: int) -> Values:
    """Return the global prompts, per tower [L, n, d]: attention over the clients, or their mean where it has none.

    Args:
        prompts: of K clients, per tower [K, L, n, d].
        parameters: with those of the aggregators.
        heads: of the attention.
    """
    made = {}
    for name, of in AGGREGATORS.items():
        own = {n.removeprefix(f"{of}."): value for n, value in parameters.items() if n.startswith(f"{of}.")}
        made[name] = aggregated(prompts[name], own, heads) if own else prompts[name].mean(0)
    return made


class MergingRule(ServerRule):
    """PLAN's server: keeps each client's last prompts and sends them to all; averages what merges them, and merges.

    Args:
        heads: of the attention.
    """

    takes_stale = False
    merges: Tensor
    known: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def start(self, initial: Values, terms: Terms) -> None:
        """Begin with no client's prompts, and before the first merging."""
        super().start(initial, terms)
        self.prompts = ClientStore({name: initial[f"own_{name}"] for name in AGGREGATORS}, terms.num_clients)
        self.register_buffer("known", torch.zeros(terms.num_clients, dtype=torch.bool))
        self.register_buffer("merges", torch.zeros((), dtype=torch.int64))

    def all_prompts(self) -> Values:
        """Return the prompts of the clients that have sent some, per tower [K, L, n, d]; before, of all the initial."""
        rows = self.known.nonzero().flatten().tolist() or list(range(len(self.known)))
        return {name: self.prompts.all_rows(name)[rows] for name in AGGREGATORS}

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Send the global prompts, or in stage 2 the aggregators and all clients' prompts; at first nothing."""
        if round.clients and not trains_prompts(round.number):
            aggregators = {name: value for name, value in shared.items() if name not in AGGREGATORS}
            return Broadcast(aggregators | {f"all_{name}": rows for name, rows in self.all_prompts().items()})
        if round.clients and not self.merges:
            return Broadcast()
        return Broadcast({name: shared[name] for name in AGGREGATORS})

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Keep the prompts that came; or average the aggregators, all clients alike, and merge the prompts."""
        if "own_context" in uploads.values:
            for name in AGGREGATORS:
                self.prompts.write(name, uploads.clients, uploads.values[f"own_{name}"])
            self.known[list(uploads.clients)] = True
            return {}
        made = weighted_mean(uploads.values, torch.ones_like(uploads.weights))
        self.merges += 1
        like = next(iter(made.values()))
        prompts = {name: rows.to(like) for name, rows in self.all_prompts().items()}
        return made | merged(prompts, made, self.heads)
