"""Other clients' prompts as experts (pFedMoAP): the server that chooses them, and the gate that mixes them."""

import torch
from torch import Tensor, nn

from benchmark.client_store import ClientStore
from benchmark.federation import Broadcast, Round, Terms, Uploads, Values
from benchmark.server import ServerRule


class ExpertRule(ServerRule):
    """FedAvg that also keeps every client's last upload and sends each client the prompts nearest to its own.

    Per client ``experts`` [E, L, w] with a mask [E], where E is the most that anybody can get; nothing where that is 0.
    A client without an upload gets none. A round sees the prompts of the rounds before it; an evaluation
    gives the last round's clients what they were given then, and the others the nearest of now.

    Args:
        count: prompts that a client is sent at most.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def start(self, initial: Values, terms: Terms) -> None:
        """Begin with no uploads."""
        super().start(initial, terms)
        #: who has uploaded until now and before the last round, who was in it, and its number
        self.known: dict[str, list[int]] = {"now": [], "before": [], "last": [], "round": [0]}
        self.prompts = ClientStore(dict.fromkeys(("now", "before"), initial["context"]), terms.num_clients)

    def get_extra_state(self) -> dict[str, list[int]]:
        """Return who has uploaded."""
        return self.known

    def set_extra_state(self, state: dict[str, list[int]]) -> None:
        """Take what ``get_extra_state`` gave."""
        self.known = state

    def was_in(self, client: int, number: int) -> bool:
        """Return whether a client was given the prompts before the last ones in a round; a void one moves none."""
        return client in self.known["last"] and self.known.get("round", [number]) == [number]

    def nearest(self, client: int, when: str) -> list[int]:
        """Return whose prompts were nearest to a client's at a time, nearest first; of equals the lower id."""
        prompts, others = self.prompts.all_rows(when), [other for other in self.known[when] if other != client]
        if client not in self.known[when] or not others:
            return []
        distance = (prompts[others] - prompts[client]).flatten(1).square().sum(1)
        return [others[place] for place in distance.argsort(stable=True)[: self.count].tolist()]

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Send the mean to all, and to each its experts."""
        most = min(self.count, len(self.known["now"]) - 1)
        if most < 1:
            return Broadcast(dict(shared))
        prompts = self.prompts.all_rows("now")
        experts = prompts.new_zeros(len(clients), most, *prompts.shape[1:])
        mask = torch.zeros(experts.shape[:2], dtype=torch.bool)
        for k, client in enumerate(clients):
            when = "before" if not round.clients and self.was_in(client, round.number) else "now"
            chosen = self.nearest(client, when)
            experts[k, : len(chosen)], mask[k, : len(chosen)] = self.prompts.all_rows(when)[chosen], True
        return Broadcast(dict(shared), {"experts": experts}, {"experts": mask})

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Average, and replace the old prompts by the uploads."""
        self.prompts.write("before", range(self.terms.num_clients), self.prompts.all_rows("now"))
        self.prompts.write("now", uploads.clients, uploads.values["context"])
        before = self.known["now"]
        self.known = {
            "now": sorted({*before, *uploads.clients}),
            "before": before,
            "last": list(round.clients),  # also those whose uploads were lost
            "round": [round.number],
        }
        return super().aggregate(round, shared, uploads)


class ExpertAttention(nn.Module):
    """The gate: for every image and class a mixture of the experts' text features.

    Multi-head attention of the image to the experts, scores ``scaling <q, k>``.

    Args:
        width: d.
        heads: h, divides d.
        scaling: instead of the root of h / d.
    """

    def __init__(self, width: int, heads: int, scaling: float) -> None:
        super().__init__()
        self.heads, self.scaling = heads, scaling
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, images: Tensor, experts: Tensor, is_expert: Tensor) -> Tensor:
        """Return mixtures [B, C, d] for images [B, d] of features [X, C, d] of the experts [X] that there are."""
        q = self.query(images).unflatten(-1, (self.heads, -1))
        k, v = (part(experts).unflatten(-1, (self.heads, -1)) for part in (self.key, self.value))
        scores = self.scaling * torch.einsum("bhi,xchi->bchx", q, k)
        weights = scores.masked_fill(~is_expert, -torch.inf).softmax(-1)
        return self.out(torch.einsum("bchx,xchi->bchi", weights, v).flatten(-2))
