"""What happens between rounds: select clients, send to them, and make new shared values of what they upload."""

import torch
from torch import Tensor, nn

from benchmark.federation import Broadcast, Round, Terms, Uploads, Values
from benchmark.ranges import Checked
from benchmark.seeds import numpy_generator

#: Numbers of several clients whose differences are taken at once, in a processor's cache.
TOGETHER = 2**18


def weighted_mean(values: Values, weights: Tensor) -> Values:
    """``sum_k w_k x_k / sum_k w_k`` of every tensor.

    Args:
        values: per name [S, ...].
        weights: [S], not negative, not all zero.
    """
    share = (weights / weights.sum()).tolist()
    made: Values = {}
    for kind in dict.fromkeys(rows.dtype for rows in values.values()):
        flat = {name: rows.reshape(len(rows), -1) for name, rows in values.items() if rows.dtype == kind}
        # Client after client, around the first one's values: identical updates give those values back bit for bit.
        first = torch.cat([rows[0] for rows in flat.values()])
        mean = first.clone()
        together = max(1, TOGETHER // max(1, len(first)))
        for start in range(1, len(share), together):
            away = torch.cat([rows[start : start + together] for rows in flat.values()], dim=1).sub_(first)
            for part, of_client in zip(share[start : start + together], away.unbind(), strict=True):
                mean.add_(of_client, alpha=part)
        parts = mean.split([rows.shape[1] for rows in flat.values()])
        made |= {name: part.view(values[name].shape[1:]) for name, part in zip(flat, parts, strict=True)}
    return {name: made[name] for name in values}


class ServerRule(Checked, nn.Module):
    """FedAvg's server (McMahan et al., AISTATS 2017), and the base of all others.

    Everybody receives the shared values, and the new ones are the mean of the uploads weighted with the clients'
    numbers of training images. A rule is plain PyTorch: what it keeps between rounds lies in its buffers and
    parameters, or in its extra state, so that saving it is nobody's work, and a deployment calls the functions that a
    simulation does.
    """

    terms: Terms

    @property
    def takes_the_mean(self) -> bool:
        """Whether new values are this class's mean: of each parameter by itself, finite where the uploads are.

        A rule that keeps ``aggregate`` may say so: where uploads are many, it is given some parameters at a time.
        """
        return type(self) is ServerRule

    def start(self, initial: Values, terms: Terms) -> None:
        """Make what the rule keeps, before the first round or before a saved state is loaded.

        Args:
            initial: what all clients start from of the shared parameters, and of the personal ones that they upload.
            terms: public facts of the federation; what clients hold is theirs alone.
        """
        self.terms = terms

    def select(self, number: int) -> list[int]:
        """Draw the clients of a round (from 1) without replacement, ascending; the same for every rule."""
        clients, count = self.terms.training_clients, self.terms.participants
        if count == len(clients):
            return list(clients)
        rng = numpy_generator(self.terms.seed, "select", number)
        # By position: an array of all clients would cost more than the rest of a round where there are very many.
        return sorted(clients[place] for place in rng.choice(len(clients), size=count, replace=False))

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Return what these clients receive in a round, or in the evaluation after it.

        Args:
            round: which; in an evaluation it has no clients.
            shared: the shared values.
            clients: the receivers, K of them.
        """
        return Broadcast(common=dict(shared))

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Return the new values of some or all shared parameters, and move the rule's own state."""
        return weighted_mean(uploads.only(shared).values, uploads.weights) if shared else {}

    def adapt(self, round: Round, clients: tuple[int, ...], phase: int, values: Values) -> Values:
        """Answer clients that never train, after a phase of their fitting; the rule itself does not change.

        Args:
            round: the last finished one.
            clients: the cohort, K clients.
            phase: index into ``finetune_phases(new=True)``.
            values: the copies' shared and uploaded parameters after the phase, [K, ...] each.

        Returns:
            New values [K, ...] of some parameters of the copies; nothing by default.
        """
        return {}
