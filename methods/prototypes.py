"""Class prototypes that weigh class prompts (PEP-FedPT): the weights of an image, and the server."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.federation import Round, Terms, Uploads, Values
from benchmark.server import weighted_mean
from methods.nearestclassmean import SumRule

SUMMED = ("prototypes", "prototype_counts")


def mixing_weights(cosines: Tensor, there: Tensor, prior: Tensor, tau: float) -> Tensor:
    """Return ``softmax_c(cos_c / tau + log prior_c)`` over the classes with a prototype, or the prior if there is none.

    Args:
        cosines: of an image's query with each prototype, [B, C].
        there: which classes have one, bool [C].
        prior: [C], 0 for classes that take no part; not all 0.
        tau: temperature.

    Returns:
        [B, C], at least 0, rows sum up to 1.
    """
    usable = there & (prior > 0)
    near = torch.where(usable, cosines / tau + prior.log(), -torch.inf)
    return torch.where(usable.any(), near, prior.log()).softmax(dim=-1)


class PrototypeRule(SumRule):
    """PEP-FedPT's server: averages prompts and head, and makes each class's prototype of all images of it.

    Prototypes are weighted with images, not with clients: the sum of a class's queries over all clients that have ever
    sent theirs, normalised.

    Args:
        class_average: class prompts are averaged with n_k as all else, or each with the clients' images of its class.
    """

    def __init__(self, class_average: Literal["fedavg", "by_count"] = "fedavg") -> None:
        super().__init__()
        self.class_average = class_average

    def start(self, initial: Values, terms: Terms) -> None:
        """Keep no prototype."""
        super().start({name: initial[name] for name in SUMMED}, terms)

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Return means of prompts and head, and the prototypes with their numbers of images."""
        trained = {name: value for name, value in shared.items() if name not in SUMMED}
        made = weighted_mean(uploads.only(trained).values, uploads.weights)
        if self.class_average == "by_count":
            prompts, counts = uploads.values["class_prompts"], uploads.values["prototype_counts"].double()
            share = (counts / counts.sum(0).clamp(min=1)).to(prompts)[..., None, None]
            held = (counts.sum(0) > 0).to(prompts.device)[:, None, None]
            made["class_prompts"] = torch.where(held, (share * prompts).sum(0), shared["class_prompts"])
        sums = super().aggregate(round, {name: shared[name] for name in SUMMED}, uploads)
        return made | {"prototypes": F.normalize(sums["prototypes"], dim=-1), "prototype_counts": sums[SUMMED[1]]}
