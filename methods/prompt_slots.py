"""Several prompts of a client: how alike they are, a draw of some, and the server's mean of each slot (FedMGP)."""

from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.federation import Broadcast, Round, Terms, Uploads, Values
from benchmark.masked import in_float32
from benchmark.server import ServerRule, weighted_mean
from methods.losses import cosines


@in_float32
def likeness(features: Tensor, measure: str) -> Tensor:
    """Return how alike the groups' features of each item are, a mean over the pairs of groups, [n].

    ``cos``: their cosine. ``l1`` and ``l2``: their negative mean absolute difference, and negative distance.

    Args:
        features: [G, n, e], L2-normalised.
        measure: ``cos``, ``l1`` or ``l2``.
    """
    terms = []
    for i, j in combinations(range(len(features)), 2):
        apart = features[i] - features[j]
        if measure == "cos":
            terms.append(cosines(features[i], features[j]))
        else:
            terms.append(-apart.abs().mean(-1) if measure == "l1" else -(apart.square().sum(-1) + 1e-8).sqrt())
    return torch.stack(terms).mean(0) if terms else features.new_zeros(features.shape[1])


def similarities(prompts: Tensor, memory: Tensor) -> Tensor:
    """Return, per group, the greatest cosine to a slot of the memory, [G]; 0 where a norm is 0.

    Args:
        prompts: [G, ...].
        memory: [s, ...].
    """
    return (F.normalize(prompts.flatten(1), dim=1) @ F.normalize(memory.flatten(1), dim=1).T).amax(1)


def drawn_groups(scores: Tensor, uniform: Tensor, count: int) -> Tensor:
    """Draw groups one after the other without replacement, with probabilities ``softmax(scores)``: [s], as drawn.

    The s greatest of ``scores + Gumbel noise``, in order, are such a draw.

    Args:
        scores: logarithms of the weights, [G].
        uniform: numbers between 0 and 1, [G].
        count: s.
    """
    return (scores - torch.log(-torch.log(uniform.clamp(1e-30, 1 - 1e-7)))).topk(count).indices


class SlotRule(ServerRule):
    """FedMGP's server: a slot is the mean of what its clients drew first, second, ...; it is sent to all of them.

    Args:
        by_images: weigh clients with their numbers of images, or all alike.
    """

    def __init__(self, by_images: bool) -> None:
        super().__init__()
        self.by_images = by_images

    def start(self, initial: Values, terms: Terms) -> None:
        """Begin without slots."""
        super().start(initial, terms)
        self.slots: Values = {}

    def get_extra_state(self) -> Values:
        """Return the slots."""
        return self.slots

    def set_extra_state(self, state: Values) -> None:
        """Take what ``get_extra_state`` gave."""
        self.slots = state

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Send the last round's slots, by which clients choose; an evaluation needs none."""
        return Broadcast(dict(self.slots) if round.clients else {})

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Make the new slots."""
        weights = uploads.weights if self.by_images else uploads.equal_weights
        self.slots = weighted_mean(uploads.values, weights)
        return {}

    def answer(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Send the new slots."""
        return Broadcast(dict(self.slots))
