"""NearestClassMean: the class whose mean feature is nearest, without training: a floor for what is trained."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.contract import Client, MiniBatch, Phase, Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Terms, Uploads, Values
from benchmark.method import FederatedMethod
from benchmark.ranges import NumClients, PositiveInt
from benchmark.server import ServerRule

#: Below every cosine: of a class without a mean.
NEVER = -2.0


def nearness(features: Tensor, means: Tensor, there: Tensor) -> Tensor:
    """Return the cosines of features [B, d] with means [C, d], and less than any cosine where there is none: [B, C]."""
    return torch.where(there, F.normalize(features, dim=-1) @ means.mT, NEVER)


class SumRule(ServerRule):
    """Adds up what the clients send: each of them once, as their images do not change."""

    takes_updates = False
    seen: Tensor

    def start(self, initial: Values, terms: Terms) -> None:
        """Keep nothing of anybody."""
        super().start(initial, terms)
        sums = {name: nn.Parameter(torch.zeros_like(value).double(), False) for name, value in initial.items()}
        self.sums = nn.ParameterDict(sums)
        self.register_buffer("seen", torch.zeros(terms.num_clients, dtype=torch.bool))

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Return the sums over all clients that have ever sent something."""
        new = [place for place, client in enumerate(uploads.clients) if not self.seen[client]]
        self.seen[list(uploads.clients)] = True
        for name in shared:
            self.sums[name].add_(uploads.values[name][new].to(self.sums[name]).sum(0))
        return {name: self.sums[name].to(value) for name, value in shared.items()}


class OwnMeansRule(ServerRule):
    """Is sent nothing, and refuses clients without training images, which have no means of their own."""

    def start(self, initial: Values, terms: Terms) -> None:
        """Look for such clients.

        Raises:
            ConfigurationError: there are some.
        """
        super().start(initial, terms)
        if without := sorted({client for clients in terms.testers.values() for client in clients}):
            raise ConfigurationError(
                f"NearestClassMean: means=own classifies by a client's own training images, and clients {without[:5]} "
                "have none; take means=global"
            )


class ClassSums(FederatedMethod):
    """Base of the methods whose clients send sums over their own images' frozen features, in one round.

    Args:
        num_classes: C.
        num_clients: N.
        backbone: images [B, 3, H, W] to features [B, d], frozen.
    """

    inputs = ("features", "own_images")

    def __init__(self, num_classes: PositiveInt, num_clients: NumClients, backbone: nn.Module) -> None:
        super().__init__(num_clients)
        self.num_classes, self.backbone = num_classes, backbone
        self.width: int = backbone.num_features  # type: ignore[assignment]

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """Return the backbone's features [B, d] of images [B, 3, H, W]."""
        return {"features": self.backbone(x)}

    def own_classes(self, client: Client) -> Tensor:
        """Return the class of each of ONE client's own images, one-hot [n, C]; zeros where there is no image."""
        own = client.own_images
        held = F.one_hot(own["label"].clamp(min=0), self.num_classes) * own["mask"].unsqueeze(1)
        return held.to(self.dtype)

    def local_phases(self) -> list[Phase]:
        """Train nothing."""
        return []

    def make_server(self) -> ServerRule:
        """Return the rule that adds up."""
        return SumRule()


class NearestClassMean(ClassSums):
    """Nearest class mean of a frozen backbone's features: no gradient, exact after one round in which all take part.

    Features f are L2-normalised. Each client sends, of each class, the sum of f over its training images and their
    number; the server adds them up, so that a class has the mean over all images of it, which is normalised. An image
    is of the class whose mean has the largest cosine with it. ``means="own"`` takes the client's own means, among its
    own classes, and sends nothing; ``prior=True`` chooses among the client's own classes too. Message: C d + C numbers
    up, in every round; those of a client count once.

    A trained method below this row has lost something on the way. Further arguments as ``ClassSums``.

    Args:
        means: see above.
        prior: choose among the classes alone of which the client has training images; among all where it has none.
    """

    shared: tuple[str, ...] = ("sums", "counts")

    def __init__(
        self, *arguments: Any, means: Literal["global", "own"] = "global", prior: bool = False, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self.means, self.prior = means, prior
        if means == "own":
            self.shared = ()
        self.sums = nn.Parameter(torch.zeros(self.num_classes, self.width))
        self.counts = nn.Parameter(torch.zeros(self.num_classes))

    def own_sums(self, client: Client) -> tuple[Tensor, Tensor]:
        """Return, of ONE client's images, the sum of each class's features [C, d] and their number [C]."""
        held = self.own_classes(client)
        features = F.normalize(client.own_images["features"], dim=-1)
        return held.mT @ features, held.sum(0)

    def message(self, client: Client, noise: Values) -> Values:
        """Return sums and numbers."""
        sums, counts = self.own_sums(client)
        return {"sums": sums, "counts": counts} if self.shared else {}

    def prepare(self, client: Client, stage: Stage, split: str) -> Values:
        """Return the normalised mean of each class [C, d], and which classes an image may be of [C]."""
        sums, counts = self.own_sums(client) if self.means == "own" else (self.sums, self.counts)
        there = counts > 0
        if self.prior:
            held = client.class_counts > 0
            there = there & (held | ~held.any())
        return {"means": F.normalize(sums, dim=-1), "there": there}

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return the cosines with the means, [B, C]; less than any cosine for classes without one."""
        return nearness(batch.features["features"], client.prepared["means"], client.prepared["there"])

    def forward(self, x: Tensor) -> Tensor:
        """Return the same of images [B, 3, H, W] with the means of all clients."""
        return nearness(self.backbone(x), F.normalize(self.sums, dim=-1), self.counts > 0)

    def make_server(self) -> ServerRule:
        """Return the rule that adds up; with own means there is nothing to add."""
        return SumRule() if self.shared else OwnMeansRule()
