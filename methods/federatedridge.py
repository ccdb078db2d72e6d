"""FederatedRidge: the ridge regression of all clients' frozen features, exact after one round."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmark.contract import Client, MiniBatch
from benchmark.federation import Round, Uploads, Values
from benchmark.ranges import PositiveFloat
from methods.nearestclassmean import ClassSums, SumRule


class RidgeRule(SumRule):
    """Adds up ``G = sum f f^T``, ``H = sum f onehot^T`` and the classes' numbers, and solves for the weights.

    Args:
        lam: lambda, as a share of G's mean diagonal.
    """

    def __init__(self, lam: PositiveFloat) -> None:
        super().__init__()
        self.lam = lam

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Return ``W = (G + lambda I)^-1 (H - (sum f) p^T)`` with p the classes' shares of all images, and p."""
        sent = {name: value for name, value in shared.items() if name in ("gram", "cross", "counts")}
        made = super().aggregate(round, sent, uploads)
        gram, cross, counts = (self.sums[name] for name in ("gram", "cross", "counts"))
        if not counts.sum():
            return made  # nobody has sent an image
        share = counts / counts.sum()
        regular = self.lam * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        centred = cross - cross.sum(1, keepdim=True) * share
        weight = torch.linalg.solve(gram + regular, centred)
        return made | {"weight": weight.to(shared["weight"]), "share": share.to(shared["share"])}


class FederatedRidge(ClassSums):
    """Ridge regression from a frozen backbone's features f to one-hot labels, as if all images lay in one place.

    ``W = (G + lambda I)^-1 H`` with ``G = sum f f^T`` and ``H = sum f (onehot(y) - p)^T`` over all clients' training
    images, p the classes' shares. Each client sends its sums, once; the server adds them up in double precision and
    solves. An image is of the class with the largest ``f^T W + p``. Message: d^2 + d C + C numbers up. It is exact
    after one round in which all take part: a trained linear head below it has lost something on the way. Further
    arguments as ``ClassSums``.

    Args:
        lam: lambda, as a share of the mean diagonal of G.
    """

    weight: Tensor
    share: Tensor
    shared = ("gram", "cross", "counts", "weight", "share")

    def __init__(self, *arguments: Any, lam: PositiveFloat = 1.0, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.lam, width = lam, self.width
        shapes: dict[str, tuple[int, ...]] = {
            "gram": (width, width),
            "cross": (width, self.num_classes),
            "counts": (self.num_classes,),
            "weight": (width, self.num_classes),
            "share": (self.num_classes,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(*shape)))

    def message(self, client: Client, noise: Values) -> Values:
        """Return ONE client's sums."""
        held, features = self.own_classes(client), client.own_images["features"]
        there = features * client.own_images["mask"].unsqueeze(1)
        return {"gram": there.mT @ there, "cross": there.mT @ held, "counts": held.sum(0)}

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return what the regression gives, [B, C]."""
        return batch.features["features"] @ self.weight + self.share

    def forward(self, x: Tensor) -> Tensor:
        """Return the same of images [B, 3, H, W]."""
        return self.backbone(x) @ self.weight + self.share

    def make_server(self) -> RidgeRule:
        """Return the rule that solves."""
        return RidgeRule(self.lam)
